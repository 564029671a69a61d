"""Recorder of a microbatch's passes (train.graphs): each is recorded once as a graph of the device (torch.cuda.graph),
with the addresses that it reads and writes, and launched at once from then on, as PyTorch's `make_graphed_callables`
and Megatron's `CudaGraphManager` do.

Tensors that are written before each pass hold all that differs between passes: data, starts of random numbers, the
divisor of the loss. Sums of gradients keep their memory from step to step. Collectives of a pass are recorded with it,
by all ranks of their groups alike, and their launches are counted at each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from platform.plan.schedule import Action, Kind
from platform.runtime.clock import SectionClock
from platform.runtime.communicator import Communicator, LaunchCounts
from platform.runtime.flat_buffers import FlatBucket
from platform.runtime.parallel_ops import ParallelOps, PassPosition
from platform.runtime.progress import PROGRESS

SECTIONS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward"}  # of the clock, by kind of pass that is recorded
Key = tuple[Kind, bool]  # and whether the pass adds to sums of gradients that are there


class RecordedPass(NamedTuple):
    """Graph of a pass, with the `launches` of its collectives, and of each bucket the parameters that have a gradient
    behind it."""

    graph: torch.cuda.CUDAGraph
    launches: LaunchCounts
    summed: list[frozenset[str]]


class PassRecorder:
    """Records passes of a microbatch on the rank of `communicator`, and replays them. All graphs of a `pool` of memory
    run one after another. `is_recording`: a pass is being recorded."""

    is_recording = _records = False

    def __init__(self, communicator: Communicator, ops: ParallelOps, buckets: Collection[FlatBucket], pool: Any):
        """Prepare to record passes whose operations `ops` executes, with gradients in the trained `buckets`."""
        self._communicator, self._ops, self._buckets, self._pool = communicator, ops, buckets, pool
        self._passes: dict[Key, RecordedPass] = {}
        self._position: PassPosition | None = None  # of all recorded passes

    @contextmanager
    def record_new_passes(self) -> Iterator[None]:
        """Record, within the context, each pass that has no graph yet, and replay none."""
        self._records = True
        try:
            yield
        finally:
            self._records = False

    def run_action(
        self, recorded: Sequence[int], begin: Callable[[int], None], action: Action, compute: Callable[[], None]
    ) -> None:
        """Run an `action` of a schedule by its graph if it is a pass of a `recorded` microbatch that has one, else by
        `compute`. `begin(microbatch)` makes its position the present one, with its data."""
        key = action.kind, action.microbatch > 0
        if action.microbatch not in recorded or not (self._records or key in self._passes):
            return compute()
        if action.kind is Kind.FORWARD:
            begin(action.microbatch)
            self._write_position()
        with self._communicator.clock.time_section(SECTIONS[action.kind]):
            if key not in self._passes:
                self._passes[key] = self._record(action.kind, compute)
            graph, launches, summed = self._passes[key]
            if not self._records:  # else another rank may fail to record, for which collectives would wait
                graph.replay()
                self._communicator.count_launches(launches)
            if action.kind is Kind.BACKWARD:
                for flat, names in zip(self._buckets, summed, strict=True):
                    flat.note_replayed_gradients(names)

    def drop_graphs(self) -> None:
        """Drop the graphs: until then NCCL ends no group whose collectives they hold, not even by an abort."""
        for recorded_pass in self._passes.values():
            recorded_pass.graph.reset()
        self._passes.clear()

    def _write_position(self) -> None:
        """Write the tensors of the present position to the first one's, which recorded passes read."""
        position = self._ops.position
        if self._position is None:
            self._position = replace(position, tensors=dict(position.tensors))
        else:
            torch._foreach_copy_(_list_tensors(self._position), _list_tensors(position))
        self._ops.position = replace(self._position, tensors=dict(self._position.tensors))

    def _record(self, kind: Kind, compute: Callable[[], None]) -> RecordedPass:
        """Record what `compute` launches, which is not executed. Raises RuntimeError for what no graph holds, such as a
        read of the host."""
        for flat in self._buckets:
            flat.keep_sums()
        graph, clock = torch.cuda.CUDAGraph(), self._communicator.clock
        self._communicator.clock, self.is_recording = SectionClock(), True  # events in a graph have no time
        try:
            # other threads may ask their events meanwhile
            how = {"pool": self._pool, "capture_error_mode": "thread_local"}
            with PROGRESS.mark_preparing("record passes"), self._communicator.divert_launches() as launches:
                with torch.cuda.graph(graph, **how):
                    compute()
                    if kind is Kind.BACKWARD:
                        for flat in self._buckets:
                            flat.end_backward_pass()
        finally:
            self._communicator.clock, self.is_recording = clock, False
        return RecordedPass(graph, launches, [flat.summed for flat in self._buckets])


def _list_tensors(position: PassPosition) -> list[Tensor]:
    """Return the tensors that differ between positions of one kind, each once and in one order."""
    blocks = [block for readers in position.inputs.values() for block in readers.values()]
    return list({id(x): x for x in (*blocks, *position.tensors.values())}.values())

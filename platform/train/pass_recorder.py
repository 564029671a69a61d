"""Recorder of a microbatch's passes (train.graphs): each is recorded once as a graph of the device (torch.cuda.graph),
with the addresses that it reads and writes, and launched at once from then on, as PyTorch's `make_graphed_callables`
and Megatron's `CudaGraphManager` do.

Tensors that are written before each pass hold all that differs between passes: data, starts of random numbers, the
divisor of the loss, what comes from a neighbour of the pipeline. Sums of gradients keep their memory from step to step.
Collectives of a pass are recorded with it, by all ranks of their groups alike, and their launches are counted at each
replay; sends and receives between stages are launched around it.

Microbatches of a chunk that are in flight at once have a slot each: graphs and memory of their own. Of 1f1b's first
stage of two, with the slot of each pass: F0:0 F1:1 B0:0 F2:0 B1:1 F3:1 B2:0 B3:1. The first microbatch of a step has
graphs of its own, as its gradients overwrite sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from platform.plan.schedule import Action, Kind
from platform.runtime.clock import SectionClock
from platform.runtime.communicator import Communicator, LaunchCounts
from platform.runtime.parallel_ops import ParallelOps, PassPosition
from platform.runtime.pipeline import ComputePass, Flow
from platform.runtime.progress import PROGRESS
from platform.train.rank_parameters import RankWeights

Slot = tuple[int, int]  # chunk, and which of its microbatches in flight
Summed = dict[tuple[int, Kind], list[frozenset[str]]]  # chunk, kind of backward pass -> parameters by trained bucket
Pools = Mapping[Slot, Any]  # of memory, each made when it is asked for


class RecordedPass(NamedTuple):
    """Graph of a pass, which computes `outputs` of `inputs`, with the `launches` of its collectives."""

    graph: torch.cuda.CUDAGraph
    inputs: Flow
    outputs: Flow
    launches: LaunchCounts


class PassRecorder:
    """Records passes of microbatches on the rank of `communicator`, and replays them. `slots`: chunk -> its
    microbatches in flight at once; graphs of a slot run one after another. `is_recording`: a pass is being recorded."""

    is_recording = _records = False

    def __init__(
        self,
        communicator: Communicator,
        ops: ParallelOps,
        weights: RankWeights,
        slots: Mapping[int, int],
        summed: Summed,
        pools: Pools,
    ):
        """Prepare to record passes whose operations `ops` executes, in memory of `pools`, one by slot. Backward passes
        add to the sums in `weights` the gradients of parameters that `summed` names by chunk and kind."""
        self._communicator, self._ops, self._weights = communicator, ops, weights
        self._slots, self._summed, self._pools = slots, summed, pools
        self._passes: dict[tuple[Slot, Kind, bool], RecordedPass] = {}  # True: of the first microbatch
        self._positions: dict[Slot, PassPosition] = {}  # of all recorded passes
        self._in_flight: dict[Slot, int] = {}  # microbatch

    @contextmanager
    def record_new_passes(self) -> Iterator[None]:
        """Record, within the context, each pass that has no graph yet, and replay none."""
        self._records = True
        try:
            yield
        finally:
            self._records = False

    def run_pass(
        self,
        recorded: Sequence[int],
        begin: Callable[[int, int], None],
        action: Action,
        tensors: Flow,
        compute: ComputePass,
    ) -> Flow:
        """Return what an `action` of a schedule computes of `tensors`. A pass of a `recorded` microbatch that has a
        graph is replayed, another one computed by `compute`. `begin(chunk, microbatch)` makes its position the present
        one, with its data."""
        chunk, microbatch = action.chunk, action.microbatch
        slot = chunk, microbatch % self._slots[chunk]
        key = slot, action.kind, not microbatch
        if microbatch not in recorded or not (self._records or key in self._passes):
            return compute(tensors)
        if action.kind is Kind.FORWARD:
            assert self._in_flight.setdefault(slot, microbatch) == microbatch, "a slot has one microbatch in flight"
            begin(chunk, microbatch)
            self._write_position(slot)
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            self._in_flight.pop(slot)
        if key not in self._passes:
            self._passes[key] = self._record(action, self._pools[slot], tensors, compute)
        recorded_pass = self._passes[key]
        if not self._records:  # else another rank may fail to record, for which collectives would wait
            with self._communicator.clock.time_section("forward" if action.kind is Kind.FORWARD else "backward"):
                self._replay(recorded_pass, tensors)
        if action.kind is not Kind.FORWARD:
            self._weights.note_replayed_gradients(chunk, self._summed[chunk, action.kind])
        return {name: x.clone() for name, x in recorded_pass.outputs.items()}  # the slot's next pass overwrites them

    def _replay(self, recorded_pass: RecordedPass, tensors: Flow) -> None:
        """Launch a recorded pass on `tensors`."""
        _copy_tensors([tensors[name] for name in recorded_pass.inputs], [*recorded_pass.inputs.values()])
        recorded_pass.graph.replay()
        self._communicator.count_launches(recorded_pass.launches)

    def drop_graphs(self) -> None:
        """Drop the graphs: until then NCCL ends no group whose collectives they hold, not even by an abort."""
        for recorded_pass in self._passes.values():
            recorded_pass.graph.reset()
        self._passes.clear()

    def _write_position(self, slot: Slot) -> None:
        """Write the tensors of the present position to the first one's of its slot, which recorded passes read."""
        position = self._ops.position
        first = self._positions.get(slot)
        if first is None:
            first = self._positions[slot] = replace(position, tensors=dict(position.tensors))
        else:
            _copy_tensors(_list_tensors(position), _list_tensors(first))
        self._ops.position = replace(first, tensors=dict(first.tensors))

    def _record(self, action: Action, pool: Any, tensors: Flow, compute: ComputePass) -> RecordedPass:
        """Record what `compute` launches on copies of `tensors`, which is not executed. Raises RuntimeError for what no
        graph holds, such as a read of the host."""
        for flat in self._weights.trained:
            flat.keep_sums()
        inputs = {name: x.detach().clone() for name, x in tensors.items()}
        graph, clock = torch.cuda.CUDAGraph(), self._communicator.clock
        self._communicator.clock, self.is_recording = SectionClock(), True  # events in a graph have no time
        try:
            # other threads may ask their events meanwhile
            how = {"pool": pool, "capture_error_mode": "thread_local"}
            with PROGRESS.mark_preparing("record passes"), self._communicator.divert_launches() as launches:
                with torch.cuda.graph(graph, **how):
                    outputs = compute(inputs)
                    if action.kind is not Kind.FORWARD:
                        self._weights.end_backward_pass(action.chunk, action.kind is not Kind.INPUT)
        finally:
            self._communicator.clock, self.is_recording = clock, False
        return RecordedPass(graph, inputs, outputs, launches)


def _copy_tensors(tensors: list[Tensor], to: list[Tensor]) -> None:
    """Copy each of `tensors`, if any, to the tensor at its place in the list `to`."""
    if tensors:
        torch._foreach_copy_(to, tensors)


def _list_tensors(position: PassPosition) -> list[Tensor]:
    """Return the tensors that differ between positions of one kind, each once and in one order."""
    blocks = [block for readers in position.inputs.values() for block in readers.values()]
    return list({id(x): x for x in (*blocks, *position.tensors.values())}.values())

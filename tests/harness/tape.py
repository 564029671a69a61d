"""A double of torch.cuda.CUDAGraph on the CPU: it records every operation with the memory that it reads and writes, and
replays them on the same memory.

As on a GPU, what is recorded is not executed: what it writes to memory of others is undone. No graph holds memory of
others: where it is gone, a replay fails. What a graph allocates is memory of its pool: other graphs of the pool, whose
recording did not overlap its life, overwrite it. A read of the host fails.

A collective is launched, and waited for, where it was recorded, by what a communicator starts it with: of threads, or
of groups that are as strict as NCCL may be. As in a capture of CUDA, one that was launched outside cannot be waited for
inside, and none is left without a wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from platform.predict import recorded_passes
from platform.runtime import traced_collectives
from platform.runtime.clock import SectionClock
from platform.runtime.communicator import CollectiveHandle, Communicator, run_traced_collective
from tests.harness.launches import arguments

READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero"}  # operations whose result the host needs
NOW = count()  # of the recordings of this process, in operations
OURS = {**traced_collectives._FUNCTIONS, "collective": run_traced_collective._init_fn}
HERE = threading.local()  # `recording`: the one of this thread, if any


@dataclass
class Pooled:
    """Memory that a graph has allocated, by the memory that stands for it in replays, and its life."""

    weak: StorageWeakRef
    memory: torch.UntypedStorage
    born: float
    died: float = inf  # before a recording, if it was gone at its begin


@dataclass
class Pool:
    """What the graphs of a pool have allocated."""

    storages: dict[int, Pooled] = field(default_factory=dict)  # by address, held so that no other gets it

    def note_ends(self) -> None:
        for pooled in self.storages.values():
            if pooled.died == inf and pooled.weak.expired():
                pooled.died = next(NOW)

    def overwrite(self, begin: float, end: float) -> None:
        """What has no life between two times is undefined when what was recorded there is replayed."""
        for pooled in self.storages.values():
            if pooled.died < begin or pooled.born > end:
                torch.empty(0, dtype=torch.uint8).set_(pooled.memory).fill_(0xFF)  # NaN, or -1

    def show(self) -> None:
        """Tensors of the pool that the host still has show what is at their place."""
        for pooled in self.storages.values():
            if not pooled.weak.expired():
                torch.UntypedStorage._new_with_weak_ptr(pooled.weak.cdata).copy_(pooled.memory)


@dataclass
class Place:
    """A tensor by its place in memory."""

    weak: StorageWeakRef | None
    memory: torch.UntypedStorage | None = field(repr=False)
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @cached_property
    def of_pool(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(self.memory, self.offset, self.shape, self.strides)

    def tensor(self) -> Tensor:
        if self.memory is not None:
            return self.of_pool
        assert self.weak and not self.weak.expired(), f"a graph reads or writes memory that is gone: {self}"
        memory = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        return torch.empty(0, dtype=self.dtype).set_(memory, self.offset, self.shape, self.strides)


class TapedGraph:
    """torch.cuda.CUDAGraph. `replayed`: how often; `tape`: its operations."""

    def __init__(self) -> None:
        self.tape: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[tuple[int, Place]]]] = []
        self.flights: dict[int, Callable[[], Any]] = {}  # collectives under way in a replay, by number
        self.pool, self.begin, self.end, self.replayed = Pool(), inf, inf, 0

    def reset(self) -> None:
        self.tape.clear()
        self.end = inf

    def launch(self, number: int, start: Callable[..., Callable[[], Any]], *inputs: Any) -> None:
        self.flights[number] = start(*inputs)

    def wait(self, number: int) -> None:
        self.flights.pop(number)()

    @torch.no_grad()
    def replay(self) -> None:
        assert self.end < inf, "a graph is replayed when it is recorded"
        self.replayed += 1
        self.pool.overwrite(self.begin, self.end)
        for function, args, kwargs, results in self.tape:
            out = function(*resolve(args), **{name: resolve(x) for name, x in kwargs.items()})
            for i, place in results:
                place.tensor().copy_(tree_leaves(out)[i])
        self.pool.show()


def resolve(x: Any) -> Any:
    """An argument with the tensors that are at its places."""
    if isinstance(x, list | tuple):
        return type(x)(resolve(y) for y in x)
    return x.tensor() if isinstance(x, Place) else x


class Recording(TorchDispatchMode):
    """torch.cuda.graph: the context in which a graph is recorded."""

    def __init__(self, graph: TapedGraph, pool: Pool | None = None, capture_error_mode: str = "global"):
        super().__init__()
        self._graph, self._pool = graph, pool or Pool()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # memory of others that is written, and what it held
        self._launched, self._under_way = count(), set[int]()  # collectives

    def __enter__(self) -> Any:
        HERE.recording = self
        self._pool.note_ends()
        self._graph.pool, self._graph.begin = self._pool, next(NOW)
        return super().__enter__()

    def __exit__(self, *why: Any) -> None:
        super().__exit__(*why)
        HERE.recording = None
        for memory, before in self._before.values():
            memory.copy_(before)
        self._before.clear()
        if not why[0]:
            if self._under_way:
                raise RuntimeError("operation failed as the capture has work that no stream waits for: a collective")
            self._graph.end = next(NOW)

    def launch(self, start: partial[Callable[[], Any]]) -> Callable[[], None]:
        """Record the launch of a collective, which `start` would make; return what records the wait for it."""
        number = next(self._launched)
        self._under_way.add(number)
        self._graph.tape.append((self._graph.launch, (number, start.func, *self._places(start.args)), {}, []))
        return partial(self._wait, number)

    def _wait(self, number: int) -> None:
        self._under_way.remove(number)
        self._graph.tape.append((self._graph.wait, (number,), {}, []))

    def _places(self, x: Any) -> Any:
        return tree_map_only(Tensor, self._place, x)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.overloadpacket.__name__
        if function.namespace == "platform":  # collectives of compiled blocks
            super().__enter__()
            try:
                return OURS[name](*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        if name in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        if name == "lift_fresh":  # numbers of the host, which a kernel is given as they are
            if args[0].dim():
                raise RuntimeError("operation not permitted when stream is capturing: a copy from the host")
            args, function = (), args[0].clone
        asked, written = arguments(function, args, kwargs) if args else ({}, set())
        for x in (x for n in written for x in tree_leaves(asked[n]) if isinstance(x, Tensor)):
            self._keep(x)
        recorded = self._places((args, kwargs))
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = function(*args, **kwargs)
        if "empty" in name:  # what a collective would write, which is not executed: numbers that may be indices
            out.zero_()
        results = []
        for i, x in enumerate(tree_leaves(out)):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in inputs:
                storage = x.untyped_storage()
                memory = torch.UntypedStorage(storage.nbytes())
                self._pool.storages[storage._cdata] = Pooled(StorageWeakRef(storage), memory, next(NOW))
                results.append((i, self._place(x)))
        if results or written:
            self._graph.tape.append((function, *recorded, results))
        return out

    def _place(self, x: Tensor) -> Place:
        storage = x.untyped_storage()
        pooled = self._pool.storages.get(storage._cdata)
        where = (None, pooled.memory) if pooled else (StorageWeakRef(storage), None)
        return Place(*where, x.dtype, tuple(x.shape), x.stride(), x.storage_offset())

    def _keep(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage._cdata not in self._pool.storages and storage._cdata not in self._before:
            memory = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._before[storage._cdata] = memory, memory.clone()


def wait_outside(wait: Callable[[], Any]) -> None:
    if getattr(HERE, "recording", None):
        raise RuntimeError("operation not permitted when stream is capturing: it waits for what was launched before")
    wait()


@contextmanager
def recording(device: str = "cpu") -> Iterator[list[TapedGraph]]:
    """Let this kind of device record graphs; the list has all that are made."""
    graphs: list[TapedGraph] = []

    def build_graph() -> TapedGraph:
        graphs.append(TapedGraph())
        return graphs[-1]

    issue = Communicator._issue_collective

    def issue_or_record(self, what, start, input_buffer, finish):
        if recording := getattr(HERE, "recording", None):
            return CollectiveHandle(self.clock, recording.launch(start), finish)
        handle = issue(self, what, start, input_buffer, finish)
        handle._wait = partial(wait_outside, handle._wait)
        return handle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded_passes, "RECORDING", {"cuda", device})
        patch.setattr(Communicator, "_issue_collective", issue_or_record)
        patch.setattr(SectionClock, "is_followed", True)  # compiled blocks issue their collectives so too
        for name, value in {"CUDAGraph": build_graph, "graph": Recording, "graph_pool_handle": Pool}.items():
            patch.setattr(torch.cuda, name, value)
        yield graphs

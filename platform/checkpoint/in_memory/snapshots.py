"""Snapshots of a rank's last two steps in host memory, which its node's other ranks share, and copies for other
domains."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent import futures
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from platform.checkpoint.blocks.box import Box
from platform.checkpoint.blocks.buffer import Buffer
from platform.checkpoint.blocks.placement import Block, HeldTensor, Share
from platform.checkpoint.in_memory.copies import Copy, exchanged
from platform.checkpoint.in_memory.memory_map import MemoryMap
from platform.checkpoint.in_memory.shared_memory import PAGE, SharedMemory, open_node
from platform.parallel.communicator.progress import PROGRESS
from platform.parallel.kept.pinned import lock_pages

Transfer = Callable[[Sequence[tuple[int, Tensor]], Sequence[tuple[int, Tensor]]], None]
"""Sends and receives bytes, (peer, uint8 tensor) each; returns when all that is to be received is there."""

ABANDONED = 1.0  # seconds for a transfer to end once it is interrupted
HEADER = 16 * PAGE  # bytes of a snapshot before its tensors: 1 + the step, or 0; then the values, as JSON


class Snapshot:
    """Training state at one step in the memory of one rank: its `own` parts, the `copies` of parts that it keeps for
    ranks of other domains, and plain data (`values`). All of it lies in the shared memory, with a mark of completeness:
    a process that dies while it writes leaves no `step`.

    `pinned`: `own` is in page-locked memory, for copies from a GPU.
    """

    def __init__(
        self, memory: SharedMemory, at: int, own: Sequence[Share], copies: Sequence[Share], pinned: bool = False
    ):
        """Take the snapshot's place at byte `at` of the shared `memory`, for the rank's `own` parts of the training
        state and the `copies` that it keeps for other ranks; `pinned`: page-locked memory for `own`."""
        self._memory, self._at, self._size = memory, at, self.size(own, copies)
        self._parts, self._pinned = (own, copies), pinned
        memory.grow(at + self._size)
        self._header = memory.map(at, HEADER)
        self._step = torch.frombuffer(self._header, dtype=torch.int64, count=2)  # 1 + the step, bytes of values

    @cached_property
    def own(self) -> Buffer:
        """Return the buffer of this rank's own parts of the training state in the snapshot."""
        data = _mapped(self._memory, self._at + HEADER, _pages(self._parts[0]), self._pinned)
        return Buffer.aligned(self._parts[0], self._pinned, data)

    @cached_property
    def copies(self) -> Buffer:
        """Return the buffer of the parts of other ranks' training state that the snapshot keeps copies of."""
        own, copies = self._parts
        return Buffer(copies, data=_mapped(self._memory, self._at + HEADER + _pages(own), _pages(copies)))

    @staticmethod
    def size(own: Sequence[Share], copies: Sequence[Share]) -> int:
        """Return the bytes of shared memory that a snapshot of these parts of the training state takes."""
        return HEADER + _pages(own) + _pages(copies)

    @property
    def step(self) -> int | None:
        """Return the step whose training state this snapshot in memory holds, None while it is not complete."""
        found = int(self._step[0])
        return found - 1 if found else None

    @property
    def values(self) -> Any:
        """Return the plain data in this snapshot in memory, beside the tensors of the training state."""
        return json.loads(self._header[16 : 16 + int(self._step[1])])

    def begin(self) -> None:
        """Mark this snapshot of the training state in memory as incomplete, before it is overwritten."""
        self._step[0] = 0

    def complete(self, step: int, values: Mapping[str, Any]) -> None:
        """Mark this snapshot in memory as the whole training state of `step`, with the plain data `values`."""
        text = json.dumps(values).encode()
        assert len(text) <= HEADER - 16, f"{len(text)} bytes of values"
        self._header[16 : 16 + len(text)] = text
        self._step[1] = len(text)
        self._step[0] = step + 1  # last: a process may die between any two writes

    def read(self, part: Share) -> Tensor:
        """Return the bytes of a part of the rank's own blocks in the snapshot, uint8 [*extent, bytes of an element]."""
        found = self.own.read(part)
        assert found is not None, f"{part.tensor.name} {part.box} is not in this rank's own memory"
        return found

    def free(self) -> None:
        """Give the memory of this snapshot back to the system; it must not be used any more."""
        self.begin()
        self.__dict__.pop("own", None)
        self.__dict__.pop("copies", None)
        self._memory.free(self._at, self._size)


class NodeSnapshot:
    """Training state at one step in the memory that the ranks of a node share, as one of them reads it, also of ranks
    that have died; of one rank where they share none. `values`: plain data."""

    def __init__(self, buffers: Sequence[Buffer], values: Any):
        """Collect the `buffers` of snapshots of all ranks that share a memory: own blocks before copies, as a copy of a
        part that one of these ranks holds itself is not needed. `values`: plain data."""
        self.values = values
        self._parts: dict[str, dict[Box, Tensor]] = defaultdict(dict)
        for buffer in buffers:
            for (tensor, box), at, end in buffer.places:
                parts = self._parts[tensor.name]
                if not any(box.overlap(other) == box for other in parts):
                    parts[box] = buffer.data[at:end].view(*box.extent, tensor.itemsize)

    def read(self, part: Share, memory: Tensor) -> None:
        """Copy the bytes of a part of a global tensor from snapshots in shared memory into `memory`, uint8 [bytes].
        Raises AssertionError if that memory lacks any of them."""
        out, left = memory.view(*part.box.extent, part.tensor.itemsize), part.box.size
        for box, there in self._parts.get(part.tensor.name, {}).items():
            if left and (common := box.overlap(part.box)):
                out[common.within(part.box)] = there[common.within(box)]
                left -= common.size
        assert not left, f"{part.tensor.name} {part.box} is not in the memory of this node"

    def bytes_of(self, parts: Sequence[Share]) -> Tensor:
        """Return the bytes of several parts of the training state in shared memory, joined in order, uint8 [bytes]."""
        out = torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8)
        for part, memory in zip(parts, out.split([part.nbytes for part in parts]), strict=True):
            self.read(part, memory)
        return out


class _Begun(NamedTuple):
    """Snapshot in memory that has begun: `copied` waits until this rank's own parts are in host memory, `passed_on` is
    the thread that then passes copies on to peers, `complete` marks the snapshot as whole."""

    copied: Callable[[], None]
    passed_on: futures.Future[None]
    complete: Callable[[], None]


class RankSnapshots:
    """Snapshots of one rank in one generation; they outlive its process groups and its model, and the process too, in
    the ranks that share its memory.

    Once two have been taken, they take 2 x its own parts of the state and 2 x its copies of host memory.
    `held`: map of the parts that each rank has. `pinned`: True if own parts are page-locked,
    for state on a GPU.
    """

    def __init__(self, held: MemoryMap, rank: int, mates: Mapping[int, SharedMemory], pinned: bool = False):
        """Prepare the in-memory snapshots of `rank`. `held`: map of the parts that each rank has; `mates`: the memory
        of every rank that shares memory with this one, its own included; `pinned`: page-locked memory for its own
        parts."""
        self.held, self._rank, self._mates, self._pinned = held, rank, mates, pinned
        self._own, (self._sent, self._kept) = held.own(rank), exchanged(held.copies, rank)
        self._outgoing: dict[int, list[tuple[int, list[Tensor]]]] = {}  # place -> (peer, the parts that it keeps)
        self._places: dict[int, Snapshot] = {}  # the snapshots at the two places in memory
        self._order: list[int] = []  # places, that written last at the end
        self._handed = Buffer([])
        self._begun: _Begun | None = None

    @classmethod
    def open(
        cls,
        state: Sequence[HeldTensor],
        nodes: Sequence[Hashable],
        rank: int,
        all_gather: Callable[[Any], list[Any]],
        divided: bool = True,
        pinned: bool = False,
    ) -> RankSnapshots:
        """Find out whether the ranks of every node can share memory, and prepare to take snapshots; all ranks call it
        together. `state` (tensors with the holders of their blocks) and `nodes` (every rank's) are equal on all of
        them; `all_gather`: gathers one value of every rank on all; `divided`: see `MemoryMap`."""
        memory = SharedMemory.create()
        mates = open_node(memory, nodes, rank, all_gather)
        held = MemoryMap(state, nodes, mates is not None, divided)
        return cls(held, rank, mates or {rank: memory}, pinned)

    @property
    def steps(self) -> list[int]:
        """Return the steps of which this rank has a complete in-memory snapshot, in the order of taking."""
        found = (self._places[place].step for place in self._order)
        return [step for step in found if step is not None]

    def at(self, step: int) -> Snapshot:
        """Return this rank's snapshot of the training state after `step`; raises StopIteration if there is none."""
        return next(snapshot for snapshot in self._places.values() if snapshot.step == step)

    def keep_only(self, step: int) -> None:
        """Free every in-memory snapshot of this rank except the one of `step`."""
        for place in self._order:
            if self._places[place].step != step:
                self._outgoing.pop(place)
                self._places.pop(place).free()
        self._order = list(self._places)

    def of_node(self, step: int, distrusted: Collection[int] = ()) -> NodeSnapshot:
        """Return the training state after `step` in the memory that this rank shares with its node, without the
        snapshots of `distrusted` ranks. Raises RuntimeError if one of the others has not completed its snapshot."""
        mates = sorted(self._mates.keys() - set(distrusted), key=lambda mate: mate != self._rank)  # its own first
        found = {mate: next((one for one in self._of(mate) if one.step == step), None) for mate in mates}
        if lacking := [mate for mate, snapshot in found.items() if snapshot is None]:
            raise RuntimeError(f"rank {lacking[0]} holds no snapshot of step {step}")
        snapshots = list(filter(None, found.values()))
        buffers = [*(one.own for one in snapshots), *(one.copies for one in snapshots)]
        return NodeSnapshot([self._handed, *buffers], next((one.values for one in snapshots if one.values), {}))

    def _of(self, mate: int) -> Iterator[Snapshot]:
        """Yield the in-memory snapshots of rank `mate`, this rank or one that shares memory with it."""
        if mate == self._rank:
            yield from self._places.values()
            return
        own, copies = self.held.own(mate), _all(exchanged(self.held.copies, mate)[1])
        for at in (0, Snapshot.size(own, copies)):
            yield Snapshot(self._mates[mate], at, own, copies)

    def take_over(
        self, passed: Sequence[Copy], step: int, rank: int, transfer: Transfer, distrusted: Collection[int] = ()
    ) -> None:
        """Send the parts of in-memory state in `passed` (a result of `handed_over`) that this rank is the sender of,
        and receive those meant for it; all ranks of the call, of which this one is `rank`, do so together before a
        generation in which some survivors have no seat."""
        node = self.of_node(step, distrusted)
        sent, kept = exchanged(passed, rank)
        handed = Buffer(_all(kept))
        outgoing = [(peer, node.bytes_of(parts)) for peer, parts in sent.items()]
        with PROGRESS.waiting("transfer"):
            _transfer(outgoing, kept, handed, transfer)
        self._handed = handed

    def begin(
        self, step: int, blocks: Sequence[Block], values: Callable[[], dict[str, Any]], transfer: Transfer
    ) -> None:
        """Begin to take a snapshot of the training state after `step`: start copying this rank's parts of its `blocks`
        into host memory, and let a thread exchange with peers, once they are there, the parts that they keep for each
        other; all ranks call it together. Neither `blocks` nor what `values` returns may change before `finish`. The
        previous snapshot stays intact even if this one fails."""
        self.abandon()  # one that failed
        place, snapshot = self._next()
        snapshot.begin()
        copied, kept, outgoing = snapshot.own.start(blocks), snapshot.copies, self._outgoing[place]

        def pass_on() -> None:
            """Wait until this rank's part of the snapshot is copied, then exchange the parts that peers keep."""
            copied()
            _transfer([(peer, _together(parts)) for peer, parts in outgoing], self._kept, kept, transfer)

        thread = futures.ThreadPoolExecutor(1, "snapshot")
        passed = thread.submit(pass_on)
        thread.shutdown(wait=False)  # it ends with the transfer
        self._begun = _Begun(copied, passed, lambda: snapshot.complete(step, values()))

    def finish(self) -> None:
        """Finish the in-memory snapshot that `begin` has begun, on all ranks; raise what its thread raised."""
        if self._begun:
            self._begun.copied()  # first the device, which is what the caller says that it waits for
            with PROGRESS.waiting("transfer"):
                self._begun.passed_on.result()
            self._begun.complete()
        self._begun = None

    @property
    def begun(self) -> bool:
        """Return True if `begin` has begun a snapshot of the training state that is not finished."""
        return self._begun is not None

    def abandon(self) -> None:
        """Give up the in-memory snapshot that `begin` has begun, whose transfer was interrupted; free its tensors."""
        begun, self._begun = self._begun, None
        if begun:
            futures.wait([begun.passed_on], ABANDONED)  # not for ever: gloo may have forgotten a message

    def _next(self) -> tuple[int, Snapshot]:
        """Return the place (0 or 1) of the snapshot that `begin` may overwrite, and that snapshot, now last in order:
        an incomplete one, a new one if there are fewer than two, or the older of the two."""
        torn = [place for place in self._order if self._places[place].step is None]
        new = [place for place in (0, 1) if place not in self._places]
        place = (torn or new or self._order)[0]
        if place not in self._places:
            self._places[place] = snapshot = self._lay_out(place)
            self._outgoing[place] = [(to, [snapshot.read(p) for p in parts]) for to, parts in self._sent.items()]
        self._order = [*(other for other in self._order if other != place), place]
        return place, self._places[place]

    def _lay_out(self, place: int) -> Snapshot:
        """Construct this rank's in-memory snapshot number `place`, 0 or 1, over its part of the shared memory."""
        copies = _all(self._kept)
        at = place * Snapshot.size(self._own, copies)
        return Snapshot(self._mates[self._rank], at, self._own, copies, self._pinned)


def _pages(parts: Sequence[Share]) -> int:
    """Return the bytes of whole memory pages that these parts of an in-memory snapshot take."""
    return -(-sum(part.nbytes for part in parts) // PAGE) * PAGE


def _mapped(memory: SharedMemory, at: int, count: int, pinned: bool = False) -> Tensor:
    """Map `count` bytes of a snapshot's shared memory from byte `at` on, uint8 [count]; `pinned`: page-locked."""
    if not count:
        return torch.zeros(0, dtype=torch.uint8)
    there = memory.map(at, count)
    return lock_pages(there) if pinned else torch.frombuffer(there, dtype=torch.uint8)


def _all(kept: Mapping[int, Sequence[Share]]) -> list[Share]:
    """List the parts of the training state that a rank keeps for others, by sender, as one list."""
    return [part for parts in kept.values() for part in parts]


def _transfer(
    sent: Sequence[tuple[int, Tensor]], kept: Mapping[int, Sequence[Share]], buffer: Buffer, transfer: Transfer
) -> None:
    """Send the parts of a snapshot that peers keep, and receive the parts kept for them here (sender -> parts) into
    `buffer`, which holds just these; all ranks call it together."""
    sizes = [sum(part.nbytes for part in parts) for parts in kept.values()]
    transfer(sent, list(zip(kept, buffer.data[: sum(sizes)].split(sizes), strict=True)) if sizes else [])


def _together(parts: Sequence[Tensor]) -> Tensor:
    """Join the bytes of a snapshot's parts for one peer into a flat uint8 message: a view if they are adjacent in
    memory, as they are unless types or senders alternate, else a copy."""
    flat = [part.reshape(-1) for part in parts]
    for part, after in zip(flat, flat[1:], strict=False):
        if part.data_ptr() + part.numel() != after.data_ptr():
            return torch.cat(flat)
    return flat[0].as_strided((sum(part.numel() for part in flat),), (1,))

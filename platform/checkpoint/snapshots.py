"""Snapshots of a rank's last two steps in host memory, which its node's other ranks share, and copies for other
domains.

`assign_copies`: parts that only one failure domain holds are kept by ranks of other domains too. `SharedMemory` can be
mapped by other processes of the machine, and kept when its own has died. `MemoryMap`: the parts of the state in each
rank's memory, and their readers.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from platform.checkpoint.blocks import Block, Box, JoinedBlocks, Share, State, join_chains
from platform.checkpoint.buffer import HostBuffer, Messages
from platform.runtime.pinned_memory import lock_pages
from platform.runtime.progress import PROGRESS

Parts = Sequence[Share]  # blocks of the training state, or parts of them


class Copy(NamedTuple):
    """Part [first, last) of a chain that `sender` holds and of which `receiver` keeps a copy in its host memory."""

    chain: JoinedBlocks
    first: int
    last: int
    sender: int
    receiver: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of training state in this copy in a peer's memory."""
        return self.last - self.first

    @property
    def tensor_parts(self) -> list[Share]:
        """Return the blocks of global tensors, or parts of them, in this copy in a peer's memory."""
        return self.chain.shares_of_byte_range(self.first, self.last)


def assign_copies(chains: Sequence[JoinedBlocks], domains: Sequence[Hashable]) -> list[Copy]:
    """Assign one in-memory copy, at a rank of another failure domain, of all training state that only ranks of one
    domain hold, so that the state survives the loss of any one domain. `domains`: the domain of every rank.

    The result is equal on all ranks, and as balanced as possible: with N ranks, n of them in domain D, and b bytes that
    only D holds, a rank keeps L = max(sum of b / N, b / (N - n) of any D) bytes, and at most LARGEST_ROW more. Method:
    lay the domains' bytes end to end on a circle of N x L; give every rank an arc of L, in the order of the domains;
    turn the arcs until no domain keeps its own bytes. As b <= L x (N - n), the largest turn that any domain needs suits
    all.
    """
    lines: dict[Hashable, list[Copy]] = {domain: [] for domain in domains}  # of each domain, still without a receiver
    for chain in chains:
        if len({domains[rank] for rank in chain.holders}) == 1:
            for member, sender in enumerate(chain.holders):
                share = chain.replica_byte_range(member, len(chain.holders))
                lines[domains[sender]].append(Copy(chain, *share, sender, -1))
    if len(lines) < 2:
        return []
    members = {one: [rank for rank, domain in enumerate(domains) if domain == one] for one in lines}
    order = [rank for ranks in members.values() for rank in ranks]
    sizes = {domain: sum(part.nbytes for part in line) for domain, line in lines.items()}
    total = sum(sizes.values())
    arc = max(-(-b // n) for b, n in [(total, len(order))] + [(sizes[d], len(order) - len(members[d])) for d in lines])
    turn = before = at = 0
    for domain, size in sizes.items():
        at += size
        turn = max(turn, at - arc * before)
        before += len(members[domain])
    assigned, at = [], 0
    for part in (part for line in lines.values() for part in line if part.nbytes):
        chain, first, last, *_ = part
        one, end = (at - turn) // arc, (at + part.nbytes - turn - 1) // arc
        cuts = (chain.nearest_row_start(first + number * arc + turn - at) for number in range(one + 1, end + 1))
        ends = [first, *(min(max(cut, first), last) for cut in cuts), last]
        for number, a, b in zip(range(one, end + 1), ends, ends[1:], strict=False):
            if a < b:
                assigned.append(Copy(chain, a, b, part.sender, order[number % len(order)]))
        at += part.nbytes
    return assigned


def find_copy_peers(copies: Iterable[Copy], rank: int) -> set[int]:
    """Return the ranks that keep in-memory copies of the state for `rank`, or whose copies it keeps; `copies`: all."""
    return {end for copy in copies if rank in (pair := (copy.sender, copy.receiver)) for end in pair} - {rank}


def map_exchanged_parts(copies: Iterable[Copy], rank: int) -> tuple[dict[int, list[Share]], dict[int, list[Share]]]:
    """Map the peers of `rank` to the parts of the state that they keep in memory for it, and to the parts that it keeps
    for them; `copies`: all copies in peers' memory."""
    sent: dict[int, list[Share]] = defaultdict(list)
    kept: dict[int, list[Share]] = defaultdict(list)
    for copy in copies:
        if copy.sender == rank:
            sent[copy.receiver] += copy.tensor_parts
        elif copy.receiver == rank:
            kept[copy.sender] += copy.tensor_parts
    return sent, kept


PAGE = max(mmap.ALLOCATIONGRANULARITY, mmap.PAGESIZE)


class SharedMemory:
    """File without a name, in host memory, that processes of one user and machine can map. It lasts until the last of
    them that has opened it has ended, so that nothing is left behind."""

    def __init__(self, file: int):
        """Wrap the descriptor of an open file without a name, which holds snapshots in host memory."""
        self._file = os.fdopen(file, "rb+", buffering=0)

    @classmethod
    def create(cls) -> SharedMemory:
        """Create an empty shared memory for snapshots, a file without a name that only this user can open."""
        if not hasattr(os, "memfd_create"):
            return cls(os.dup(tempfile.TemporaryFile().fileno()))  # no Linux: other processes will not find it
        memory = cls(os.memfd_create("snapshots"))
        os.fchmod(memory._file.fileno(), 0o600)
        return memory

    @property
    def address(self) -> list[int]:
        """Return where other processes find the snapshots' memory: [process id, file descriptor, device, inode]."""
        file_status = os.fstat(self._file.fileno())
        return [os.getpid(), self._file.fileno(), file_status.st_dev, file_status.st_ino]

    @classmethod
    def open_address(cls, address: Sequence[int]) -> SharedMemory | None:
        """Open the snapshots' shared memory of another process at its `address`; None if it is not to be found from
        here, as where the two see other processes, or belong to other users."""
        process, number, device, inode = map(int, address)
        path = f"/proc/{process}/fd/{number}"
        try:
            before = os.stat(path)  # another process may have this number here: nothing of it is opened
            if (before.st_dev, before.st_ino) != (device, inode):
                return None
            memory = cls(os.open(path, os.O_RDWR))
        except OSError:
            return None
        return memory if memory.address[2:] == [device, inode] else None

    def extend_size(self, count: int) -> None:
        """Make this memory for snapshots `count` bytes long, zeros at first; pages are taken when they are written."""
        if os.fstat(self._file.fileno()).st_size < count:
            os.truncate(self._file.fileno(), count)

    def map_bytes(self, at: int, count: int) -> mmap.mmap:
        """Map `count` bytes (at least 1) of the snapshots' memory into the process, from `at`, a multiple of PAGE."""
        return mmap.mmap(self._file.fileno(), count, offset=at)

    def free_bytes(self, at: int, count: int) -> None:
        """Give `count` bytes of the snapshots' memory back to the system, from `at`, a multiple of PAGE; now zeros."""
        if hasattr(mmap, "MADV_REMOVE") and count:
            with self.map_bytes(at, count) as mapping:
                mapping.madvise(mmap.MADV_REMOVE)


def open_node_memories(
    memory: SharedMemory, nodes: Sequence[Hashable], rank: int, all_gather: Callable[[Any], list[Any]]
) -> dict[int, SharedMemory] | None:
    """Open the memories of snapshots of all ranks of this rank's node: rank -> memory, its own included; None if any
    rank of the job cannot open its node's. All ranks call it together. `nodes`: every rank's node; `all_gather`:
    gathers one value of every rank on all."""
    addresses = all_gather(memory.address)
    mates = [mate for mate, node in enumerate(nodes) if node == nodes[rank]]
    memories = {mate: memory if mate == rank else SharedMemory.open_address(addresses[mate]) for mate in mates}
    opened = {mate: mate_memory for mate, mate_memory in memories.items() if mate_memory}
    return opened if all(all_gather(len(opened) == len(memories))) else None


class MemoryMap:
    """Map of the snapshots that the ranks of one generation hold of a step; equal on all of them.

    `memories`: the memory of each rank's snapshots. Where the ranks of a node share memory, it is the node's: each can
    read what any of them has written, also after that one is dead. Else every rank has one of its own. If `divided`,
    ranks of one memory that hold the same blocks write an equal part of them each; else each writes all that it holds,
    as one of them may turn out to be damaged. A part that only one failure domain has is copied to others (`copies`);
    domains are the nodes or, where there is one node, what can be lost there: a memory or, where ranks may be
    distrusted, a rank. `base`: chains of the frozen weights of adapters, of which no rank has copies.
    """

    def __init__(self, state: State, nodes: Sequence[Hashable], shared: bool, divided: bool = True, base: State = ()):
        """Make the map of in-memory snapshots. `state`: the tensors of the training state, with the ranks that hold
        their blocks, `base`: the frozen ones of adapters; `nodes`: the node of every rank; `shared`: True if the ranks
        of each node share memory; `divided`: True if these ranks divide what they hold alike, instead of writing all of
        it each."""
        self.state, self.chains, self.shared = state, join_chains(state), shared
        self.base = join_chains(base)
        self.memories: Sequence[Hashable] = nodes if shared else range(len(nodes))
        self._divided = shared and divided
        domains = self.memories if self._divided else range(len(nodes))
        self.copies = assign_copies(self.chains, nodes if len(set(nodes)) > 1 else domains)
        self._held = defaultdict(list)  # rank -> its chains
        for chain in self.chains:
            for rank in chain.holders:
                self._held[rank].append(chain)

    def parts_to_snapshot(self, rank: int) -> list[Share]:
        """Return the parts of its own blocks of the training state that `rank` writes into its snapshot in memory."""
        parts: list[Share] = []
        for chain in self._held[rank]:
            alike = [holder for holder in chain.holders if self.memories[holder] == self.memories[rank]]
            part = chain.replica_byte_range(alike.index(rank), len(alike)) if self._divided else (0, chain.nbytes)
            parts += chain.shares_of_byte_range(*part)
        return parts

    def map_readers(self, seats: Mapping[int, int], distrusted: Collection[int] = ()) -> dict[int, tuple[int, ...]]:
        """Map each rank to another mesh's ranks that can read its in-memory snapshots; `seats`: rank here -> there."""
        assert not (distrusted and self._divided), "who may be distrusted keeps all that it holds"
        new_ranks: dict[Hashable, list[int]] = defaultdict(list)
        for old, new in seats.items():
            new_ranks[self.memories[old]].append(new)
        ranks_by_memory = {memory: tuple(sorted(ranks)) for memory, ranks in new_ranks.items()}
        return {r: () if r in distrusted else ranks_by_memory.get(memory, ()) for r, memory in enumerate(self.memories)}


Transfer = Callable[[Messages, Messages], None]
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
        self, memory: SharedMemory, at: int, parts_to_snapshot: Parts, copied_parts: Parts, pinned: bool = False
    ):
        """Take the snapshot's place at byte `at` of the shared `memory`, for the `parts_to_snapshot` of the rank's
        training state and the `copied_parts` that it keeps for other ranks; `pinned`: page-locked memory for the
        former."""
        self._memory, self._at, self._size = memory, at, self.count_bytes(parts_to_snapshot, copied_parts)
        self._parts, self._pinned = (parts_to_snapshot, copied_parts), pinned
        memory.extend_size(at + self._size)
        self._header = memory.map_bytes(at, HEADER)
        self._step = torch.frombuffer(self._header, dtype=torch.int64, count=2)  # 1 + the step, bytes of values

    @cached_property
    def own_buffer(self) -> HostBuffer:
        """Return the buffer of this rank's own parts of the training state in the snapshot."""
        data = _map_tensor(self._memory, self._at + HEADER, _count_page_bytes(self._parts[0]), self._pinned)
        return HostBuffer.build_aligned(self._parts[0], self._pinned, data)

    @cached_property
    def copies_buffer(self) -> HostBuffer:
        """Return the buffer of the parts of other ranks' training state that the snapshot keeps copies of."""
        parts_to_snapshot, copied_parts = self._parts
        start = self._at + HEADER + _count_page_bytes(parts_to_snapshot)
        return HostBuffer(copied_parts, data=_map_tensor(self._memory, start, _count_page_bytes(copied_parts)))

    @staticmethod
    def count_bytes(parts_to_snapshot: Parts, copied_parts: Parts) -> int:
        """Return the bytes of shared memory that a snapshot of these parts of the training state takes."""
        return HEADER + _count_page_bytes(parts_to_snapshot) + _count_page_bytes(copied_parts)

    @property
    def step(self) -> int | None:
        """Return the step whose training state this snapshot in memory holds, None while it is not complete."""
        stored_step = int(self._step[0])
        return stored_step - 1 if stored_step else None

    @property
    def values(self) -> Any:
        """Return the plain data in this snapshot in memory, beside the tensors of the training state."""
        return json.loads(self._header[16 : 16 + int(self._step[1])])

    def mark_incomplete(self) -> None:
        """Mark this snapshot of the training state in memory as incomplete, before it is overwritten."""
        self._step[0] = 0

    def mark_complete(self, step: int, values: Mapping[str, Any]) -> None:
        """Mark this snapshot in memory as the whole training state of `step`, with the plain data `values`."""
        text = json.dumps(values).encode()
        assert len(text) <= HEADER - 16, f"{len(text)} bytes of values"
        self._header[16 : 16 + len(text)] = text
        self._step[1] = len(text)
        self._step[0] = step + 1  # last: a process may die between any two writes

    def view_part(self, part: Share) -> Tensor:
        """Return the bytes of a part of the rank's own blocks in the snapshot, uint8 [*extent, bytes of an element]."""
        view = self.own_buffer.view_part(part)
        assert view is not None, f"{part.tensor.name} {part.box} is not in this rank's own memory"
        return view

    def free_memory(self) -> None:
        """Give the memory of this snapshot back to the system; it must not be used any more."""
        self.mark_incomplete()
        self.__dict__.pop("own_buffer", None)
        self.__dict__.pop("copies_buffer", None)
        self._memory.free_bytes(self._at, self._size)


class NodeSnapshot:
    """Training state at one step in the memory that the ranks of a node share, as one of them reads it, also of ranks
    that have died; of one rank where they share none. `values`: plain data."""

    def __init__(self, buffers: Sequence[HostBuffer], values: Any, base: Iterable[tuple[Share, Tensor]] = ()):
        """Collect the `buffers` of snapshots of all ranks that share a memory: own blocks before copies, as a copy of a
        part that one of these ranks holds itself is not needed. `values`: plain data; `base`: parts that never
        change, with their bytes."""
        self.values = values
        self._parts: dict[str, dict[Box, Tensor]] = defaultdict(dict)
        for (tensor, box), stored in base:
            self._parts[tensor.name][box] = stored
        for buffer in buffers:
            for (tensor, box), at, end in buffer.places:
                parts = self._parts[tensor.name]
                if not any(box.intersect_box(other) == box for other in parts):
                    parts[box] = buffer.data[at:end].view(*box.extent, tensor.itemsize)

    def read_part(self, part: Share, memory: Tensor) -> None:
        """Copy the bytes of a part of a global tensor from snapshots in shared memory into `memory`, uint8 [bytes].
        Raises AssertionError if that memory lacks any of them."""
        target, missing = memory.view(*part.box.extent, part.tensor.itemsize), part.box.num_elements
        for box, stored in self._parts.get(part.tensor.name, {}).items():
            if missing and (common := box.intersect_box(part.box)):
                target[common.relative_slices(part.box)] = stored[common.relative_slices(box)]
                missing -= common.num_elements
        assert not missing, f"{part.tensor.name} {part.box} is not in the memory of this node"

    def join_parts(self, parts: Parts) -> Tensor:
        """Return the bytes of several parts of the training state in shared memory, joined in order, uint8 [bytes]."""
        joined = torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8)
        for part, memory in zip(parts, joined.split([part.nbytes for part in parts]), strict=True):
            self.read_part(part, memory)
        return joined


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
    `held`: map of the parts that each rank has. `base`: this rank's blocks of what never changes, in the memory where
    it computes. `pinned`: True if own parts are page-locked, for state on a GPU.
    """

    base: Sequence[Block] = ()

    def __init__(self, held: MemoryMap, rank: int, mates: Mapping[int, SharedMemory], pinned: bool = False):
        """Prepare the in-memory snapshots of `rank`. `held`: map of the parts that each rank has; `mates`: the memory
        of every rank that shares memory with this one, its own included; `pinned`: page-locked memory for its own
        parts."""
        self.held, self._rank, self._mates, self._pinned = held, rank, mates, pinned
        self._own, (self._sent, self._kept) = held.parts_to_snapshot(rank), map_exchanged_parts(held.copies, rank)
        self._outgoing: dict[int, list[tuple[int, list[Tensor]]]] = {}  # place -> (peer, the parts that it keeps)
        self._places: dict[int, Snapshot] = {}  # the snapshots at the two places in memory
        self._order: list[int] = []  # places, that written last at the end
        self._handed = HostBuffer([])
        self._begun: _Begun | None = None

    @classmethod
    def open(
        cls,
        state: State,
        nodes: Sequence[Hashable],
        rank: int,
        all_gather: Callable[[Any], list[Any]],
        divided: bool = True,
        pinned: bool = False,
        base: State = (),
    ) -> RankSnapshots:
        """Find out whether the ranks of every node can share memory, and prepare to take snapshots; all ranks call it
        together. `state` (tensors with the holders of their blocks) and `nodes` (every rank's) are equal on all of
        them; `all_gather`: gathers one value of every rank on all; `divided`, `base`: see `MemoryMap`."""
        memory = SharedMemory.create()
        mates = open_node_memories(memory, nodes, rank, all_gather)
        held = MemoryMap(state, nodes, mates is not None, divided, base)
        return cls(held, rank, mates or {rank: memory}, pinned)

    @property
    def complete_steps(self) -> list[int]:
        """Return the steps of which this rank has a complete in-memory snapshot, in the order of taking."""
        steps = (self._places[place].step for place in self._order)
        return [step for step in steps if step is not None]

    def find_snapshot(self, step: int) -> Snapshot:
        """Return this rank's snapshot of the training state after `step`; raises StopIteration if there is none."""
        return next(snapshot for snapshot in self._places.values() if snapshot.step == step)

    def keep_only_step(self, step: int) -> None:
        """Free every in-memory snapshot of this rank except the one of `step`."""
        for place in self._order:
            if self._places[place].step != step:
                self._outgoing.pop(place)
                self._places.pop(place).free_memory()
        self._order = list(self._places)

    def open_node_snapshot(self, step: int, distrusted: Collection[int] = ()) -> NodeSnapshot:
        """Return the training state after `step` in the memory that this rank shares with its node, without the
        snapshots of `distrusted` ranks. Raises RuntimeError if one of the others has not completed its snapshot."""
        mates = sorted(self._mates.keys() - set(distrusted), key=lambda mate: mate != self._rank)  # its own first
        snapshots = []
        for mate in mates:
            if (snapshot := next((s for s in self._iterate_mate_snapshots(mate) if s.step == step), None)) is None:
                raise RuntimeError(f"rank {mate} holds no snapshot of step {step}")
            snapshots.append(snapshot)
        buffers = [*(one.own_buffer for one in snapshots), *(one.copies_buffer for one in snapshots)]
        return NodeSnapshot([self._handed, *buffers], snapshots[0].values, self._iterate_base_parts())

    def _iterate_base_parts(self) -> Iterator[tuple[Share, Tensor]]:
        """Yield this rank's blocks of what never changes, without padding, and their bytes, as a snapshot has them."""
        tensors = {tensor.name: tensor for chain in self.held.base for tensor, _ in chain.blocks}
        for name, box, weights in self.base:
            if real := box.intersect_box(Box.whole_tensor(tensors[name].shape)):
                numbers = weights[real.relative_slices(box)].contiguous().view(-1).view(torch.uint8)
                yield Share(tensors[name], real), numbers.view(*real.extent, tensors[name].itemsize)

    def move_base_to_host(self) -> None:
        """Move this rank's blocks of what never changes to host memory, to make room for the next generation's."""
        self.base = [block._replace(tensor=block.tensor.cpu()) for block in self.base]

    def _iterate_mate_snapshots(self, mate: int) -> Iterator[Snapshot]:
        """Yield the in-memory snapshots of rank `mate`, this rank or one that shares memory with it."""
        if mate == self._rank:
            yield from self._places.values()
            return
        parts_to_snapshot = self.held.parts_to_snapshot(mate)
        copied_parts = _flatten_parts(map_exchanged_parts(self.held.copies, mate)[1])
        for at in (0, Snapshot.count_bytes(parts_to_snapshot, copied_parts)):
            yield Snapshot(self._mates[mate], at, parts_to_snapshot, copied_parts)

    def exchange_handovers(
        self, handovers: Sequence[Copy], step: int, rank: int, transfer: Transfer, distrusted: Collection[int] = ()
    ) -> None:
        """Send the parts of in-memory state in `handovers` (a result of `handed_over`) that this rank is the sender of,
        and receive those meant for it; all ranks of the call, of which this one is `rank`, do so together before a
        generation in which some survivors have no seat."""
        node = self.open_node_snapshot(step, distrusted)
        sent, kept = map_exchanged_parts(handovers, rank)
        handed = HostBuffer(_flatten_parts(kept))
        outgoing = [(peer, node.join_parts(parts)) for peer, parts in sent.items()]
        with PROGRESS.mark_waiting("transfer"):
            _transfer_parts(outgoing, kept, handed, transfer)
        self._handed = handed

    def begin_snapshot(
        self,
        step: int,
        blocks: Sequence[Block],
        values: Callable[[], dict[str, Any]],
        transfer: Transfer,
        after: torch.cuda.Event | None = None,
    ) -> None:
        """Begin to take a snapshot of the training state after `step`: start copying this rank's parts of its `blocks`
        into host memory, and let a thread exchange with peers, once they are there, the parts that they keep for each
        other; all ranks call it together. Neither `blocks` nor what `values` returns may change before
        `finish_snapshot`. The previous snapshot stays intact even if this one fails. `after`: the end of the work that
        has changed the state, on a GPU; by default of all that is queued by now."""
        self.abandon_snapshot()  # one that failed
        place, snapshot = self._choose_place()
        snapshot.mark_incomplete()
        copied, kept, outgoing = (
            snapshot.own_buffer.start_copy(blocks, after),
            snapshot.copies_buffer,
            self._outgoing[place],
        )

        def exchange_copies() -> None:
            """Wait until this rank's part of the snapshot is copied, then exchange the parts that peers keep."""
            copied()
            _transfer_parts([(peer, _join_message(parts)) for peer, parts in outgoing], self._kept, kept, transfer)

        thread = futures.ThreadPoolExecutor(1, "snapshot")
        passed = thread.submit(exchange_copies)
        thread.shutdown(wait=False)  # it ends with the transfer
        self._begun = _Begun(copied, passed, lambda: snapshot.mark_complete(step, values()))

    def finish_snapshot(self) -> None:
        """Finish the in-memory snapshot that `begin` has begun, on all ranks; raise what its thread raised."""
        if self._begun:
            self._begun.copied()  # first the device, which is what the caller says that it waits for
            with PROGRESS.mark_waiting("transfer"):
                self._begun.passed_on.result()
            self._begun.complete()
        self._begun = None

    @property
    def has_begun(self) -> bool:
        """Return True if `begin` has begun a snapshot of the training state that is not finished."""
        return self._begun is not None

    def abandon_snapshot(self) -> None:
        """Give up the in-memory snapshot that `begin` has begun, whose transfer was interrupted; free its tensors."""
        begun, self._begun = self._begun, None
        if begun:
            futures.wait([begun.passed_on], ABANDONED)  # not for ever: gloo may have forgotten a message

    def _choose_place(self) -> tuple[int, Snapshot]:
        """Return the place (0 or 1) of the snapshot that `begin` may overwrite, and that snapshot, now last in order:
        an incomplete one, a new one if there are fewer than two, or the older of the two."""
        torn = [place for place in self._order if self._places[place].step is None]
        new = [place for place in (0, 1) if place not in self._places]
        place = (torn or new or self._order)[0]
        if place not in self._places:
            copied_parts = _flatten_parts(self._kept)
            at = place * Snapshot.count_bytes(self._own, copied_parts)
            snapshot = Snapshot(self._mates[self._rank], at, self._own, copied_parts, self._pinned)
            self._places[place] = snapshot
            self._outgoing[place] = [(to, [snapshot.view_part(p) for p in parts]) for to, parts in self._sent.items()]
        self._order = [*(other for other in self._order if other != place), place]
        return place, self._places[place]


def _count_page_bytes(parts: Parts) -> int:
    """Return the bytes of whole memory pages that these parts of an in-memory snapshot take."""
    return -(-sum(part.nbytes for part in parts) // PAGE) * PAGE


def _map_tensor(memory: SharedMemory, at: int, count: int, pinned: bool = False) -> Tensor:
    """Map `count` bytes of a snapshot's shared memory from byte `at` on, uint8 [count]; `pinned`: page-locked."""
    if not count:
        return torch.zeros(0, dtype=torch.uint8)
    mapping = memory.map_bytes(at, count)
    return lock_pages(mapping) if pinned else torch.frombuffer(mapping, dtype=torch.uint8)


def _flatten_parts(kept: Mapping[int, Parts]) -> list[Share]:
    """List the parts of the training state that a rank keeps for others, by sender, as one list."""
    return [part for parts in kept.values() for part in parts]


def _transfer_parts(sent: Messages, kept: Mapping[int, Parts], buffer: HostBuffer, transfer: Transfer) -> None:
    """Send the parts of a snapshot that peers keep, and receive the parts kept for them here (sender -> parts) into
    `buffer`, which holds just these; all ranks call it together."""
    sizes = [sum(part.nbytes for part in parts) for parts in kept.values()]
    transfer(sent, list(zip(kept, buffer.data[: sum(sizes)].split(sizes), strict=True)) if sizes else [])


def _join_message(parts: Sequence[Tensor]) -> Tensor:
    """Join the bytes of a snapshot's parts for one peer into a flat uint8 message: a view if they are adjacent in
    memory, as they are unless types or senders alternate, else a copy."""
    flat = [part.reshape(-1) for part in parts]
    for part, after in zip(flat, flat[1:], strict=False):
        if part.data_ptr() + part.numel() != after.data_ptr():
            return torch.cat(flat)
    return flat[0].as_strided((sum(part.numel() for part in flat),), (1,))

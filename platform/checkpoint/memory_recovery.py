"""Recovery from host memory: which blocks the survivors of a failure can read, and restoring them under any plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from math import prod

from torch import Tensor

from platform.boundary.sealed_blocks import LARGEST_BLOCK
from platform.checkpoint.blocks import Block, JoinedBlocks, Piece, Share, State
from platform.checkpoint.moves import ALONE, World, clear_padding, exchange_pieces
from platform.checkpoint.snapshots import Copy, MemoryMap, assign_copies

Read = Callable[[Share, Tensor], None]
"""Copies the bytes of a part of a global tensor that this rank can read into memory, uint8 [bytes]."""


def find_surviving_chains(
    chains: Sequence[JoinedBlocks], kept_copies: Sequence[Copy], readers: Mapping[int, tuple[int, ...]]
) -> list[JoinedBlocks]:
    """Return the training state left in memory after a failure, as chains of tensor blocks with the ranks that can read
    them; a chain that no rank can read is replaced by the copies of its parts.

    `chains`: blocks held before, by old rank; `kept_copies`: their copies; `readers`: old rank -> ranks in the result
    that can read its memory.
    """
    copies_by_chain: dict[int, list[Copy]] = defaultdict(list)
    for copy in kept_copies:
        copies_by_chain[id(copy.chain)].append(copy)
    blocks_by_readers: dict[tuple[int, ...], list[Share]] = defaultdict(list)
    for chain in chains:
        if chain_readers := tuple(sorted({new for old in chain.holders for new in readers.get(old, ())})):
            blocks_by_readers[chain_readers] += chain.blocks
            continue
        for copy in copies_by_chain[id(chain)]:
            if copy_readers := readers.get(copy.receiver, ()):
                blocks_by_readers[copy_readers] += copy.tensor_parts
    return [JoinedBlocks(ranks, blocks) for ranks, blocks in blocks_by_readers.items()]


def list_lost_tensors(state: State, survived: Sequence[JoinedBlocks]) -> list[str]:
    """Return the names of the training `state`'s tensors that are not whole in the memory that survived a failure."""
    surviving_elements: dict[str, int] = defaultdict(int)
    for chain in survived:
        for tensor, box in chain.blocks:
            surviving_elements[tensor.name] += box.num_elements
    return [tensor.name for tensor in state if surviving_elements[tensor.name] < prod(tensor.shape)]


def list_unrecoverable_tensors(held: MemoryMap, alive: Collection[int], distrusted: Collection[int] = ()) -> list[str]:
    """Return the tensors that ranks `alive` cannot recover from snapshots in memory, `distrusted` ones left out."""
    readers = held.map_readers({rank: rank for rank in alive}, distrusted)
    return list_lost_tensors(held.state, find_surviving_chains(held.chains, held.copies, readers))


Keepers = dict[frozenset[object], set[object]]


def map_keepers(held: MemoryMap, distrusted: Collection[int] = ()) -> Keepers:
    """Map each set of memories (nodes or ranks) with the same parts of the state to the memories with their copies."""
    memories = [None if rank in distrusted else memory for rank, memory in enumerate(held.memories)]
    memories_by_chain = {id(chain): frozenset(memories[rank] for rank in chain.holders) for chain in held.chains}
    copy_keepers: Keepers = {places: set() for places in memories_by_chain.values()}
    for copy in held.copies:
        copy_keepers[memories_by_chain[id(copy.chain)]].add(memories[copy.receiver])
    return copy_keepers


def is_recoverable(keepers: Keepers, alive: Set[object]) -> bool:
    """Return True if memories `alive`, of nodes or ranks, have all state; `keepers`: result of `map_keepers`."""
    return all(not alive.isdisjoint(places) or (having and having <= alive) for places, having in keepers.items())


def assign_handovers(survived: Sequence[JoinedBlocks], stays: Sequence[bool]) -> list[Copy]:
    """Assign state in memory that only leaving ranks can read to staying ones (`stays`), as copies to be sent."""
    return assign_copies([chain for chain in survived if not any(stays[rank] for rank in chain.holders)], stays)


def recover_state(
    survived: Sequence[JoinedBlocks], read: Read, state: State, blocks: Sequence[Block], world: World
) -> None:
    """Fill this rank's `blocks` from the training state that survivors of a failure can read in memory; all ranks call
    it together. Padding, beyond the global tensor, becomes zero.

    `survived`: chains that ranks can read (a result of `find_surviving_chains`, nothing lost); `state`: tensors with
    the holders of their blocks under the new plan; both equal on all ranks. A rank reads all parts that it can by
    itself; the ranks that can read a part that others need each send an equal share.
    """
    clear_padding(state, blocks)

    def fetch_parts(pieces: Sequence[Piece[Share]], into: Sequence[Tensor]) -> None:
        """Fill each tensor of `into` with the wanted piece of training state from this rank's snapshot in memory."""
        for part, memory in zip(pieces, into, strict=True):
            read(part.source, memory)

    own_pieces = _iterate_own_pieces([chain for chain in survived if world.rank in chain.holders], blocks)
    exchange_pieces(([[piece]] for piece in own_pieces), fetch_parts, [], blocks, ALONE)
    if all(len(chain.holders) == world.size for chain in survived):
        return
    placed_bytes = sum(box.num_elements * t.itemsize * len(ranks) for t in state for box, ranks in t.holders.items())
    count = -(-placed_bytes // max(LARGEST_BLOCK, world.budget * world.size))
    turns = _iterate_send_rounds(survived, {block.name for block in blocks}, world, count)
    exchange_pieces(turns, fetch_parts, state, blocks, world)


def _iterate_own_pieces(chains: Sequence[JoinedBlocks], blocks: Sequence[Block]) -> Iterator[Piece[Share]]:
    """Yield the parts of this rank's `blocks` of training state that lie in `chains`, surviving memory that it can
    read."""
    blocks_by_name: dict[str, list[Block]] = defaultdict(list)
    for block in blocks:
        blocks_by_name[block.name].append(block)
    for chain in chains:
        for tensor, box in chain.blocks:
            for block in blocks_by_name.get(tensor.name, ()):
                if part := box.intersect_box(block.box):
                    yield Piece(tensor.name, tensor.dtype, part, Share(tensor, part))


def _iterate_send_rounds(
    survived: Sequence[JoinedBlocks], names: Collection[str], world: World, count: int
) -> Iterator[list[list[Piece[Share]]]]:
    """Yield `count` turns of a recovery from memory: the pieces that every rank sends to others in each, about an equal
    part of all that it has to. Pieces of other ranks than this one are left out if they belong to none of the tensors
    `names`."""
    ranges_by_sender: list[list[tuple[JoinedBlocks, int, int]]] = [[] for _ in range(world.size)]
    holders_by_chain = {id(chain): frozenset(chain.holders) for chain in survived}
    needed = {id(chain): any(tensor.name in names for tensor, _ in chain.blocks) for chain in survived}
    for chain in survived:
        for member, sender in enumerate(chain.holders):
            ranges_by_sender[sender].append((chain, *chain.replica_byte_range(member, len(chain.holders))))
    for turn in range(count):
        pieces: list[list[Piece[Share]]] = [[] for _ in ranges_by_sender]
        for sender, parts in enumerate(ranges_by_sender):
            total, before = sum(last - first for _, first, last in parts), 0
            begin, end = (total * number // count for number in (turn, turn + 1))
            for chain, first, last in parts:
                size = last - first
                if (sender == world.rank or needed[id(chain)]) and before < end and begin < before + size:
                    places = (min(max(first + at - before, first), last) for at in (begin, end))
                    a, b = (min(max(chain.nearest_row_start(at), first), last) for at in places)
                    for share in chain.shares_of_byte_range(a, b, None if sender == world.rank else names):
                        tensor, box = share
                        pieces[sender].append(Piece(tensor.name, tensor.dtype, box, share, holders_by_chain[id(chain)]))
                before += size
        yield pieces

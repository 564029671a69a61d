"""Recovery from host memory: which blocks the survivors of a failure can read, and restoring them under any plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from math import prod

from torch import Tensor

from platform.boundary.sealed_blocks import LARGEST_BLOCK
from platform.checkpoint.blocks import Block, Chain, HeldTensor, Piece, Share
from platform.checkpoint.moves import ALONE, World, clear_padding, pass_on
from platform.checkpoint.snapshots import Copy, MemoryMap, copies

Read = Callable[[Share, Tensor], None]
"""Copies the bytes of a part of a global tensor that this rank can read into memory, uint8 [bytes]."""


def surviving(chains: Sequence[Chain], kept: Sequence[Copy], readers: Mapping[int, tuple[int, ...]]) -> list[Chain]:
    """Return the training state left in memory after a failure, as chains of tensor blocks with the ranks that can read
    them; a chain that no rank can read is replaced by the copies of its parts.

    `chains`: blocks held before, by old rank; `kept`: their copies; `readers`: old rank -> ranks in the result that can
    read its memory.
    """
    by: dict[int, list[Copy]] = defaultdict(list)
    for copy in kept:
        by[id(copy.chain)].append(copy)
    found: dict[tuple[int, ...], list[Share]] = defaultdict(list)
    for chain in chains:
        if here := tuple(sorted({new for old in chain.holders for new in readers.get(old, ())})):
            found[here] += chain.blocks
            continue
        for copy in by[id(chain)]:
            if there := readers.get(copy.receiver, ()):
                found[there] += copy.parts
    return [Chain(ranks, blocks) for ranks, blocks in found.items()]


def lost(state: Sequence[HeldTensor], survived: Sequence[Chain]) -> list[str]:
    """Return the names of the training `state`'s tensors that are not whole in the memory that survived a failure."""
    left: dict[str, int] = defaultdict(int)
    for chain in survived:
        for tensor, box in chain.blocks:
            left[tensor.name] += box.size
    return [tensor.name for tensor in state if left[tensor.name] < prod(tensor.shape)]


def lost_to(held: MemoryMap, alive: Collection[int], distrusted: Collection[int] = ()) -> list[str]:
    """Return the tensors that ranks `alive` cannot recover from snapshots in memory, `distrusted` ones left out."""
    readers = held.readers({rank: rank for rank in alive}, distrusted)
    return lost(held.state, surviving(held.chains, held.copies, readers))


Keepers = dict[frozenset[object], set[object]]


def keepers(held: MemoryMap, distrusted: Collection[int] = ()) -> Keepers:
    """Map each set of memories (nodes or ranks) with the same parts of the state to the memories with their copies."""
    memories = [None if rank in distrusted else memory for rank, memory in enumerate(held.memories)]
    having = {id(chain): frozenset(memories[rank] for rank in chain.holders) for chain in held.chains}
    found: Keepers = {places: set() for places in having.values()}
    for copy in held.copies:
        found[having[id(copy.chain)]].add(memories[copy.receiver])
    return found


def is_recoverable(found: Keepers, alive: Set[object]) -> bool:
    """Return True if the memories `alive`, of nodes or ranks, have all training state; `found`: result of `keepers`."""
    return all(not alive.isdisjoint(places) or (having and having <= alive) for places, having in found.items())


def handed_over(survived: Sequence[Chain], stays: Sequence[bool]) -> list[Copy]:
    """Assign state in memory that only leaving ranks can read to staying ones (`stays`), as copies to be sent."""
    return copies([chain for chain in survived if not any(stays[rank] for rank in chain.holders)], stays)


def recover(
    survived: Sequence[Chain],
    read: Read,
    state: Sequence[HeldTensor],
    blocks: Sequence[Block],
    world: World,
) -> None:
    """Fill this rank's `blocks` from the training state that survivors of a failure can read in memory; all ranks call
    it together. Padding, beyond the global tensor, becomes zero.

    `survived`: chains that ranks can read (a result of `surviving`, nothing lost); `state`: tensors with the holders of
    their blocks under the new plan; both equal on all ranks. A rank reads all parts that it can by itself; the ranks
    that can read a part that others need each send an equal share.
    """
    clear_padding(state, blocks)

    def fetch(wanted: Sequence[Piece[Share]], into: Sequence[Tensor]) -> None:
        """Fill each tensor of `into` with the wanted piece of training state from this rank's snapshot in memory."""
        for part, memory in zip(wanted, into, strict=True):
            read(part.source, memory)

    own = _own([chain for chain in survived if world.rank in chain.holders], blocks)
    pass_on(([[piece]] for piece in own), fetch, [], blocks, ALONE)
    if all(len(chain.holders) == world.size for chain in survived):
        return
    placed = sum(box.size * t.itemsize * len(ranks) for t in state for box, ranks in t.holders.items())
    count = -(-placed // max(LARGEST_BLOCK, world.budget * world.size))
    turns = _turns(survived, {block.name for block in blocks}, world, count)
    pass_on(turns, fetch, state, blocks, world)


def _own(chains: Sequence[Chain], blocks: Sequence[Block]) -> Iterator[Piece[Share]]:
    """Yield the parts of this rank's `blocks` of training state that lie in `chains`, surviving memory that it can
    read."""
    mine: dict[str, list[Block]] = defaultdict(list)
    for block in blocks:
        mine[block.name].append(block)
    for chain in chains:
        for tensor, box in chain.blocks:
            for block in mine.get(tensor.name, ()):
                if part := box.overlap(block.box):
                    yield Piece(tensor.name, tensor.dtype, part, Share(tensor, part))


def _turns(
    survived: Sequence[Chain], names: Collection[str], world: World, count: int
) -> Iterator[list[list[Piece[Share]]]]:
    """Yield `count` turns of a recovery from memory: the pieces that every rank sends to others in each, about an equal
    part of all that it has to. Pieces of other ranks than this one are left out if they belong to none of the tensors
    `names`."""
    given: list[list[tuple[Chain, int, int]]] = [[] for _ in range(world.size)]
    having = {id(chain): frozenset(chain.holders) for chain in survived}
    wanted = {id(chain): any(tensor.name in names for tensor, _ in chain.blocks) for chain in survived}
    for chain in survived:
        for member, sender in enumerate(chain.holders):
            given[sender].append((chain, *chain.share(member, len(chain.holders))))
    for turn in range(count):
        pieces: list[list[Piece[Share]]] = [[] for _ in given]
        for sender, parts in enumerate(given):
            total, before = sum(last - first for _, first, last in parts), 0
            begin, end = (total * number // count for number in (turn, turn + 1))
            for chain, first, last in parts:
                size = last - first
                if (sender == world.rank or wanted[id(chain)]) and before < end and begin < before + size:
                    a, b = (_between(chain, first, last, first + at - before) for at in (begin, end))
                    for share in chain.parts(a, b, None if sender == world.rank else names):
                        tensor, box = share
                        pieces[sender].append(Piece(tensor.name, tensor.dtype, box, share, having[id(chain)]))
                before += size
        yield pieces


def _between(chain: Chain, first: int, last: int, position: int) -> int:
    """Return the row start in bytes [first, last) of a chain of tensor blocks nearest to `position`, or `last`."""
    return min(max(chain.row_at(min(max(position, first), last)), first), last)

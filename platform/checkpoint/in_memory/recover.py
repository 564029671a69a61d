"""Recovery from host memory: which blocks the survivors of a failure hold, and restoring them under any plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import replace
from math import prod

from torch import Tensor

from platform.checkpoint.blocks.box import Box
from platform.checkpoint.blocks.placement import (
    LARGEST_BLOCK,
    Block,
    HeldTensor,
    Piece,
    Share,
    equal_share,
    group_by_holders,
)
from platform.checkpoint.in_memory.copies import Copy, copies
from platform.checkpoint.moves.passing import BUDGET, Exchange, clear_padding, divide, exchange_alone, pass_on


def surviving(state: Sequence[HeldTensor], kept: Sequence[Copy], ranks: Mapping[int, int]) -> list[HeldTensor]:
    """Return which ranks hold which blocks of the training state in memory after a failure; a block without a surviving
    holder is replaced by the copies of its parts that survivors keep.

    `state`: who held which blocks before, by old rank; `kept`: the copies assigned then (`copies`); `ranks`: old rank
    -> rank in the result, of the survivors.
    """
    by: dict[tuple[str, int], list[Copy]] = defaultdict(list)
    for copy in kept:
        by[copy.part.tensor.name, copy.sender].append(copy)
    out = []
    left: dict[tuple[int, ...], tuple[int, ...]] = {}  # old holders -> survivors; cached, as many blocks share theirs
    for tensor in state:
        holders: dict[Box, tuple[int, ...]] = {}
        for box, old in tensor.holders.items():
            if old not in left:
                left[old] = tuple(sorted(ranks[rank] for rank in old if rank in ranks))
            if left[old]:
                holders[box] = left[old]
                continue
            for (_, part), _, receiver in (copy for rank in old for copy in by[tensor.name, rank]):
                if receiver in ranks and part.overlap(box) == part:
                    holders[part] = (ranks[receiver],)
        out.append(replace(tensor, holders=holders))
    return out


def lost(state: Sequence[HeldTensor]) -> list[str]:
    """Return the names of the tensors that the survivors of a failure do not hold as a whole. `state`: a result of
    `surviving`."""
    return [t.name for t in state if sum(box.size for box in t.holders) < prod(t.shape)]


def lost_to(state: Sequence[HeldTensor], kept: Sequence[Copy], alive: Collection[int]) -> list[str]:
    """Return the names of the tensors that cannot be recovered whole from the memory of the old ranks `alive`: from
    their blocks of `state`, and from the copies of blocks (`kept`) that they keep for peers."""
    return lost(surviving(state, kept, {rank: rank for rank in alive}))


def keepers(state: Sequence[HeldTensor], kept: Sequence[Copy]) -> dict[tuple[int, ...], set[int]]:
    """Map each set of ranks that hold the same blocks of `state` to the peers that keep copies (`kept`) of these
    blocks; the empty set if nobody does. Computed once, it lets `is_recoverable` answer for many sets of ranks whether
    `lost_to` would find nothing lost."""
    found: dict[tuple[int, ...], set[int]] = {}
    by: dict[tuple[str, int], dict[tuple[int, ...], list[Box]]] = defaultdict(lambda: defaultdict(list))
    for tensor in state:
        for box, ranks in tensor.holders.items():
            found.setdefault(ranks, set())
            for rank in ranks:
                by[tensor.name, rank][ranks].append(box)
    for (tensor, part), sender, receiver in kept:
        blocks = by[tensor.name, sender]
        if len(blocks) == 1:
            (ranks,) = blocks
        else:
            ranks = next(ranks for ranks, boxes in blocks.items() if any(part.overlap(box) == part for box in boxes))
        found[ranks].add(receiver)
    return found


def is_recoverable(found: Mapping[tuple[int, ...], Set[int]], alive: Set[int]) -> bool:
    """Return True if the ranks `alive` hold the whole training state in memory: of each block a holder, or all peers
    that keep its copies. `found`: a result of `keepers`."""
    return all(not alive.isdisjoint(ranks) or (having and having <= alive) for ranks, having in found.items())


def handed_over(survived: Sequence[HeldTensor], stays: Sequence[bool]) -> list[Copy]:
    """Assign the blocks that only ranks without a seat in the next generation hold to ranks that stay, evenly by bytes,
    as copies to be sent before it forms. `survived`: a result of `surviving`; `stays`: for every rank in it, True if it
    stays."""
    leaving = [
        replace(t, holders={box: ranks for box, ranks in t.holders.items() if not any(stays[r] for r in ranks)})
        for t in survived
    ]
    return copies(leaving, stays)


def _piece(share: Share, had: tuple[int, ...] = ()) -> Piece[Share]:
    return Piece(share.tensor.name, share.tensor.dtype, share.box, share, had)


def recover(
    survived: Sequence[HeldTensor],
    read: Callable[[Share], Tensor],
    state: Sequence[HeldTensor],
    blocks: Sequence[Block],
    *,
    rank: int = 0,
    world_size: int = 1,
    exchange: Exchange = exchange_alone,
    budget: int = BUDGET,
) -> None:
    """Fill this rank's `blocks` from the training state that survivors of a failure hold in memory; all ranks call it
    together. What a block has beyond the global tensor becomes zero.

    `survived`: which ranks hold which blocks in memory (a result of `surviving`, nothing lost); `state`: who holds
    which blocks under the new plan; both equal on all ranks. `read`: returns the bytes of a part that this rank holds,
    uint8 [*extent, bytes of an element]. `budget`: bytes that a rank receives per `exchange`, on average. A rank takes
    what it holds from its own memory; of what other ranks need, all holders send equal shares.
    """
    clear_padding(state, blocks)
    parts: list[list[Piece[Share]]] = [[] for _ in range(world_size)]
    own: list[Piece[Share]] = []
    for ranks, found in group_by_holders(survived).items():
        for member, sender in enumerate(ranks):
            parts[sender] += [_piece(share, ranks) for share in equal_share(found, member, len(ranks))]
        if rank in ranks:
            own += map(_piece, found)

    def fetch(wanted: Sequence[Piece[Share]], into: Sequence[Tensor]) -> None:
        for part, memory in zip(wanted, into, strict=True):
            found = read(part.source)
            memory.view(found.shape).copy_(found)

    here = [replace(t, holders={box: (0,) for box, ranks in t.holders.items() if rank in ranks}) for t in state]
    pass_on(([[part]] for part in own), fetch, here, blocks, 0, exchange_alone)
    placed = sum(box.size * t.itemsize * len(ranks) for t in state for box, ranks in t.holders.items())
    count = -(-placed // max(LARGEST_BLOCK, budget * world_size))
    pass_on(zip(*(divide(p, count) for p in parts), strict=True), fetch, state, blocks, rank, exchange)

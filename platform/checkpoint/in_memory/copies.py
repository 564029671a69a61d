"""Assignment of in-memory copies: a block that only one failure domain holds is kept by peers in others too."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from platform.checkpoint.blocks.placement import HeldTensor, Share, cut_share, equal_share, group_by_holders


class Copy(NamedTuple):
    """Part of a block that `sender` holds and of which `receiver` keeps a copy in its host memory."""

    part: Share
    sender: int
    receiver: int


def copies(state: Sequence[HeldTensor], domains: Sequence[Hashable]) -> list[Copy]:
    """Assign one in-memory copy, in another failure domain, to every block of `state` that only ranks of one domain
    hold, so that every tensor survives the loss of any one domain. `domains`: the node of every rank; if all are the
    same, each rank is a domain.

    The result is equal on all ranks, and as balanced as possible: with N ranks, n of them in domain D, and b bytes that
    only D holds, a rank keeps L = max(sum of b / N, b / (N - n) of any D) bytes, and at most LARGEST_ROW more. Method:
    lay the domains' bytes end to end on a circle of N x L; give every rank an arc of L, in the order of the domains;
    turn the arcs until no domain keeps its own bytes. As b <= L x (N - n), the largest turn that any domain needs suits
    all.
    """
    homes: Sequence[Hashable] = domains if len(set(domains)) > 1 else range(len(domains))
    lines: dict[Hashable, list[tuple[Share, int]]] = {home: [] for home in homes}
    for ranks, blocks in group_by_holders(state).items():
        if len({homes[rank] for rank in ranks}) == 1:
            for member, sender in enumerate(ranks):
                lines[homes[sender]] += [(part, sender) for part in equal_share(blocks, member, len(ranks))]
    members = {home: [rank for rank, h in enumerate(homes) if h == home] for home in lines}
    order = [rank for ranks in members.values() for rank in ranks]
    if len(lines) < 2:
        return []
    sizes = {home: sum(part.nbytes for part, _ in line) for home, line in lines.items()}
    total = sum(sizes.values())
    arc = max(-(-b // n) for b, n in [(total, len(order))] + [(sizes[h], len(order) - len(members[h])) for h in lines])
    turn = before = at = 0
    for home, size in sizes.items():
        at += size
        turn = max(turn, at - arc * before)
        before += len(members[home])
    out, at = [], 0
    for part, sender in (entry for line in lines.values() for entry in line):
        size = part.nbytes
        first, last = (at - turn) // arc, (at + size - turn - 1) // arc
        ends = [0, *(number * arc + turn - at for number in range(first + 1, last + 1)), size]
        for number, pieces in zip(range(first, last + 1), cut_share(part, ends), strict=True):
            out += [Copy(piece, sender, order[number % len(order)]) for piece in pieces]
        at += size
    return out


def kept_bytes(state: Sequence[HeldTensor], kept: Sequence[Copy], rank: int) -> dict[str, int]:
    """Return the bytes of host memory that the two snapshots of `rank` take: {"own": of its blocks of `state`,
    "copies": of the parts (`kept`) that it keeps for peers}."""
    own = sum(box.size * t.itemsize for t in state for box, ranks in t.holders.items() if rank in ranks)
    return {"own": 2 * own, "copies": 2 * sum(copy.part.nbytes for copy in kept if copy.receiver == rank)}

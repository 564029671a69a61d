"""Assignment of in-memory copies: what only one failure domain holds is kept by ranks of other domains too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from platform.checkpoint.blocks.chain import Chain
from platform.checkpoint.blocks.placement import Share


class Copy(NamedTuple):
    """Part [first, last) of a chain that `sender` holds and of which `receiver` keeps a copy in its host memory."""

    chain: Chain
    first: int
    last: int
    sender: int
    receiver: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of training state in this copy in a peer's memory."""
        return self.last - self.first

    @property
    def parts(self) -> list[Share]:
        """Return the blocks of global tensors, or parts of them, in this copy in a peer's memory."""
        return self.chain.parts(self.first, self.last)


def copies(chains: Sequence[Chain], domains: Sequence[Hashable]) -> list[Copy]:
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
                share = chain.share(member, len(chain.holders))
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
    out, at = [], 0
    for part in (part for line in lines.values() for part in line if part.nbytes):
        chain, first, last, *_ = part
        one, end = (at - turn) // arc, (at + part.nbytes - turn - 1) // arc
        cuts = (chain.row_at(first + number * arc + turn - at) for number in range(one + 1, end + 1))
        ends = [first, *(min(max(cut, first), last) for cut in cuts), last]
        for number, a, b in zip(range(one, end + 1), ends, ends[1:], strict=False):
            if a < b:
                out.append(Copy(chain, a, b, part.sender, order[number % len(order)]))
        at += part.nbytes
    return out


def peers_of(copies: Iterable[Copy], rank: int) -> set[int]:
    """Return the ranks that keep in-memory copies of the state for `rank`, or whose copies it keeps; `copies`: all."""
    return {end for copy in copies if rank in (pair := (copy.sender, copy.receiver)) for end in pair} - {rank}


def exchanged(copies: Iterable[Copy], rank: int) -> tuple[dict[int, list[Share]], dict[int, list[Share]]]:
    """Map the peers of `rank` to the parts of the state that they keep in memory for it, and to the parts that it keeps
    for them; `copies`: all copies in peers' memory."""
    sent: dict[int, list[Share]] = defaultdict(list)
    kept: dict[int, list[Share]] = defaultdict(list)
    for copy in copies:
        if copy.sender == rank:
            sent[copy.receiver] += copy.parts
        elif copy.receiver == rank:
            kept[copy.sender] += copy.parts
    return sent, kept

"""Tree of all ranks, for collectives in host memory: no rank has more than BRANCHES + 1 connections in it."""

from __future__ import annotations

from typing import NamedTuple

BRANCHES = 16  # of a rank: 3 levels below rank 0 for 4,369 ranks


class Relatives(NamedTuple):
    """Relatives of a rank in the tree: its `parent`, None for rank 0, and the `branches` below it, each of consecutive
    ranks that begin with a child. The rank and all below it are consecutive too."""

    parent: int | None
    branches: list[range]

    @property
    def span(self) -> int:
        """Return the number of ranks in the part of the tree that begins with the rank."""
        return 1 + sum(map(len, self.branches))

    @property
    def children(self) -> list[int]:
        """Return the ranks that stand directly below the rank in the tree."""
        return [branch[0] for branch in self.branches]

    @property
    def peers(self) -> list[int]:
        """Return the ranks to which the rank has a connection in the tree."""
        return self.children if self.parent is None else [self.parent, *self.children]


def relatives(rank: int, size: int) -> Relatives:
    """Return the relatives of `rank` in the tree of `size` ranks."""
    parent, ranks = None, range(size)
    while ranks[0] != rank:
        parent, ranks = ranks[0], next(branch for branch in _branches(ranks) if rank in branch)
    return Relatives(parent, _branches(ranks))


def _branches(ranks: range) -> list[range]:
    """Divide all of some consecutive ranks but the first, on which they depend, into up to BRANCHES stretches."""
    below = ranks[1:]
    each = -(-len(below) // BRANCHES) or 1
    return [below[at : at + each] for at in range(0, len(below), each)]

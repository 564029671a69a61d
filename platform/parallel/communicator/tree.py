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
        """Return how many ranks the part of the tree with this rank at its top has, itself included."""
        return 1 + sum(map(len, self.branches))

    @property
    def children(self) -> list[int]:
        """Return the ranks directly below this one in the tree along which host-memory collectives run."""
        return [branch[0] for branch in self.branches]

    @property
    def peers(self) -> list[int]:
        """Return the ranks to which this rank opens connections in the tree: its parent, if any, and its children."""
        return self.children if self.parent is None else [self.parent, *self.children]


def relatives(rank: int, size: int) -> Relatives:
    """Return the parent and the branches below `rank` in the tree of `size` ranks, for host-memory collectives."""
    parent, ranks = None, range(size)
    while ranks[0] != rank:
        parent, ranks = ranks[0], next(branch for branch in _branches(ranks) if rank in branch)
    return Relatives(parent, _branches(ranks))


def _branches(ranks: range) -> list[range]:
    """Divide the ranks below `ranks[0]` in the tree, all the others of `ranks`, into up to BRANCHES equal stretches."""
    below = ranks[1:]
    each = -(-len(below) // BRANCHES) or 1
    return [below[at : at + each] for at in range(0, len(below), each)]

"""The tiers that ranks share, such as rack and node: which rank sits where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Tiers:
    """Place of every rank in a tree of any depth. `names`: names of the tiers, outer to inner, such as rack, node;
    `paths`: values of these tiers, by rank. Ranks are in one node where their paths are equal."""

    names: tuple[str, ...]
    paths: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int], ranks: int) -> Tiers:
        """Build the tiers of consecutive ranks from the number of ranks in one of each, in any order of the names.

        Raises ValueError if a size is below 1 or no multiple of the next smaller one.

        >>> Tiers.of({"node": 2, "rack": 4}, 5).paths
        (('0', '0'), ('0', '0'), ('0', '1'), ('0', '1'), ('1', '2'))
        """
        inner = sorted(sizes.items(), key=lambda pair: pair[1])
        for (small, few), (large, many) in pairwise([("worker", 1), *inner]):
            if many < 1 or many % few:
                raise ValueError(f"tiers: {large}={many} must be a multiple of {small}={few}")
        outer = inner[::-1]
        paths = (tuple(str(rank // many) for _, many in outer) for rank in range(ranks))
        return cls(tuple(name for name, _ in outer), tuple(paths))

    @property
    def rows(self) -> tuple[str, ...]:
        """Return labels of how far a message between ranks goes: inside a node, between nodes, between larger parts."""
        inner = self.names[::-1]
        return (f"inside a {inner[0]}", *(f"between {name}s" for name in inner)) if inner else ("everywhere",)

    def row(self, a: int, b: int) -> int:
        """Return how far a message between ranks `a` and `b` goes, as a position in `rows`: 0 inside the innermost tier
        (a node), one more for each tier that they do not share."""
        for depth, (one, other) in enumerate(zip(self.paths[a], self.paths[b], strict=True)):
            if one != other:
                return len(self.names) - depth
        return 0

    def domain(self, rank: int, row: int) -> tuple[str, ...]:
        """Return the path of the part of the cluster (node, rack, ...) of `rank` whose link a message of `rows[row]`,
        row >= 1, leaves by: the node for 1, larger parts above."""
        return self.paths[rank][: len(self.names) - row + 1]

"""Choice of the members that sit at the ranks of a mesh, such that ranks that communicate most are nearest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

from platform.cluster.crew.base.failures import Member
from platform.plan.language.mesh import Mesh
from platform.plan.language.tiers import Tiers

Path = tuple[str, ...]  # from the outermost tier to the node


def places(members: Mapping[int, Member]) -> dict[int, Path]:
    """Return crew member -> its place in the cluster: its tiers (rack, ...) that all members report, and its node."""
    depth = min((len(member.tiers) for member in members.values()), default=0)
    return {number: (*member.tiers[:depth], member.node) for number, member in members.items()}


def tiers_of(seats: Sequence[int], paths: Mapping[int, Path]) -> Tiers:
    """Return the cluster tiers (rack, node) of the ranks of workers `seats`, without outer tiers that all share."""
    found = [paths[number] for number in seats]
    names = [tier.partition("=")[0] for tier in found[0][:-1]] + ["node"]
    apart = [i for i, values in enumerate(zip(*found, strict=True)) if len(set(values)) > 1 or i == len(names) - 1]
    return Tiers(tuple(names[i] for i in apart), tuple(tuple(path[i] for i in apart) for path in found))


def arrange(paths: Mapping[int, Path], mesh: Mesh, keep: Mapping[int, int]) -> list[int]:
    """Return the number of the crew member at every rank of a mesh, chosen so that ranks that communicate most are near
    each other in the cluster. `paths`: member -> its place (see `places`), of at least as many members as there are
    ranks.

    Consecutive ranks, which differ along the innermost axes, are a block: of 2, of 2 x 4, and so on, as the sizes of
    the axes say. From the largest block to the smallest, each is put into the innermost tier, within the tier of the
    block around it, that has room for all of it: first where most of its ranks' members are, then where the least room
    would be left. `keep`: rank -> member that had it in the mesh before and keeps it if possible; a member whose rank
    does not exist any more takes one that no such member keeps.
    """
    return _Seating(paths, mesh, keep).seats


class _Seating:
    """Work of `arrange`. `seats`: its result."""

    def __init__(self, paths: Mapping[int, Path], mesh: Mesh, keep: Mapping[int, int]):
        """Seat the members of `paths` at all ranks of a mesh, as `arrange` describes; `seats` has the result."""
        self._sizes = list(dict.fromkeys(accumulate((n for _, n in reversed(mesh.shape)), mul, initial=1)))
        self._keep, self._rank_of = keep, {member: rank for rank, member in keep.items()}
        self._here: dict[Path, list[int]] = {}  # by tier: its members, by number
        for number in sorted(paths):
            for depth in range(len(paths[number]) + 1):
                self._here.setdefault(paths[number][:depth], []).append(number)
        self._paths, self._world = paths, mesh.size
        self._room = Counter({tier: len(numbers) for tier, numbers in self._here.items()})
        self._taken: set[int] = set()
        self.seats: list[int] = []
        self._place(len(self._sizes) - 1, ())

    def _place(self, level: int, within: Path) -> None:
        """Seat crew members at the next block of consecutive ranks, of the block size number `level` of the mesh (0: a
        single rank), in the cluster tier `within`."""
        ranks = range(len(self.seats), len(self.seats) + self._sizes[level])
        tier = self._best(within, ranks)
        if level:
            for _ in range(self._sizes[level] // self._sizes[level - 1]):
                self._place(level - 1, tier)
            return
        [rank] = ranks
        member = min((m for m in self._here[tier] if m not in self._taken), key=lambda m: (self._strange(m, rank), m))
        self._taken.add(member)
        self.seats.append(member)
        for depth in range(len(self._paths[member]) + 1):
            self._room[self._paths[member][:depth]] -= 1

    def _best(self, within: Path, ranks: range) -> Path:
        """Choose the innermost cluster tier within `within` with room for the workers of `ranks`, of least cost."""
        fits = [tier for tier in self._inside(within) if self._room[tier] >= len(ranks)]
        deepest = max(map(len, fits))
        return min((tier for tier in fits if len(tier) == deepest), key=lambda tier: self._cost(tier, ranks))

    def _inside(self, within: Path) -> list[Path]:
        """Return the cluster tiers (racks, nodes, ...) inside the tier `within`, itself among them."""
        return [tier for tier in self._here if tier[: len(within)] == within]

    def _cost(self, tier: Path, ranks: range) -> tuple[float, ...]:
        """Return a cluster tier's sort key for seating workers at `ranks`: members that keep or lost theirs, room."""
        had = [self._rank_of.get(m, -1) for m in self._here[tier] if m not in self._taken]
        stay, late = sum(rank in ranks for rank in had), sum(rank >= self._world for rank in had)
        around = (self._room[tier[:depth]] for depth in range(len(tier), -1, -1))
        return (-stay, -late, *around, self._here[tier][0])

    def _strange(self, member: int, rank: int) -> int:
        """Return how badly a worker suits a rank: 0 had it before, 1 had one now gone, 2 had none, 3 had another."""
        had = self._rank_of.get(member, -1)
        if had < 0:
            return 2
        return 0 if had == rank else 1 if had >= self._world else 3

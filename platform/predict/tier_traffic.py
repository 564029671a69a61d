"""Messages and bytes of a plan by tier of the cluster: inside a node, between nodes, between racks, and so on.
`NetworkTiers` knows which rank sits where.

The messages of a collective follow the transport: all-gathers, reduce-scatters and all-to-alls go from each rank
directly to each, all-reduces and rotations around a ring in the order of the group, scatters and gathers from and to
the first rank, and broadcasts and reductions, of which every rank has its turn as the root, from and to each. Each sums
to the bytes of `platform.plan.operation_plan`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import prod
from typing import NamedTuple

from platform.plan.layout import Cut, Mesh, format_count, is_at_index_zero
from platform.plan.operation_plan import EVER
from platform.plan.plan import Plan
from platform.plan.plan_summary import format_number
from platform.plan.step_collectives import collectives_by_stage, process_groups

_DIRECT = {"all_gather": 1, "reduce_scatter": 0, "all_to_all": 0, "broadcast": 0, "reduce": 0}  # 1: whole, 0: an n-th
_ROOTED, _RINGS = ("scatter", "gather"), ("all_reduce", "rotate")
_RINGS_OF_GPUS = ("all_gather", "reduce_scatter")


@dataclass(frozen=True)
class TierTraffic:
    """Messages and bytes per step of one row of `NetworkTiers.distance_labels`. `busiest`: the most bytes that one of
    the links between these parts carries in one direction, to any tier; None inside the innermost tier."""

    tier: str
    messages: int
    bytes: int
    busiest: int | None


def tier_traffic(plan: Plan, tiers: NetworkTiers, rings: bool = False) -> list[TierTraffic]:
    """Return the messages and bytes of one training step of a plan by tier, from the innermost outwards, for ranks that
    sit as `tiers` says. The bytes add up to the total of `communication`. `rings`: True if gathers and scattered
    sums of even blocks go around a ring, which enters a node once, as GPUs send."""
    rows = range(len(tiers.distance_labels))
    messages, moved = [Fraction()] * len(rows), [Fraction()] * len(rows)
    links: dict[_Link, Fraction] = defaultdict(Fraction)
    counted: dict[tuple, _Reached] = {}
    for kind, (launches, size) in _count_launches(plan).items():
        for share_of_pair, each, reached in _iterate_reached_pairs(plan.mesh, kind, tiers, counted, rings):
            for row, pairs in reached.rows.items():
                messages[row] += pairs * each * launches
                moved[row] += pairs * share_of_pair * size
            for link, pairs in reached.links.items():
                links[link] += pairs * share_of_pair * size
    busiest = [max((round(n) for (link, *_), n in links.items() if link == row), default=0) for row in rows]
    sums = zip(tiers.distance_labels, map(round, messages), map(round, moved), [None, *busiest[1:]], strict=True)
    return [TierTraffic(*row_sums) for row_sums in sums]


_Link = tuple[int, tuple[str, ...], str]  # row of `NetworkTiers.distance_labels`, part of the cluster, way


class _Reached(NamedTuple):
    """Numbers of the pairs of ranks that a collective reaches: by row of `NetworkTiers.distance_labels`, and by link
    that they use."""

    rows: Counter[int]
    links: Counter[_Link]

    def add_pair(self, tiers: NetworkTiers, sender: int, receiver: int) -> None:
        """Count one pair of ranks."""
        row = tiers.row_between(sender, receiver)
        self.rows[row] += 1
        for link in range(1, row + 1):
            self.links[link, tiers.path_of_crossed_domain(sender, link), "out"] += 1
            self.links[link, tiers.path_of_crossed_domain(receiver, link), "in"] += 1

    def add_all_pairs(self, tiers: NetworkTiers, group: Sequence[int]) -> None:
        """Count all pairs of the ranks of a group, from how many of them each part of the cluster has."""
        beyond = len(group) * (len(group) - 1)  # pairs that go so far, or farther
        for link in range(1, len(tiers.distance_labels)):
            farther = 0
            for domain, domain_ranks in Counter(tiers.path_of_crossed_domain(rank, link) for rank in group).items():
                farther += (pairs := domain_ranks * (len(group) - domain_ranks))
                if pairs:
                    self.links[link, domain, "out"] += pairs
                    self.links[link, domain, "in"] += pairs
            self.rows[link - 1] += beyond - farther
            beyond = farther
        self.rows[len(tiers.distance_labels) - 1] += beyond


def _iterate_reached_pairs(
    mesh: Mesh, kind: _Launched, tiers: NetworkTiers, counted: dict[tuple, _Reached], rings: bool
) -> Iterator[tuple[Fraction, Fraction, _Reached]]:
    """Yield, for a kind of collective, the share of a rank's input and the messages of each of some pairs of ranks, and
    how many pairs there are; pairs of other kinds along the same axes are `counted` once."""
    if kind.cuts:  # pairs differ in what they exchange
        for (sender, receiver), messages, share in _iterate_pair_traffic(mesh, kind):
            reached_pair = _Reached(Counter(), Counter())
            reached_pair.add_pair(tiers, sender, receiver)
            yield share, messages, reached_pair
        return
    if kind.op == "send":
        share = messages = Fraction(1)
    else:
        transfers = iterate_transfers(kind.op, mesh.count_ranks(kind.axes))
        _, _, messages, share = next(transfers, (0, 0, Fraction(), Fraction()))
    if rings and kind.op in _RINGS_OF_GPUS:
        turns = mesh.count_ranks(kind.axes) - 1
        share, messages, kind = share * turns, messages * turns, kind._replace(op="rotate")
    way = "all" if kind.op in _DIRECT or kind.op == "all_to_allv" else "ring" if kind.op in _RINGS else kind.op
    key = way, kind.axes, kind.only, kind.stages
    if key not in counted:
        counted[key] = reached = _Reached(Counter(), Counter())
        if way == "all":
            for group in _iterate_launching_groups(mesh, kind):
                reached.add_all_pairs(tiers, group)
        else:
            for (sender, receiver), *_ in _iterate_pair_traffic(mesh, kind):
                reached.add_pair(tiers, sender, receiver)
    yield share, messages, counted[key]


def farthest_tiers(plan: Plan, tiers: NetworkTiers) -> dict[str, str]:
    """Return axes of collectives, joined by "+" -> the row of `tiers` between the farthest ranks of their groups."""
    if len(set(tiers.paths)) == 1:  # all on one node
        return {"+".join(axes): tiers.distance_labels[0] for axes in process_groups(plan)}
    groups_by_axes = {axes: plan.mesh.list_groups(axes) for axes in process_groups(plan)}
    rows = {axes: max(tiers.row_between(g[0], r) for g in groups for r in g) for axes, groups in groups_by_axes.items()}
    return {"+".join(axes): tiers.distance_labels[row] for axes, row in rows.items()}


def format_traffic(rows: Sequence[TierTraffic]) -> str:
    """Format the traffic of a step by tier as a line for people."""
    links = [f" (busiest link {format_number(row.busiest)}B)" if row.busiest else "" for row in rows]
    sizes = [f"{format_number(row.bytes)}B in {format_count(row.messages, 'message', ',')} {row.tier}" for row in rows]
    return f"per step  {', '.join(size + link for size, link in zip(sizes, links, strict=True))}"


class _Launched(NamedTuple):
    """Kind of collective that is launched: its `op`, along `axes`, at index 0 of the axes `only`, by ranks of `stages`,
    of blocks that `cuts` cut."""

    op: str
    axes: tuple[str, ...]
    only: tuple[str, ...]
    stages: tuple[int, ...]
    cuts: tuple[Cut, ...]


def _count_launches(plan: Plan) -> dict[_Launched, tuple[int, int]]:
    """Return, for the traffic by tier, each kind of collective's launches in a step and all bytes of a rank's input."""
    launches_by_kind: dict[_Launched, tuple[int, int]] = {}
    itemsize = {**EVER, **plan.itemsize}
    for _, c, launches, stages in collectives_by_stage(plan):
        key = _Launched(c.op, plan.mesh.order_axes(c.axes), c.only, stages, c.cuts)
        count, size = launches_by_kind.get(key, (0, 0))
        launches_by_kind[key] = count + launches, size + launches * c.elements * itemsize[c.dtype]
    return launches_by_kind


def _iterate_pair_traffic(mesh: Mesh, kind: _Launched) -> Iterator[tuple[tuple[int, int], Fraction, Fraction]]:
    """Yield (sender, receiver), messages and share of a rank's longest input, of the traffic of one collective."""
    iterate_pairs = _iterate_stage_pair_traffic if kind.op == "send" else _iterate_group_pair_traffic
    if not kind.cuts:
        yield from iterate_pairs(mesh, kind)
        return
    for pair, messages, share in iterate_pairs(mesh, kind):
        at = mesh.rank_coordinates(pair[0])
        has = prod(Fraction(cut.block_extent(mesh, at), cut.longest_extent()) for cut in kind.cuts)
        yield pair, messages, share * has


def _iterate_stage_pair_traffic(mesh: Mesh, kind: _Launched) -> Iterator[tuple[tuple[int, int], Fraction, Fraction]]:
    """Yield (sender, receiver), messages and share of a rank's input for a send between two pipeline stages."""
    for rank in range(mesh.world_size):
        at = mesh.rank_coordinates(rank)
        if at["stage"] == kind.stages[0] and is_at_index_zero(kind.only, at):
            yield (rank, mesh.find_rank({**at, "stage": kind.stages[1]})), Fraction(1), Fraction(1)


def _iterate_group_pair_traffic(mesh: Mesh, kind: _Launched) -> Iterator[tuple[tuple[int, int], Fraction, Fraction]]:
    """Yield (sender, receiver), messages and share of a rank's input for one launch along axes of the mesh."""
    for group in _iterate_launching_groups(mesh, kind):
        for sender, receiver, messages, share in iterate_transfers(kind.op, len(group)):
            yield (group[sender], group[receiver]), messages, share


def _iterate_launching_groups(mesh: Mesh, kind: _Launched) -> Iterator[tuple[int, ...]]:
    """Yield the groups of ranks that launch a kind of collective."""
    for group in mesh.list_groups(kind.axes):
        at = mesh.rank_coordinates(group[0])
        if (at["stage"] in kind.stages or "stage" in kind.axes) and is_at_index_zero(kind.only, at):
            yield group


def iterate_transfers(op: str, n: int) -> Iterator[tuple[int, int, Fraction, Fraction]]:
    """Predict the traffic between ranks: yield (sender, receiver, messages, share of one rank's input) of one
    collective in a group of n ranks; of a scatter, share of one rank's output."""
    one, part = Fraction(1), Fraction(1, n)
    if op == "all_reduce":
        turns, share = 2 * (n - one), 2 * (n - one) * part
        yield from ((i, (i + 1) % n, turns, share) for i in range(n) if n > 1)
    elif op == "rotate":
        yield from ((i, (i + 1) % n, one, one) for i in range(n))
    elif op in _ROOTED:
        yield from ((0, i, one, one) if op == "scatter" else (i, 0, one, one) for i in range(1, n))
    else:
        turns = part if op in ("broadcast", "reduce") else one
        share = Fraction(1, n - 1) if op == "all_to_allv" else one if _DIRECT[op] else part
        yield from ((i, j, turns, share) for i in range(n) for j in range(n) if i != j)


def count_messages(mesh: Mesh, axes: Sequence[str], tiers: NetworkTiers, *, from_zero: bool = False) -> list[int]:
    """Count the messages of the process groups along `axes` by row of `tiers`, after SUPER (Jain et al.), section V:
    one per ordered pair of ranks of a group, a rank and itself included. Counted one by one: exact for any sizes.

    `from_zero`: only from each group's first rank to all (in a join, the other way round), as when D&SP-cSub keeps the
    common layers on sub-grid 0 alone: one in g of them, g being the ranks of a group.
    """
    counts = [0] * len(tiers.distance_labels)
    for group in mesh.list_groups(axes):
        for sender in group[:1] if from_zero else group:
            for receiver in group:
                counts[tiers.row_between(sender, receiver)] += 1
    return counts


@dataclass(frozen=True)
class NetworkTiers:
    """Place of every rank in a tree of any depth. `names`: names of the tiers, outer to inner, such as rack, node;
    `paths`: values of these tiers, by rank. Ranks are in one node where their paths are equal."""

    names: tuple[str, ...]
    paths: tuple[tuple[str, ...], ...]

    @classmethod
    def build_tiers(cls, sizes: Mapping[str, int], ranks: int) -> NetworkTiers:
        """Build the tiers of consecutive ranks from the number of ranks in one of each, in any order of the names.

        Raises ValueError if a size is below 1 or no multiple of the next smaller one.

        >>> NetworkTiers.build_tiers({"node": 2, "rack": 4}, 5).paths
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
    def distance_labels(self) -> tuple[str, ...]:
        """Return labels of how far a message between ranks goes: inside a node, between nodes, between larger parts."""
        inner = self.names[::-1]
        return (f"inside a {inner[0]}", *(f"between {name}s" for name in inner)) if inner else ("everywhere",)

    def row_between(self, a: int, b: int) -> int:
        """Return how far a message between ranks `a` and `b` goes, as a position in `rows`: 0 inside the innermost tier
        (a node), one more for each tier that they do not share."""
        for depth, (one, other) in enumerate(zip(self.paths[a], self.paths[b], strict=True)):
            if one != other:
                return len(self.names) - depth
        return 0

    def path_of_crossed_domain(self, rank: int, row: int) -> tuple[str, ...]:
        """Return the path of the part of the cluster (node, rack, ...) of `rank` whose link a message of `rows[row]`,
        row >= 1, leaves by: the node for 1, larger parts above."""
        return self.paths[rank][: len(self.names) - row + 1]

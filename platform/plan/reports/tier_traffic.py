"""Messages and bytes of a plan by tier of the cluster: inside a node, between nodes, between racks, and so on.

The messages of a collective follow the transport: all-gathers, reduce-scatters and all-to-alls go from each rank
directly to each, all-reduces and rotations around a ring in the order of the group, scatters and gathers from and to
the first rank, and broadcasts and reductions, of which every rank has its turn as the root, from and to each. Each sums
to the bytes of `platform.plan.communication.traffic`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from platform.plan.communication.traffic import EVER
from platform.plan.core.plan import Plan
from platform.plan.core.step_collectives import process_groups, staged_collectives
from platform.plan.language.layout import Cut, at_zero
from platform.plan.language.mesh import Mesh
from platform.plan.language.numbers import count_of
from platform.plan.language.tiers import Tiers
from platform.plan.reports.describe import human

_DIRECT = {"all_gather": 1, "reduce_scatter": 0, "all_to_all": 0, "broadcast": 0, "reduce": 0}  # 1: whole, 0: an n-th
_ROOTED = ("scatter", "gather")


@dataclass(frozen=True)
class TierTraffic:
    """Messages and bytes per step of one row of `Tiers.rows`. `busiest`: the most bytes that one of the links between
    these parts carries in one direction, to any tier; None inside the innermost tier."""

    tier: str
    messages: int
    bytes: int
    busiest: int | None


def tier_traffic(plan: Plan, tiers: Tiers) -> list[TierTraffic]:
    """Return the messages and bytes of one training step of a plan by tier, from the innermost outwards, for ranks that
    sit as `tiers` says. The bytes add up to the total of `communication`."""
    rows = range(len(tiers.rows))
    messages, moved = [Fraction()] * len(rows), [Fraction()] * len(rows)
    links: dict[tuple[int, tuple[str, ...], str], Fraction] = defaultdict(Fraction)  # row, part of the cluster, way
    for (sender, receiver), (count, size) in pair_traffic(plan).items():
        row = tiers.row(sender, receiver)
        messages[row] += count
        moved[row] += size
        for link in rows[1 : row + 1]:
            links[link, tiers.domain(sender, link), "out"] += size
            links[link, tiers.domain(receiver, link), "in"] += size
    busiest = [max((round(n) for (link, *_), n in links.items() if link == row), default=0) for row in rows]
    return [
        TierTraffic(name, round(messages[row]), round(moved[row]), busiest[row] if row else None)
        for row, name in enumerate(tiers.rows)
    ]


def reach_of(plan: Plan, tiers: Tiers) -> dict[str, str]:
    """Return axes of collectives, joined by "+" -> the row of `tiers` between the farthest ranks of their groups."""
    mesh, alone = plan.mesh, len(set(tiers.paths)) == 1  # all on one node
    found = {
        axes: 0 if alone else max(tiers.row(group[0], rank) for group in mesh.groups(axes) for rank in group)
        for axes in process_groups(plan)
    }
    return {"+".join(axes): tiers.rows[row] for axes, row in found.items()}


def traffic_line(rows: Sequence[TierTraffic]) -> str:
    """Format the traffic of a step by tier as a line for people."""
    parts = [
        f"{human(row.bytes)}B in {count_of(row.messages, 'message', ',')} {row.tier}"
        + (f" (busiest link {human(row.busiest)}B)" if row.busiest else "")
        for row in rows
    ]
    return f"per step  {', '.join(parts)}"


def pair_traffic(plan: Plan) -> dict[tuple[int, int], tuple[Fraction, Fraction]]:
    """Return the (messages, bytes) that each pair of ranks (sender, receiver) exchanges in one training step of a
    plan."""
    found: dict[tuple[int, int], tuple[Fraction, Fraction]] = {}
    mesh, itemsize = plan.mesh, {**EVER, **plan.itemsize}
    alike: Counter[tuple[str, tuple[str, ...], tuple[str, ...], tuple[int, ...], tuple[Cut, ...]]] = Counter()
    launched: Counter[tuple[str, tuple[str, ...], tuple[str, ...], tuple[int, ...], tuple[Cut, ...]]] = Counter()
    for _, c, launches, stages in staged_collectives(plan):
        key = c.op, mesh.ordered(c.axes), c.only, stages, c.cuts
        alike[key] += launches * c.elements * itemsize[c.dtype]
        launched[key] += launches
    for key, size in alike.items():
        op, axes, only, stages, cuts = key
        pairs = _between_stages if op == "send" else _in_groups
        for pair, messages, share in pairs(mesh, op, axes, only, stages):
            count, before = found.get(pair, (Fraction(), Fraction()))
            has = prod(Fraction(cut.extent(mesh, mesh.coordinates(pair[0])), cut.longest()) for cut in cuts)
            found[pair] = count + messages * launched[key], before + share * has * size
    return found


_Pairs = Iterator[tuple[tuple[int, int], Fraction, Fraction]]


def _between_stages(mesh: Mesh, op: str, axes: Sequence[str], only: Sequence[str], stages: Sequence[int]) -> _Pairs:
    """Yield (sender, receiver), messages and share of a rank's input for a send between two pipeline stages."""
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        if at["stage"] == stages[0] and at_zero(only, at):
            yield (rank, mesh.rank({**at, "stage": stages[1]})), Fraction(1), Fraction(1)


def _in_groups(mesh: Mesh, op: str, axes: Sequence[str], only: Sequence[str], stages: Sequence[int]) -> _Pairs:
    """Yield, for one launch of a collective, each pair of ranks (sender, receiver) with its messages and the share of a
    rank's input that they carry. The groups that launch it lie along `axes`, in one of `stages` and at index 0 of the
    axes `only`."""
    for group in mesh.groups(axes):
        at = mesh.coordinates(group[0])
        if (at["stage"] in stages or "stage" in axes) and at_zero(only, at):
            for sender, receiver, messages, share in transfers(op, len(group)):
                yield (group[sender], group[receiver]), messages, share


def transfers(op: str, n: int) -> Iterator[tuple[int, int, Fraction, Fraction]]:
    """Yield (sender, receiver, messages, share of one rank's input) of one collective in a group of n ranks; of a
    scatter, share of one rank's output."""
    one, part = Fraction(1), Fraction(1, n)
    if op == "all_reduce":
        yield from ((i, (i + 1) % n, 2 * (n - one), 2 * (n - one) * part) for i in range(n) if n > 1)
    elif op == "rotate":
        yield from ((i, (i + 1) % n, one, one) for i in range(n))
    elif op in _ROOTED:
        yield from ((0, i, one, one) if op == "scatter" else (i, 0, one, one) for i in range(1, n))
    else:
        turns = part if op in ("broadcast", "reduce") else one
        share = Fraction(1, n - 1) if op == "all_to_allv" else one if _DIRECT[op] else part
        yield from ((i, j, turns, share) for i in range(n) for j in range(n) if i != j)


def count_messages(mesh: Mesh, axes: Sequence[str], tiers: Tiers, *, from_zero: bool = False) -> list[int]:
    """Count the messages of the process groups along `axes` by row of `tiers`, after SUPER (Jain et al.), section IV-D:
    one per ordered pair of ranks of a group, a rank and itself included. Counted one by one: exact for any sizes.

    `from_zero`: only from each group's first rank to all (in a join, the other way round), as when D&SP-cSub keeps the
    common layers on sub-grid 0 alone: one in g of them, g being the ranks of a group.
    """
    found = [0] * len(tiers.rows)
    for group in mesh.groups(axes):
        for sender in group[:1] if from_zero else group:
            for receiver in group:
                found[tiers.row(sender, receiver)] += 1
    return found


def with_axes_moved(mesh: Mesh, axes: Sequence[str], *, outer: bool) -> Mesh:
    """Return the mesh with `axes` moved outside (slow links) or inside of all others, to compare branch placements."""
    moved = tuple(pair for pair in mesh.shape if pair[0] in axes)
    others = tuple(pair for pair in mesh.shape if pair[0] not in axes)
    return Mesh(moved + others if outer else others + moved)

"""Bytes of a training step by its routing: the plan's bytes, but for collectives of experts' rows.

Of rows there are as many as tokens chose experts, and no more than the plan says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from platform.plan.communication.planned import Collective, PlannedOperation
from platform.plan.communication.traffic import TRAFFIC, label
from platform.plan.core.plan import Plan
from platform.plan.core.step_collectives import step_collectives
from platform.plan.language.layout import at_zero
from platform.plan.language.lent import Lent, dealt
from platform.plan.language.ops import Spec
from platform.plan.operations.tables.dispatch_rows import Ends

# routing[rank][layer][pass][expert]: the rows that a rank's tokens have at an expert; without a rank's other stages
Routing = Sequence[Mapping[str, Sequence[Sequence[int]]]]


NONE_LENT: Mapping[str, Lent] = MappingProxyType({})


class _Layer(NamedTuple):
    """Numbers of rows in a pass of a layer: by rank, at its experts, and sent from its tokens to others' experts."""

    here: Mapping[int, int]
    away: Mapping[int, int]


def replayed(plan: Plan, routing: Routing, lent: Mapping[str, Lent] = NONE_LENT) -> dict[str, int]:
    """Return the bytes that all workers together move in a training step with this `routing`, by `OP/AXES`, to the byte
    as the run's counters measure them. `plan`: the plan of all stages; `lent`: layer -> lent
    experts."""
    found: Counter[str] = Counter()
    for _, c, launches in step_collectives(plan):
        if not c.rows:
            found[label(c.op, plan.mesh.ordered(c.axes))] += launches * plan.moved_bytes(c)
    for _, c, moved in moves_of_rows(plan, routing, lent):
        found[label(c.op, plan.mesh.ordered(c.axes))] += moved
    return {key: n for key, n in sorted(found.items()) if n}


def moves_of_rows(
    plan: Plan, routing: Routing, lent: Mapping[str, Lent] = NONE_LENT
) -> Iterator[tuple[str, Collective, int]]:
    """Yield (operation, collective, bytes that all workers move) for every collective of rows, and of experts that are
    `lent`, in the passes of a step with this `routing`."""
    for chunk in plan.chunks:
        passes: list[_Layer] = []
        for (kind, name), planned in chunk.operations.items():
            if kind == "dispatch_rows":
                there = lent.get(name, ())
                passes = list(_passes(plan, planned, chunk.stage, routing, there))
            for c in planned.collectives:
                if c.rows:
                    twice = 2 if planned.operation.recomputed and c.phase == "forward" else 1
                    if c.op == "all_to_allv" and kind not in ("dispatch_rows", "combine_rows"):
                        moved = sum(map(len, there)) * sum(_widths(plan, c, one) for one in passes)
                    else:
                        moved = sum(_elements(plan, c, one) for one in passes)
                    yield f"{kind} {name}", c, twice * moved * plan.itemsize[c.dtype]


def _passes(plan: Plan, planned: PlannedOperation, stage: int, routing: Routing, lent: Lent) -> Iterator[_Layer]:
    """Yield the passes of a layer in the microbatches of a step, from the way of its tokens to their experts."""
    (spec, _), (out,), mesh = planned.operation.inputs, planned.operation.outputs, plan.mesh
    assert isinstance(spec, Spec)
    ends, name = Ends.of(plan.planner, spec, out), planned.operation.name
    ranks = [r for r in range(mesh.size) if mesh.coordinates(r)["stage"] == stage and name in routing[r]]
    seats = {rank: ends.seats(plan.planner, out, rank) for rank in ranks}
    for number in range(len(routing[ranks[0]][name]) if ranks else 0):
        rows = {rank: routing[rank][name][number] for rank in ranks}
        here, away = {}, {}
        for rank, (axes, first, count) in seats.items():
            group, number = mesh.group(rank, axes) if axes else (rank,), 0
            own, here[rank], away[rank] = group.index(rank), 0, 0
            for owner, begin in enumerate(first):
                for expert in range(begin, begin + count):
                    at = sorted([owner, *(i for i, experts in enumerate(lent) if number in experts)])
                    for source, member in enumerate(group):
                        deal = dict(zip(at, dealt(rows[member][expert], source, at), strict=True))
                        here[rank] += deal.get(own, 0)
                        away[rank] += sum(deal.values()) - deal.get(own, 0) if source == own else 0
                    number += 1
        yield _Layer(here, away)


def _elements(plan: Plan, c: Collective, one: _Layer) -> int:
    """Return the elements that all workers move in one launch of the collective `c` of a pass's rows."""
    mesh = plan.mesh
    if c.op == "all_to_allv":
        return sum(rows * _width(plan, c, rank) for rank, rows in one.away.items())
    groups = [
        group for group in mesh.groups(c.axes) if group[0] in one.here and at_zero(c.only, mesh.coordinates(group[0]))
    ]
    return sum(TRAFFIC[c.op](len(group), one.here[group[0]] * _width(plan, c, group[0])) for group in groups)


def _widths(plan: Plan, c: Collective, one: _Layer) -> int:
    """Return the elements of a row of the collective `c` on one rank of each of its groups in a pass, added up."""
    there = (rank for rank in one.here if at_zero(c.only, plan.mesh.coordinates(rank)))
    return sum(_width(plan, c, rank) for rank in there) // plan.mesh.extent(c.axes)


def _width(plan: Plan, c: Collective, rank: int) -> int:
    """Return the elements of a row of the collective `c` on a rank."""
    return c.elements_at(plan.mesh, plan.mesh.coordinates(rank)) // c.rows

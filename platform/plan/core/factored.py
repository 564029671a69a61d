"""Parameters as matrices, and the sums over ranks of which an optimizer with factored second moments makes its update
(Adafactor): squares by row and by column. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping

from platform.plan.communication.planned import Collective
from platform.plan.core.plan import Plan
from platform.plan.language.ops import Parameter


def summed_sizes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return, by name of each trained parameter of a stage's plan, the sizes of the sums over ranks for an Adafactor
    update: one sum of squared weights, (1,); in `Plan.factored` also squared gradients by row and column of all its
    matrices, (rows, columns, 1)."""
    trained = [p for p in plan.parameters if p.name not in plan.frozen]
    return {p.name: (*sides(plan, p), 1) if p.name in plan.factored else (1,) for p in trained}


def sides(plan: Plan, p: Parameter) -> tuple[int, int]:
    """Return how many rows, and how many columns, all matrices of a parameter have together."""
    number, rows, columns = p.matrices(plan.global_shape(p))
    return number * rows, number * columns


def summing_axes(plan: Plan) -> tuple[str, ...]:
    """Return the mesh axes over which an Adafactor update sums: all but `stage` that have more than one rank."""
    return plan.mesh.ordered(a for a, n in plan.mesh.axes.items() if n > 1 and a != "stage")


def factor_collectives(plan: Plan) -> list[Collective]:
    """List the collectives of a stage's Adafactor update, none without `Plan.factored`: an all-reduce of the sums of
    `summed_sizes`, and one of the sums of squares of each parameter's update."""
    axes, sizes = summing_axes(plan), summed_sizes(plan)
    if not (plan.factored and axes and sizes):
        return []
    elements = sum(map(sum, sizes.values())), len(sizes)
    return [Collective("all_reduce", axes, n, "accumulate", "update") for n in elements]


def factors_at(plan: Plan, at: Mapping[str, int]) -> int:
    """Return how many row and column second moments the worker at mesh coordinates `at` keeps for `Plan.factored`."""
    here = [p for p in plan.at(at["stage"]).parameters if p.name in plan.factored and plan.present(p, at)]
    ranges = [(p, *plan.shard_range(p, at)) for p in here]
    return sum(sum(sides(plan, p)) for p, start, stop in ranges if start < stop)

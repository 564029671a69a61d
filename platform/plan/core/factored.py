"""Parameters as matrices, and the sums over ranks of which an optimizer with factored second moments makes its update
(Adafactor): squares by row and by column. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping

from platform.plan.communication.planned import Collective
from platform.plan.core.plan import Plan
from platform.plan.language.numbers import matrix_shape


def summed_sizes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return, by each trained parameter of a stage, whose plan this is, the sizes of its sums before an update: squares
    by row and by column of those in `Plan.factored`, and one number, of the weights."""
    trained = {p.name: matrix_shape(p.role, plan.global_shape(p)) for p in plan.parameters if p.name not in plan.frozen}
    return {name: (*shape, 1) if name in plan.factored else (1,) for name, shape in trained.items()}


def summing_axes(plan: Plan) -> tuple[str, ...]:
    """Return the axes of more than one rank over which a stage sums: all of its ranks."""
    return plan.mesh.ordered(a for a, n in plan.mesh.axes.items() if n > 1 and a != "stage")


def factor_collectives(plan: Plan) -> list[Collective]:
    """List the collectives of a stage's update with factored second moments: the sums of `summed_sizes`, and the sums
    of squares of each parameter's update."""
    axes, sizes = summing_axes(plan), summed_sizes(plan)
    if not (plan.factored and axes and sizes):
        return []
    elements = sum(map(sum, sizes.values())), len(sizes)
    return [Collective("all_reduce", axes, n, "accumulate", "update") for n in elements]


def factors_at(plan: Plan, at: Mapping[str, int]) -> int:
    """Return how many numbers the worker at mesh coordinates `at` keeps of rows and columns of `Plan.factored`."""
    here = [p for p in plan.at(at["stage"]).parameters if p.name in plan.factored and plan.present(p, at)]
    ranges = [(p, *plan.shard_range(p, at)) for p in here]
    return sum(sum(matrix_shape(p.role, plan.global_shape(p))) for p, start, stop in ranges if start < stop)

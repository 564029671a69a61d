"""Check that a plan does not split tensors that the optimizer needs whole: pure Python without torch, so that refusals
are quick."""

from __future__ import annotations

from collections.abc import Iterator

from platform.boundary.refusals import violation
from platform.config.fields import Config, Optimizer
from platform.optimizer.optimizers import ELEMENT, FEWEST_DIMS, OPTIMIZERS
from platform.plan.core.plan import Plan
from platform.plan.language.ops import Parameter


def need_of(o: Optimizer) -> str:
    """Return how much of a parameter the optimizer must see at once for an update: `element`, `tensor` or `matrix`."""
    need = OPTIMIZERS[o.kind].needs
    return need if isinstance(need, str) else need(o)


def split_violations(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a refusal line if the plan gives the configured optimizer parts of tensors that it needs whole (it would
    silently compute different updates); the line names the axes that split them and the nearest legal choices."""
    need, kind = need_of(config.optimizer), config.optimizer.kind
    if need == ELEMENT:
        return
    split = {p.name: _axes(plan, p) for p in plan.parameters if len(p.dims) >= FEWEST_DIMS[need] and _split(plan, p)}
    if not split:
        return
    over = {a for found in split.values() for a in found}
    (name, _), *more = split.items()
    axes = "+".join(plan.mesh.ordered(over)) or "padding"
    also = f" and {len(more)} more" if more else ""
    constraint = f"updates each {need} as a whole, and {name}{also} is split over {axes}"
    legal = [k for k, other in OPTIMIZERS.items() if other.needs == ELEMENT]
    zero = over and over <= {*plan.sharded}
    yield violation("optimizer.kind", kind, constraint, [*legal, *(["parallel.zero=0"] if zero else [])])


def _split(plan: Plan, p: Parameter) -> bool:
    """Return True if the plan gives a rank only a part of the parameter, not all that the optimizer may need."""
    return plan.bucket_of[p.name].shards > 1 or plan.local_shape(p) != plan.global_shape(p)


def _axes(plan: Plan, p: Parameter) -> list[str]:
    """Return the mesh axes, of more than one rank, that split a parameter which the optimizer needs whole."""
    return [a for a in plan.split_over(p) if plan.mesh.extent((a,)) > 1]

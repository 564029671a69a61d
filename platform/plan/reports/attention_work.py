"""Work of attention on each rank that shares sequences: how many keys its queries see, by causality and windows.
Documents and padding are not known to a plan."""

from __future__ import annotations

from itertools import product

from platform.plan.communication.planned import PlannedOperation
from platform.plan.core.plan import Plan
from platform.plan.language.stretches import Stretch


def attention_work(plan: Plan) -> list[int]:
    """Return how many scores each rank of a context computes per head of a sequence, in mesh order; [] without."""
    attentions = [o for o in plan.attentions if "length" in o.operation.outputs[0].dims]
    return [sum(_keys_seen(plan, o, at) for o in attentions) for at in ranks_of_context(plan)]


def ranks_of_context(plan: Plan) -> list[dict[str, int]]:
    """Return the mesh coordinates of the ranks that share the plan's first sequences, in mesh order; [] without."""
    sizes, first = dict(plan.scheme.context), plan.mesh.coordinates(0)
    places = (dict(zip(sizes, at, strict=True)) for at in product(*map(range, sizes.values())))
    return [{**first, **at} for at in places] if sizes else []


def unevenness(plan: Plan) -> float:
    """Return the work of attention of the busiest rank of a context, in terms of the mean; 0 without contexts."""
    work = attention_work(plan)
    return max(work) * len(work) / sum(work) if sum(work) else 0.0


def _keys_seen(plan: Plan, o: PlannedOperation, at: dict[str, int]) -> int:
    """Return how many keys all queries of an attention see on the rank at mesh coordinates `at`."""
    queries = plan.stretches(o.operation.outputs[0], "length", at)
    keys = o.operation.inputs[0 if o.operation.kind == "softmax" else 1]
    sizes = plan.planner.sizes_of(keys)
    if not o.operation["causal"]:
        return sum(q.size for q in queries) * sizes["memory_length" if "memory_length" in keys.dims else "length"]
    return sum(seen_by(q, o.operation["window"]) for q in queries)


def seen_by(queries: Stretch, window: int = 0) -> int:
    """Return how many keys causal queries at consecutive positions see, at most `window` each if not 0."""

    def until(end: int) -> int:
        """Return how many keys the queries before position `end` see."""
        growing = min(end, window) if window else end
        return growing * (growing + 1) // 2 + (end - growing) * window

    return until(queries.end) - until(queries.first)

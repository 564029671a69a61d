"""Conversion of a plan to plain data, for `plan.json` and checkpoint manifests."""

from __future__ import annotations

from typing import Any

from platform.plan.core.plan import Plan
from platform.plan.core.step_collectives import communication


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON-able data: the content of `plan.json` in the run directory."""
    return {
        "mesh": plan.mesh.axes,
        "scheme": plan.scheme.name,
        "precision": plan.precision,
        "microbatches": plan.microbatches,
        "sharded": list(plan.sharded),
        "storage": list(plan.storage),
        "sizes": dict(plan.sizes),
        "regions": {r: dict(layout) for r, layout in plan.scheme.regions.items()},
        "only": {r: list(layout.only) for r, layout in plan.scheme.regions.items() if layout.only},
        "parameters": [
            {
                "name": p.name,
                "dims": list(p.dims),
                "shape": list(plan.global_shape(p)),
                "layout": dict(plan.layout(p)),
                "only": list(plan.layout(p).only),
                "reduce": list(plan.reductions[p.name]),
            }
            for p in plan.parameters
        ],
        "operations": [
            {
                "kind": kind,
                "name": name,
                "compute_axes": list(o.compute_axes),
                "collectives": [vars(c) | {"axes": list(c.axes)} for c in o.collectives],
            }
            for (kind, name), o in plan.operations.items()
        ],
        "communication": communication(plan),
        "parameter_count": plan.parameter_count,
        "parameters_per_worker": plan.local_parameter_count,
        "flops_per_token": plan.flops_per_token,
    }

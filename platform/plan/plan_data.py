"""Plans as plain data: the whole of one, its digest, and a summary for people.

A plan is a tree of frozen dataclasses. As JSON has it, each is {"is": WORD, FIELD: value, ...}, a mapping is
{"is": "map", "items": [[key, value], ...]}, a tuple a list, and everything else stands for itself.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from platform.plan.chunks import Chunk
from platform.plan.layout import Cut, Layout, Mesh
from platform.plan.model_types import (
    NF4,
    WIDE_STATES,
    Adapter,
    BranchPlace,
    Operation,
    Parameter,
    Recompute,
    RotaryScaling,
    Router,
    Spec,
    StoredStates,
)
from platform.plan.operation_plan import Collective, Einsum, EinsumGroup, Panels, PlannedOperation
from platform.plan.plan import Plan
from platform.plan.planner import Planner
from platform.plan.quantisation import Quantisation, ScaledProducts
from platform.plan.rule import Conversion, RelayoutStep
from platform.plan.scheme import Scheme
from platform.plan.step_collectives import communication

# Word in the data -> class. Digests are of these words: another name of a class changes none.
_CLASSES: dict[str, type] = {
    "Adapter": Adapter, "BranchPlace": BranchPlace, "Chunk": Chunk, "Collective": Collective, "Conversion": Conversion,
    "Cut": Cut, "Einsum": Einsum, "EinsumGroup": EinsumGroup, "Layout": Layout, "Mesh": Mesh, "Operation": Operation,
    "Panels": Panels, "Parameter": Parameter, "Plan": Plan, "PlannedOperation": PlannedOperation, "Planner": Planner,
    "Quantisation": Quantisation, "Recompute": Recompute, "RotaryScaling": RotaryScaling, "Router": Router,
    "ScaledProducts": ScaledProducts, "Scheme": Scheme, "Spec": Spec, "Step": RelayoutStep,
    "StoredStates": StoredStates,
}  # fmt: skip
_WORDS = {part: word for word, part in _CLASSES.items()}
# all but what the rest of a plan's operations implies
_FIELDS = {part: [f.name for f in fields(part) if f.init and f.compare] for part in _WORDS}
# Fields that plans got later: left out where they say what plans without them did, which so keep their digests.
_LATER: dict[type, dict[str, Any]] = {
    Plan: {
        "stored": WIDE_STATES,
        "adapters": {},
        "quantised": (),
        "quantised_kind": NF4,
        "compiles_collectives": False,
        "gathers_tiles": False,
        "pairs_passes": False,
    },
    Planner: {"frozen": ()},
    Scheme: {"diagonal": ()},
    Spec: {"place": None},
    Parameter: {"place": None},
    Einsum: {"frozen": False, "scaled": None},
    EinsumGroup: {"fuses": ""},
    StoredStates: {"offload": "none"},
    RotaryScaling: {"short": (), "long": (), "share": 1.0},
}
_DIGESTS: dict[int, str] = {}  # by identity, of plans that are alive


def encode_plan(plan: Plan) -> dict[str, Any]:
    """Encode a whole plan as plain JSON-able data, from which `decode_plan` rebuilds an equal plan."""
    return _encode_value(plan, {})


def decode_plan(data: Any) -> Plan:
    """Rebuild the plan from which `encode_plan` made `data`. Raises ValueError for anything else."""
    try:
        plan = _decode_value(data)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"is no plan: {type(error).__name__}: {error}") from None
    if not isinstance(plan, Plan):
        raise ValueError("is no plan")
    return plan


def plan_digest(plan: Plan) -> str:
    """Return 16 hexadecimal digits that identify a plan: the same for equal plans in all processes and machines."""
    if (known := _DIGESTS.get(id(plan))) is None:
        text = json.dumps(encode_plan(plan), sort_keys=True, separators=(",", ":"))
        _DIGESTS[id(plan)] = known = hashlib.sha256(text.encode()).hexdigest()[:16]
        weakref.finalize(plan, _DIGESTS.pop, id(plan), None)
    return known


def _encode_value(value: Any, done: dict[int, Any]) -> Any:
    """Encode a value that is part of a plan as plain data, recursively: dataclasses and mappings as described in the
    module's text, tuples as lists. `done`: encoded dataclasses so far, by identity, as layers share them."""
    kind = type(value)
    if value is None or kind in (str, int, float, bool):
        return value
    if kind in (tuple, list):
        return [_encode_value(item, done) for item in value]
    if kind in _FIELDS:
        if (encoded := done.get(id(value))) is None:
            done[id(value)] = encoded = {"is": _WORDS[kind]}
            for name in _FIELDS[kind]:
                if name not in (later := _LATER.get(kind, {})) or getattr(value, name) != later[name]:
                    encoded[name] = _encode_value(getattr(value, name), done)
            if kind is Plan:
                encoded["frozen"] = []  # where plans of earlier versions say it; the planner's are read
        return encoded
    assert isinstance(value, Mapping), f"{kind.__name__} in a plan: one of _CLASSES, if it is a dataclass"
    return {"is": "map", "items": [[_encode_value(k, done), _encode_value(v, done)] for k, v in value.items()]}


def _decode_value(value: Any) -> Any:
    """Rebuild one value of a plan from plain data made by `_encode_value`, recursively. Raises KeyError, TypeError or
    AttributeError for data that is no plan."""
    if isinstance(value, list):
        return tuple(map(_decode_value, value))
    if not isinstance(value, Mapping):
        return value
    entries = dict(value)
    if (kind := entries.pop("is")) == "map":
        return {_decode_value(key): _decode_value(item) for key, item in entries["items"]}
    decoded = {name: _decode_value(item) for name, item in entries.items()}
    if kind == "Plan" and (frozen := decoded.pop("frozen", ())):
        decoded["planner"] = replace(decoded["planner"], frozen=frozen)
    return _CLASSES[kind](**decoded)


def plan_summary(plan: Plan) -> dict[str, Any]:
    """Return the summary of a plan that `plan.json` in the run directory holds for people, with its digest; too little
    to rebuild the plan."""
    return {
        "digest": plan_digest(plan),
        "mesh": plan.mesh.axes,
        "scheme": plan.scheme.name,
        "precision": plan.precision,
        "microbatches": plan.microbatches,
        "sharded": list(plan.sharded),
        "bucket_mib": plan.bucket_mib,
        "storage": list(plan.sharded if plan.zero == 3 else ()),
        "sizes": dict(plan.sizes),
        "regions": {r: dict(layout) for r, layout in plan.region_layouts.items()},
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
        **(
            {"states": [{"name": p.name, "shape": list(plan.global_shape(p))} for p in plan.states]}
            if plan.states
            else {}
        ),
        "operations": [
            {
                "kind": kind,
                "name": name,
                **({"kernel": o.operation["kernel"]} if "kernel" in dict(o.operation.attributes) else {}),
                "compute_axes": list(o.compute_axes),
                "collectives": [_summarise_collective(c) for c in o.collectives],
            }
            for (kind, name), o in plan.operations.items()
        ],
        "communication": communication(plan),
        "parameter_count": plan.parameter_count,
        "parameters_per_worker": plan.local_parameter_count,
        "flops_per_token": plan.flops_per_token,
    }


def _summarise_collective(c: Collective) -> dict[str, Any]:
    """Return a planned collective as plain data for people."""
    return {**vars(c), "axes": list(c.axes), "cuts": [f"{cut.size} over {'+'.join(cut.axes)}" for cut in c.cuts]}

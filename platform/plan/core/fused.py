"""Fused attentions of a plan: what decides which kernels compute them, and the kernels that torch chooses itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from platform.plan.communication.planned import PlannedOperation
from platform.plan.core.plan import Plan
from platform.plan.language.attention_kernels import AttentionTraits, chosen
from platform.plan.language.ops import Spec

FUSED = ("fused_attention", "ring_attention")  # whose kernel is chosen


def fused_attentions(plan: Plan) -> Iterator[PlannedOperation]:
    """Yield the planned operations of all attentions that one kernel computes, in model order."""
    return (o for (kind, _), o in plan.operations.items() if kind in FUSED)


def kernels_of(plan: Plan) -> dict[str, int]:
    """Count the attentions that one kernel computes, by the name of their kernel."""
    return dict(Counter(o.operation["kernel"] for o in fused_attentions(plan)))


def traits_of(plan: Plan, planned: PlannedOperation, dropout: float, deterministic: bool = False) -> AttentionTraits:
    """Return the traits of a fused attention of the plan that decide which kernels can compute it. `dropout`: the
    model's rate; `deterministic`: sums are to be taken in a fixed order."""
    operation = planned.operation
    query, _, value = operation.inputs[:3]
    d_kv, d_value = (plan.local_shape(t)[t.dims.index("d_kv")] for t in (query, value))
    return AttentionTraits(
        precision=plan.precision,
        d_kv=d_kv,
        bias=operation["biased"],
        mask=bool(operation.reads) or operation["window"] > 0,
        dropout=dropout,
        grouped=_grouped(plan, operation.name),
        deterministic=deterministic,
        d_value=0 if d_value == d_kv else d_value,
    )


def _grouped(plan: Plan, name: str) -> bool:
    """Return True if the kernel of the fused attention `name` gets K and V with fewer heads than Q on every rank."""
    if not (expanded := plan.operations.get(("expand_kv", f"{name}.key"))) or not expanded.operation["grouped"]:
        return False
    have, wanted = expanded.operation.inputs[0], expanded.operation.outputs[0]
    assert isinstance(have, Spec)
    groups = plan.local_shape(have)[have.dims.index("kv_heads")]
    heads, each = plan.local_shape(wanted)[wanted.dims.index("heads")], plan.sizes["heads"] // plan.sizes["kv_heads"]
    return each > 1 and heads == groups * each


def settled(plan: Plan, device: str, dropout: float) -> Plan:
    """Return the plan as it runs on a kind of device (cpu, cuda): each kernel `auto` is the one that torch chooses.
    `dropout`: the model's rate."""

    def with_kernel(planned: PlannedOperation) -> PlannedOperation:
        """Return the planned operation with the name of the kernel that computes it, if it is a fused attention."""
        operation = planned.operation
        if operation.kind not in FUSED:
            return planned
        kernel = chosen(operation["kernel"], device, traits_of(plan, planned, dropout))
        attributes = tuple((name, kernel if name == "kernel" else value) for name, value in operation.attributes)
        return replace(planned, operation=replace(operation, attributes=attributes))

    chunks = (replace(c, operations={key: with_kernel(o) for key, o in c.operations.items()}) for c in plan.chunks)
    return replace(plan, chunks=tuple(chunks))

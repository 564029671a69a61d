"""Chunks of a model that are alike, but for the numbers of their layers: their passes take the same bytes, so one of
them is measured for all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from platform.plan.communication.planned import PlannedOperation
from platform.plan.core.buckets import Bucket
from platform.plan.core.chunks import Chunk
from platform.plan.core.plan import Plan
from platform.plan.language.ops import Parameter

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class _Names:
    """Names in a chunk with its layers numbered in their order there: layers.7.mlp.up is layers.#0.mlp.up in the chunk
    whose first layer is number 7."""

    def __init__(self) -> None:
        """Begin with no layer."""
        self.numbers: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        """Return a name with its numbers as they count in the chunk."""
        return _NUMBER.sub(lambda found: self.numbers.setdefault(found[0], f"#{len(self.numbers)}"), name)


def likeness(plan: Plan, chunk: Chunk, buckets: Sequence[Bucket]) -> tuple:
    """Return what decides the bytes of a chunk's passes: equal for chunks that are alike. `plan`: the stage's plan;
    `buckets`: the buckets of it with parameters of the chunk."""
    name = _Names()
    times = Counter(key for one in plan.chunks for key in one.operations)  # an operation of several is not begun ahead
    return (
        tuple((_of_operation(plan, o, name), times[key]) for key, o in chunk.operations.items()),
        chunk.functions,
        chunk.receives,
        chunk.sends,
        chunk.kept,
        tuple(tuple(map(name, names)) for names in chunk.spans),
        tuple(_of_bucket(plan, bucket, name) for bucket in buckets),
    )


def _of_operation(plan: Plan, planned: PlannedOperation, name: _Names) -> tuple:
    """Return what of a planned operation decides the bytes that it takes: all on which its plan depends."""
    o = planned.operation
    summed = tuple(plan.planner.reduced_at_use.get((o.name, o.kind, p.name), ()) for p in o.parameters)
    inputs = tuple((name(t.name), t.dims, t.role, t.sizes) if isinstance(t, Parameter) else t for t in o.inputs)
    attributes = tuple((key, name(value) if isinstance(value, str) else value) for key, value in o.attributes)
    return o.kind, name(o.name), inputs, o.outputs, attributes, o.reads, o.recomputed, planned.once, summed


def _of_bucket(plan: Plan, b: Bucket, name: _Names) -> tuple:
    """Return what of a bucket decides the bytes of its sums of gradients."""
    parameters = tuple((name(p.name), p.name in plan.shared) for p in b.parameters)
    return b.axes, b.only, parameters, b.sizes, b.elements, b.sharded, b.shards, b.zero, b.held

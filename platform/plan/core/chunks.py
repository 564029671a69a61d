"""Model chunks: the stretches of a model that pipeline stages run, and what flows between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol

from platform.plan.communication.planned import PlannedOperation
from platform.plan.language.layout import Layout
from platform.plan.language.mesh import Mesh
from platform.plan.language.ops import Operation, Ops, Parameter, Spec
from platform.plan.language.recorder import Recorder, Symbol
from platform.plan.schedule.balance import place_layers

Flow = tuple[tuple[str, Spec], ...]  # activations by name


class Model(Protocol):
    """What the plan needs of a model; platform.model holds them."""

    @property
    def sizes(self) -> Mapping[str, int]: ...

    def parameters(self) -> Sequence[Parameter]: ...

    @property
    def inputs(self) -> Sequence[str]: ...  # the data tensors that a forward pass takes

    def forward(self, ops: Ops, inputs: Mapping[str, Any]) -> Any: ...


class DivisibleModel(Model, Protocol):
    """A model that pipeline stages can share."""

    @property
    def units(self) -> Sequence[str]: ...  # what is not divided further, in order

    def part(self, ops: Ops, inputs: Mapping[str, Any], flow: Mapping[str, Any], units: Sequence[str]) -> dict: ...


@dataclass(frozen=True)
class Chunk:
    """Consecutive units of a model on one stage. `units` is empty where a model is not divided.

    `receives`: the activations that come from the chunk before; `sends`: those that go to the chunk after.
    """

    number: int
    stage: int
    units: tuple[str, ...]
    receives: Flow
    sends: Flow
    operations: Mapping[tuple[str, str], PlannedOperation]
    kept: tuple[Spec, ...] = ()  # the first activation of every stretch that is recomputed

    @cached_property
    def parameters(self) -> frozenset[str]:
        """Their names."""
        return frozenset(p.name for o in self.operations.values() for p in o.operation.parameters)


@dataclass(frozen=True)
class Recorded:
    """The operations of one chunk, and its flow in and out."""

    units: tuple[str, ...]
    operations: tuple[Operation, ...]
    receives: Flow
    sends: Flow
    kept: tuple[Spec, ...]


def record(model: Model, recorder: Callable[[], Recorder], count: int, sizes: Mapping[str, int]) -> list[Recorded]:
    """Records a model as `count` chunks of about equal cost, in order. `recorder` makes a new one.

    Raises ValueError for a model of fewer units than chunks.
    """
    inputs = {name: name for name in model.inputs}
    if count == 1:
        ops = recorder()
        model.forward(ops, inputs)
        return [Recorded(tuple(getattr(model, "units", ())), tuple(ops.operations), (), (), tuple(ops.kept))]
    units = getattr(model, "units", ("the model",))
    if len(units) < count:
        raise ValueError(
            f"pipeline.stages x pipeline.chunks={count} is more than the {len(units)} units of the model that stages"
            f" are made of (embeddings, blocks, head); nearest legal: {len(units)}"
        )

    def run(flow: Mapping[str, Symbol], part: Sequence[str]) -> tuple[Recorder, dict[str, Symbol]]:
        ops = recorder()
        return ops, model.part(ops, inputs, flow, part)  # type: ignore[attr-defined]

    def specs(flow: Mapping[str, Symbol]) -> Flow:
        return tuple((name, x.spec) for name, x in flow.items())

    flow: dict[str, Symbol] = {}
    costs = []
    for unit in units:
        ops, flow = run(flow, [unit])
        costs.append(sum(cost(o, sizes) for o in ops.operations))
    flow, chunks = {}, []
    for where in place_layers(costs, count):
        part, receives = tuple(units[where.start : where.stop]), specs(flow)
        ops, flow = run(flow, part)
        sends = specs(flow) if where.stop < len(units) else ()
        chunks.append(Recorded(part, tuple(ops.operations), receives, sends, tuple(ops.kept)))
    return chunks


def cost(operation: Operation, sizes: Mapping[str, int]) -> float:
    """Of a forward pass, for placing units on stages: FLOPs of einsums, and of all else the elements that it writes."""
    elements = sum(prod(_extents(out, sizes).values()) for out in operation.outputs)
    return einsum_flops(operation, sizes) or float(elements)


def einsum_flops(operation: Operation, sizes: Mapping[str, int]) -> float:
    """2 x iteration space of an operation's einsums, forward, over all ranks together."""
    if operation.kind == "fused_attention":
        query, key, _ = operation.inputs
        assert isinstance(key, Spec)
        spaces = [{**_extents(query, sizes), **_extents(key.renamed("length", "memory_length"), sizes)}] * 2
    elif operation.kind in ("project", "einsum"):
        x = _extents(operation.inputs[0], sizes)
        spaces = [{**x, **_extents(y, sizes)} for y in operation.inputs[1:]]
    else:
        spaces = []
    return sum(2 * prod(space.values()) for space in spaces)


def _extents(tensor: Spec | Parameter, sizes: Mapping[str, int]) -> dict[str, int]:
    return {d: dict(tensor.sizes).get(d, sizes[d]) for d in tensor.dims}


def replicated_axes(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """The axes of a stage over which a tensor in `layout` is replicated: scatter/gather sends 1/n of it and gathers it
    over them on the other side (paper 003, section 4.1)."""
    return tuple(a for a in mesh.ordered(mesh.axes) if a not in ("stage", *layout.axes, *layout.only))

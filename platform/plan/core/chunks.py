"""Model chunks: recording a model as consecutive parts for pipeline stages, and the activations between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, Protocol

from platform.plan.communication.planned import PlannedOperation
from platform.plan.language.layout import Layout
from platform.plan.language.mesh import Mesh
from platform.plan.language.ops import NO_RECOMPUTATION, Operation, Parameter, Spec
from platform.plan.operations.op import extents
from platform.plan.operations.recorder import Recorder, Symbol
from platform.plan.operations.words import Ops, flops
from platform.plan.schedule.balance import place_layers

FlowSpecs = tuple[tuple[str, Spec], ...]  # activations by name


class RecordableModel(Protocol):
    """Interface of a model as the code that builds plans sees it; platform.model has the implementations.

    A model that can be divided over pipeline stages also has `units`, the names of the smallest parts that it can be
    divided into, in order, and `part(ops, inputs, flow, units)`, which runs some of them on the activations `flow` by
    name and returns those for the next part.
    """

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the global size of every dim of the model's tensors, by name."""

    def parameters(self) -> Sequence[Parameter]:
        """Return the declarations of all parameters of the model."""

    @property
    def inputs(self) -> Sequence[str]:  # names of the data tensors that a forward pass takes
        """Return the names of the data tensors that a forward pass of the model takes."""

    def forward(self, ops: Ops, inputs: Mapping[str, Any]) -> Any:
        """Return the loss of the model on data tensors by name, computed by `ops`."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive units (embedding, blocks, head) of a model, planned for one pipeline stage. `units` is empty if the
    model cannot be divided. `number` counts through the whole model.

    `receives`: the activations from the previous chunk; `sends`: the activations for the next chunk. `spans`: names of
    the parameters that each stretch of the chunk's forward pass uses: before the first block, in it, after it, ...
    """

    number: int
    stage: int
    units: tuple[str, ...]
    receives: FlowSpecs
    sends: FlowSpecs
    operations: Mapping[tuple[str, str], PlannedOperation]
    functions: tuple[tuple, ...] = ()  # element by element, of which nothing is planned, see Recorder.note
    kept: tuple[Spec, ...] = ()  # type of x of every recomputed function, see Ops.recomputed
    spans: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def parameters(self) -> frozenset[str]:
        """Return the names of the parameters that the model chunk's operations use."""
        return frozenset(p.name for o in self.operations.values() for p in o.operation.parameters)

    @cached_property
    def states(self) -> frozenset[str]:
        """Return the names of the states, parameters without gradient, that the model chunk's operations read."""
        return frozenset(p.name for o in self.operations.values() for p in o.operation.states)

    @cached_property
    def shared(self) -> frozenset[str]:
        """Return the names of parameters that several of the chunk's operations use, each adding to the gradient."""
        uses = Counter(p.name for o in self.operations.values() for p in o.operation.parameters)
        return frozenset(name for name, n in uses.items() if n > 1)


class Recorded(NamedTuple):
    """Run of one model chunk under a recorder, and the activations that the chunk receives and sends; not yet
    planned."""

    units: Sequence[str]
    ops: Recorder
    receives: FlowSpecs = ()
    sends: FlowSpecs = ()

    def planned(self, number: int, stage: int, operations: Mapping[tuple[str, str], PlannedOperation]) -> Chunk:
        """Return the planned `Chunk` of this recorded part of a model, with its number, stage and own `operations`."""
        own = {(o.kind, o.name): operations[o.kind, o.name] for o in self.ops.operations}
        spans: list[dict[str, None]] = [{} for _ in range(self.ops.span + 1)]
        for span, operation in zip(self.ops.spans, self.ops.operations, strict=True):
            spans[span].update((p.name, None) for p in operation.parameters)
        names = tuple(tuple(span) for span in spans)
        functions, kept = tuple(self.ops.functions), tuple(self.ops.kept)
        return Chunk(number, stage, tuple(self.units), self.receives, self.sends, own, functions, kept, names)


def record(
    model: RecordableModel,
    recorder: Callable[[], Recorder],
    count: int,
    sizes: Mapping[str, int],
    parts: Sequence[Sequence[str]] = (),
) -> list[Recorded]:
    """Record a model's forward pass, without computing it, as `count` chunks of consecutive units of about equal cost,
    for the stages of a pipeline: at most as many as it has units (embedding, blocks, head). `recorder` makes a new
    Recorder; `sizes`: global sizes of the model's dims; `parts`: the units of every chunk, if they are given."""
    inputs = {name: name for name in model.inputs}
    if count == 1:
        ops = recorder()
        known = recordings(model, ops)
        if () not in known:
            model.forward(ops, inputs)
            known[()] = ops, {}
        return [Recorded(getattr(model, "units", ()), known[()][0])]
    units = getattr(model, "units", ("the model",))
    assert count <= len(units), "platform.planning.make_plan refuses it"

    def run(flow: Mapping[str, Symbol], part: Sequence[str], ops: Recorder) -> tuple[Recorder, dict[str, Symbol]]:
        """Record by `ops` the forward pass of the units `part` on the activations `flow`; return recorder and
        results."""
        known, key = recordings(model, ops), (tuple(part), specs(flow))
        if key not in known:
            known[key] = ops, model.part(ops, inputs, flow, part)  # type: ignore[attr-defined]
        return known[key]

    def specs(flow: Mapping[str, Symbol]) -> FlowSpecs:
        """Return the names and types of the activations that flow between two chunks of the model."""
        return tuple((name, x.spec) for name, x in flow.items())

    flow: dict[str, Symbol] = {}
    costs, each = [], dict[tuple, float]()  # layers are alike
    for unit in units if not parts else ():
        ops, flow = run(flow, [unit], replace(recorder(), recompute=NO_RECOMPUTATION))  # whatever is done again
        each |= {o.anonymous: cost(o, sizes) for o in ops.operations if o.anonymous not in each}
        costs.append(sum(each[o.anonymous] for o in ops.operations))
    parts = parts or [units[where.start : where.stop] for where in place_layers(costs, count)]
    flow, chunks = {}, []
    for number, part in enumerate(parts, 1):
        receives = specs(flow)
        ops, flow = run(flow, part, recorder())
        chunks.append(Recorded(part, ops, receives, specs(flow) if number < count else ()))
    return chunks


def recordings(model: RecordableModel, recorder: Recorder) -> dict[tuple, tuple[Recorder, dict[str, Symbol]]]:
    """Return what recorders like this one have found in a model, by its units and the types of what flowed in."""
    # a search makes many plans of one model, which so record each part once; beside it what flowed out
    every: dict[tuple, dict] = getattr(model, "recordings", {})
    return every.setdefault(recorder.settings, {})


def cost(operation: Operation, sizes: Mapping[str, int]) -> float:
    """Return an operation's forward cost, by which a model's units are divided over pipeline chunks: FLOPs of an
    einsum, else elements written, of all ranks together. `sizes`: global sizes of the model's dims."""
    elements = sum(prod(extents(out, sizes).values()) for out in operation.outputs)
    return flops(operation, sizes) or float(elements)


def replicated_axes(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes but `stage` over which a tensor in `layout` is replicated: with the scatter/gather
    optimization each of their n ranks sends 1/n of it to the next stage, which gathers it over them (Megatron-LM,
    Narayanan et al. 2021, section 4.1)."""
    return tuple(a for a in mesh.ordered(mesh.axes) if a not in ("stage", *layout.axes, *layout.only))

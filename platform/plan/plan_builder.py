"""Building the plan of a run from a model and a scheme."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

from platform.plan.adapters import adapter_sizes, list_adapter_parameters
from platform.plan.chunks import Chunk, RecordableModel, RecordedChunk, record_chunks
from platform.plan.layout import Mesh, base_axis, pad_to_multiple
from platform.plan.model_types import (
    AUTO,
    NO_RECOMPUTATION,
    PLAIN,
    RANK,
    Adapter,
    LabelLoss,
    Operation,
    Parameter,
    Recompute,
    Spec,
)
from platform.plan.operation_plan import PlannedOperation
from platform.plan.operations.recorder import IllegalPlan, Recorder, message_of_illegal_operation, violations_of_layouts
from platform.plan.operations.registry import OPERATIONS, count_flops
from platform.plan.plan import Plan
from platform.plan.planner import Planner
from platform.plan.quantisation import Quantisation
from platform.plan.rule import RelayoutStep, partial_axes
from platform.plan.scheme import (
    CONTEXT,
    ModelMistake,
    Scheme,
    check_parameters,
    check_parameters_used,
    definition_place,
    raise_model_mistakes,
)

ALIGNED = 128  # columns of logits: matrix units of GPUs are several times slower on odd sizes in 16 bits
LARGE = 1024  # columns per rank from which they are aligned: at most 13 % more, and a small table stays as it is

Reductions = dict[str, tuple[str, ...]]  # parameter -> axes
ReducedAtUse = dict[tuple[str, str, str], tuple[str, ...]]  # operation's name and kind, parameter -> axes
PlannedOperations = dict[tuple[str, str], PlannedOperation]  # by kind and name


def build_plan(
    model: RecordableModel,
    scheme: Scheme,
    *,
    data: int,
    microbatch: int,
    microbatches: int,
    sequences: int | None = None,
    stage_of: Sequence[int] = (0,),
    recompute: Recompute = NO_RECOMPUTATION,
    mlp_chunks: int = 1,
    precision: str = "fp32",
    zero: int = 0,
    dropout: float = 0.0,
    fused_dropout: bool = False,
    attention_kernel: str = AUTO,
    loss: LabelLoss = PLAIN,
    parts: Sequence[Sequence[str]] = (),
    frozen: Sequence[str] = (),
    adapters: Mapping[str, Adapter] = MappingProxyType({}),
    **more: Any,
) -> Plan:
    """Build the plan of a run: record the model's forward pass in chunks, and plan every operation under `scheme`.

    `data`: number of replicas; `microbatch`: sequences per microbatch and replica; `microbatches`: per step;
    `sequences`: per step, by default all that the microbatches hold, fewer if the last is partial; `stage_of`: the
    stage of every chunk; `parts`: the units of every chunk, () divides the model by cost. `recompute`, `mlp_chunks`,
    `precision`, `adapters`, `more`: as in Plan, and `quantise`; `frozen`: names of parameters without gradient. `zero`:
    the stage of ZeRO (Rajbhandari et al. 2020), which shards over replicas: 0 nothing, 1 master copies and optimizer
    state, 2 gradients too, 3 also parameters. Raises ModelMistake, and IllegalPlan with all violations.
    """
    mesh = Mesh.arrange_axes({"stage": max(stage_of) + 1, **scheme.mesh_axes(data)})
    parameters, sizes = _read_declarations(model, microbatch * data, adapters)
    options = scheme, dropout, recompute, fused_dropout, attention_kernel, loss
    recorder = partial(Recorder, *options, sizes=sizes, adapters=adapters, leaves_out=mlp_chunks == 1)
    recorded = _record_model(model, recorder, len(stage_of), parameters, parts, more.pop("quantise", None))
    operations = [o for chunk in recorded for o in chunk.ops.operations]
    start = Planner(mesh, scheme, _pad_vocab(sizes, scheme, mesh), {}, frozen=tuple(frozen))
    planner, planned, reductions = settle_planner(start, operations, microbatch)
    sharded = mesh.order_axes(("zero" if scheme.zero else "data", "expert", *CONTEXT)) if zero else ()
    chunks = tuple(chunk.build_chunk(number, stage_of[number], planned) for number, chunk in enumerate(recorded))
    plan = Plan(
        planner,
        precision,
        microbatches,
        microbatches * microbatch * data if sequences is None else sequences,
        sizes,
        parameters=tuple(p for p in parameters if not p.is_state),
        reductions=reductions,
        stages_of=_stages_by_parameter(parameters, chunks),
        chunks=chunks,
        states=tuple(p for p in parameters if p.is_state),
        sharded=sharded,
        zero=zero if sharded else 0,
        recompute=recompute,
        mlp_chunks=mlp_chunks,
        adapters=adapters,
        **more,
    )
    return replace(plan, warnings=tuple(_warnings_of_repeated_work(mesh, plan.operations, sizes)))


def _read_declarations(
    model: RecordableModel, batch: int, adapters: Mapping[str, Adapter]
) -> tuple[tuple[Parameter, ...], dict[str, int]]:
    """Return the parameters of a model and of its `adapters`, checked, and the global sizes of all dims; `batch`: one
    microbatch of all replicas. Raises ModelMistake."""
    with raise_model_mistakes(model):
        parameters, own_sizes = tuple(model.parameters()), dict(model.sizes)
    if "length" not in own_sizes:
        raise ModelMistake("length", "the model's sizes lack it", place=definition_place(model))
    sizes = {"memory_length": own_sizes["length"], **own_sizes, "batch": batch}
    check_parameters(parameters, model, sizes)
    return (*parameters, *list_adapter_parameters(adapters)), {**sizes, **adapter_sizes(adapters)}


def _record_model(
    model: RecordableModel,
    recorder: partial[Recorder],
    count: int,
    parameters: Sequence[Parameter],
    parts: Sequence[Sequence[str]],
    quantise: tuple[Quantisation, Sequence[str], Sequence[str]] | None,
) -> list[RecordedChunk]:
    """Record a model's forward pass as `count` chunks, of the units `parts` if given, and check that it uses each of
    its declared `parameters`. `quantise`: arguments of `mark_quantised`."""
    declared, legal = {p.name: p for p in parameters}, set[object]()  # of all chunks, whose layers are alike
    with raise_model_mistakes(model):
        checked = partial(recorder, declared=declared, _legal=legal)
        chunks = record_chunks(model, checked, count, recorder.keywords["sizes"], parts)
    operations = (o for chunk in chunks for o in chunk.ops.operations)
    check_parameters_used(parameters, (p.name for o in operations for p in (*o.parameters, *o.states)), model)
    return [chunk.quantise_products(*quantise) for chunk in chunks] if quantise else chunks


def _stages_by_parameter(parameters: Sequence[Parameter], chunks: Sequence[Chunk]) -> dict[str, tuple[int, ...]]:
    """Return, by parameter, states too, the stages of the chunks that use it, in order."""
    uses = {p.name: dict[int, None]() for p in parameters}
    for chunk in chunks:
        for name in chunk.parameter_names | chunk.state_names:
            uses[name][chunk.stage] = None
    return {name: tuple(stages) for name, stages in uses.items()}


def _pad_vocab(sizes: Mapping[str, int], scheme: Scheme, mesh: Mesh) -> dict[str, int]:
    """Return the sizes of a model's dims with vocab padded to a multiple of the ranks along all axes that split it in
    any layout of the scheme, unless they cut it as it is; where each of them gets LARGE columns or more, to ALIGNED
    columns for each."""
    axes = {a for layout in (*scheme.regions.values(), *scheme.parameters.values()) for a in layout["vocab"]}
    ranks = mesh.count_ranks(sorted(axes))
    if scheme.uneven or "vocab" not in sizes:  # a model of one's own may have none
        return dict(sizes)
    large = sizes["vocab"] >= LARGE * ranks
    return {**sizes, "vocab": pad_to_multiple(sizes["vocab"], ranks * (ALIGNED if large else 1))}


def settle_planner(
    planner: Planner, operations: Sequence[Operation], microbatch: int | None
) -> tuple[Planner, PlannedOperations, Reductions]:
    """Plan the operations of a model; return the planner that knows which sums they leave to others, the operations as
    it plans them, and the axes over which each parameter's gradient is summed once a step. `microbatch` as in
    `plan_operations`. Raises IllegalPlan, with all violations."""
    planned = plan_operations(planner, operations, microbatch)
    reductions, reduced_at_use = _find_reductions(planner, operations)
    planner = replace(planner, reduced_at_use=reduced_at_use)
    replanned = {(kind, name) for name, kind, _ in reduced_at_use}
    opens = [o for o in operations if any(isinstance(t, Spec) and t.open for t in (*o.inputs, *o.outputs))]
    # what one leaves, the one before may too
    while (open_sums := _find_deferred_sums(planner, planned)) != planner.open_sums:
        planner = replace(planner, open_sums=open_sums)
        planned |= plan_operations(planner, opens, microbatch)
    planned |= plan_operations(planner, [o for o in operations if (o.kind, o.name) in replanned], microbatch)
    return planner, planned, reductions


def _find_reductions(planner: Planner, operations: Sequence[Operation]) -> tuple[Reductions, ReducedAtUse]:
    """Return, first, by parameter the axes over which its gradient is summed once a step: those over which all of its
    uses in operations leave it partial. Second, by (operation's name and kind, parameter), for each use that leaves it
    partial over more axes, the others, over which it is summed at that use."""
    uses: dict[str, list[tuple[Operation, tuple[str, ...]]]] = defaultdict(list)
    partial_of: dict[object, list[tuple[str, ...]]] = {}  # by `Operation.nameless_key`: layers are alike
    for o in operations:
        if (alike := o.nameless_key) not in partial_of:
            used = zip(o.parameters, OPERATIONS[o.kind].parameter_compute_axes(planner, o), strict=True)
            partial_of[alike] = [planner.mesh.order_axes(partial_axes(planner.layout(p), axes)) for p, axes in used]
        for p, axes in zip(o.parameters, partial_of[alike], strict=True):
            uses[p.name].append((o, axes))
    reductions, at_use = {}, {}
    for name, partial_uses in uses.items():
        if len(partial_uses) == 1:
            reductions[name] = partial_uses[0][1]
            continue
        common = set.intersection(*(set(axes) for _, axes in partial_uses))
        reductions[name] = planner.mesh.order_axes(common)
        for operation, axes in partial_uses:
            if extra := tuple(a for a in axes if a not in common):
                at_use[operation.name, operation.kind, name] = extra
    return reductions, at_use


def _find_deferred_sums(planner: Planner, planned: PlannedOperations) -> dict[Spec, tuple[str, ...]]:
    """Return, by type of activation, the axes of the sums of it or of its gradient (`Spec.open`) that every operation
    which would take them leaves to another one; those left already (`planner.open_sums`) among them."""
    sums: dict[Spec, list[set[str]]] = defaultdict(list)
    for o in planned.values():
        for spec, steps in _summable_steps(o):
            left = planner.open_sums.get(spec, ())
            sums[spec].append({*left, *(a for step in steps if step.op == "all_reduce" for a in step.axes)})
    axes_by_spec = {spec: planner.mesh.order_axes(set.intersection(*axes)) for spec, axes in sums.items()}
    return {spec: axes for spec, axes in axes_by_spec.items() if axes}


def _summable_steps(planned: PlannedOperation) -> Iterator[tuple[Spec, Sequence[RelayoutStep]]]:
    """Yield, of an operation's activations whose sums may be left to others, the steps that would take the sums."""
    inputs, outputs = planned.operation.inputs, planned.operation.outputs
    pairs: list[tuple[Spec | Parameter, Sequence[RelayoutStep]]] = []
    for group in planned.groups:
        pairs += [(inputs[0], group.x.backward)]
        pairs += [(inputs[e.index + 1], e.operand.backward) for e in group.einsums]
        pairs += [(outputs[e.index], e.output.forward) for e in group.einsums]
    if not planned.groups and OPERATIONS[planned.operation.kind].open.get("inputs") == "gradient":
        pairs += [(t, c.backward) for t, c in zip(inputs, planned.conversions, strict=False)]
    yield from ((t, steps) for t, steps in pairs if isinstance(t, Spec) and t.open)


def plan_operations(planner: Planner, operations: Sequence[Operation], microbatch: int | None) -> PlannedOperations:
    """Plan the operations of a recorded model, by (kind, name): compute layouts, conversions of operands and results,
    and every collective with its size. `microbatch`: sequences per microbatch and replica, None if it is not judged
    whether axes divide what they split. Raises IllegalPlan, with all violations."""
    illegal = [] if microbatch is None else violations_of_layouts(planner, operations, microbatch)
    if illegal:
        raise IllegalPlan(illegal)
    planned: PlannedOperations = {}
    alike = _known_operations(planner)  # equal layers are planned once
    for o in operations:
        try:
            if (key := planner.operation_key(o)) not in alike:
                alike[key] = OPERATIONS[o.kind].plan_operation(planner, o)
            planned[o.kind, o.name] = alike[key].plan_alike(o)
        except ValueError as error:
            illegal.append(message_of_illegal_operation(o, error))
    if illegal:
        raise IllegalPlan(illegal)
    return planned


def _known_operations(planner: Planner) -> dict[tuple, PlannedOperation]:
    """Return the operations that equal planners have planned, by `Planner.operation_key`."""
    # a plan is first made of a few layers, and a search makes many plans on one mesh
    if type(planner) is not Planner:  # another rule, of passes of generation
        return {}
    return _find_operation_cache(repr((planner.mesh, planner.scheme, sorted(planner.sizes.items()), planner.open_sums)))


@lru_cache(maxsize=64)
def _find_operation_cache(planner: str) -> dict[tuple, PlannedOperation]:
    """Return an empty table of planned operations, the same one for a description of the same planner."""
    return {}


def forget_planned() -> None:
    """Forget the operations that planners of this process have planned, as if the rule had changed."""
    _find_operation_cache.cache_clear()


def _warnings_of_repeated_work(mesh: Mesh, operations: PlannedOperations, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield one warning for the plan per set of mesh axes that splits no dim of some einsums, so that every rank along
    these axes repeats the same work. `operations` by (kind, name), of which small adapters are not judged; `sizes`:
    global sizes of dims."""
    names: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for o in operations.values():
        large = not any(RANK in p.dims for p in o.operation.parameters)
        if large and count_flops(o.operation, sizes):
            used = "stage", *o.compute_axes, *map(base_axis, o.only)
            if unused := mesh.order_axes(a for a in mesh.axes if a not in used):
                names[unused].append(o.operation.name.split(".", 2)[-1])
    for unused, operation_names in names.items():
        listed = ", ".join(dict.fromkeys(operation_names))
        yield f"axes {'+'.join(unused)} split no dim of {listed}: computed {mesh.count_ranks(unused)} times over"


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause the search for cycles of objects, of which plans have hardly any."""
    # plans are many objects that stay: looking at all of them again and again takes a quarter of planning
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # which unfreezing would end: what is exempt for good
                gc.freeze()  # and back: all are then old, and the next search for cycles of young objects skips them
                gc.unfreeze()
            gc.enable()

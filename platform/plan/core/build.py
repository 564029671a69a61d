"""Building the plan of a run from a model and a scheme."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from platform.plan.communication.legality import IllegalPlan, violations
from platform.plan.communication.operations import plan_operation
from platform.plan.communication.planned import PlannedOperation
from platform.plan.communication.planner import Planner
from platform.plan.core.chunks import Chunk, Model, einsum_flops, record
from platform.plan.core.plan import Plan
from platform.plan.language.layout import padded
from platform.plan.language.mesh import Mesh
from platform.plan.language.mistakes import ModelMistake, check_parameters, check_used, defined, of_the_user
from platform.plan.language.ops import KEEP, Operation, Recompute
from platform.plan.language.recorder import Recorder
from platform.plan.language.scheme import Scheme


def build(
    model: Model,
    scheme: Scheme,
    *,
    data: int,
    microbatch: int,
    microbatches: int,
    sequences: int | None = None,
    stage_of: Sequence[int] = (0,),
    scatter_gather: bool = True,
    recompute: Recompute = KEEP,
    precision: str = "fp32",
    zero: int = 0,
    dropout: float = 0.0,
) -> Plan:
    """Build a run's plan: record the model and plan every operation.

    `microbatch`: sequences per microbatch and replica; `sequences`: per step, by default all that the microbatches
    hold, fewer if the last is partial; `stage_of`: the stage of every chunk. `zero`: what is sharded over `data` (ZeRO,
    Rajbhandari et al. 2020): 0 nothing, 1 master copies and optimizer state, 3 also the parameters, whose storage axis
    is then `data`. Raises ModelMistake for an error in the model's code, IllegalPlan with all violations: an axis that
    would split two dims of one operation, a dim (other than vocab) that its axes do not divide, or more chunks than the
    model has units.
    """
    mesh = Mesh.of({"stage": max(stage_of) + 1, **scheme.mesh_axes(data)})
    with of_the_user(model):
        parameters, own_sizes = tuple(model.parameters()), dict(model.sizes)
    if "length" not in own_sizes:
        raise ModelMistake("length", "the model's sizes lack it", place=defined(model))
    sizes = {"memory_length": own_sizes["length"], **own_sizes, "batch": microbatch * data}
    check_parameters(parameters, model, sizes)
    declared = {p.name: p for p in parameters}
    vocab_axes = {a for layout in (*scheme.regions.values(), *scheme.parameters.values()) for a in layout["vocab"]}
    padded_sizes = {**sizes, "vocab": padded(sizes["vocab"], mesh.extent(sorted(vocab_axes)))}
    sharded = mesh.ordered(("data",)) if zero else ()
    planner = Planner(mesh, scheme, padded_sizes, {}, storage=sharded if zero == 3 else ())

    try:
        with of_the_user(model):
            recorder = partial(Recorder, scheme, dropout, recompute, sizes=sizes, declared=declared)
            recorded = record(model, recorder, len(stage_of), sizes)
    except ModelMistake:
        raise
    except ValueError as error:
        raise IllegalPlan([str(error)]) from None
    everything = [o for chunk in recorded for o in chunk.operations]
    check_used(parameters, (p.name for o in everything for p in o.parameters), model)
    if illegal := violations(planner, everything, microbatch):
        raise IllegalPlan(illegal)

    uses: dict[str, list[tuple[Operation, tuple[str, ...]]]] = defaultdict(list)
    lacking: dict[tuple, list[tuple[str, ...]]] = {}  # by `Operation.anonymous`: layers are alike
    for operation in everything:
        if (alike := operation.anonymous) not in lacking:
            lacking[alike] = [mesh.ordered(axes) for axes in planner.partial(operation).values()]
        for p, axes in zip(operation.parameters, lacking[alike], strict=True):
            uses[p.name].append((operation, axes))
    reductions, at_use = {}, {}
    for name, found in uses.items():
        common = set.intersection(*(set(axes) for _, axes in found))
        reductions[name] = mesh.ordered(common)
        for operation, axes in found:
            if extra := tuple(a for a in axes if a not in common):
                at_use[operation.name, operation.kind, name] = extra

    assert all({*planner.storage, *axes} >= set(sharded) for axes in reductions.values()), "batch is split over data"
    planner = replace(planner, reduced_at_use=at_use)
    chunks = []
    for number, (stage, r) in enumerate(zip(stage_of, recorded, strict=True)):
        operations = {(o.kind, o.name): plan_operation(planner, o) for o in r.operations}
        assert len(operations) == len(r.operations), "operation names are unique within their kind"
        chunks.append(Chunk(number, stage, r.units, r.receives, r.sends, operations, r.kept))
    homes = {p.name: tuple(dict.fromkeys(c.stage for c in chunks if p.name in c.parameters)) for p in parameters}
    plan = Plan(
        planner=planner,
        precision=precision,
        microbatches=microbatches,
        sequences=microbatches * microbatch * data if sequences is None else sequences,
        sizes=sizes,
        parameters=parameters,
        reductions=reductions,
        homes=homes,
        chunks=tuple(chunks),
        sharded=sharded,
        scatter_gather=scatter_gather,
        recompute=recompute,
    )
    return replace(plan, warnings=tuple(_replicated(mesh, plan.operations, sizes)))


def _replicated(mesh: Mesh, operations: Mapping[tuple[str, str], PlannedOperation], sizes: Mapping[str, int]):
    """Yield a warning per set of axes that splits no dim of some einsums, so that their work is repeated over it."""
    names: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for o in operations.values():
        if einsum_flops(o.operation, sizes):
            if unused := mesh.ordered(a for a in mesh.axes if a not in ("stage", *o.compute_axes, *o.only)):
                names[unused].append(o.operation.name.split(".", 2)[-1])
    for unused, found in names.items():
        times = mesh.extent(unused)
        yield f"axes {'+'.join(unused)} split no dim of {', '.join(dict.fromkeys(found))}: computed {times} times over"

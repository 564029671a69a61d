"""Building the plan of a configuration, or refusing it with every violation at once."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from math import inf, prod
from typing import Any

from platform.boundary.refusals import ConfigError, closest_values, find_refused_key, format_violation, refuse_all
from platform.config import fields, layout_rules
from platform.config.extensions import refuse_exits
from platform.config.fields import (
    WEIGHTED,
    Config,
    choose_quantised_products,
    distill_settings,
    training_loss_name,
    training_objective_name,
)
from platform.config.key import WORKERS
from platform.config.layout_rules import can_have_uneven_experts, expert_axis_sizes, list_tensor_axes
from platform.config.ramps import fix_sequence_length, length_phases, parse_length_ramp
from platform.config.validation import violations_of_configuration
from platform.model import build_model
from platform.model.losses import violations_of_loss
from platform.model.tuning import find_adapters
from platform.optimizer import optimizers
from platform.optimizer.optimizers import find_factored_matrices, find_muon_matrices
from platform.plan.accelerators import find_accelerator, nominal_memory
from platform.plan.adapters import can_quantise
from platform.plan.chunks import RecordableModel
from platform.plan.generators import SHIPPED
from platform.plan.layout import find_divisors, find_factorizations, format_count
from platform.plan.model_types import NF4_KINDS, PAIR_LOSSES, LabelLoss, Recompute
from platform.plan.operations.recorder import IllegalPlan
from platform.plan.operations.registry import Ops
from platform.plan.operations.scaled_products import describe_other_scales
from platform.plan.plan import Plan, base_precision
from platform.plan.plan_builder import build_plan
from platform.plan.quantisation import ARCHITECTURES
from platform.plan.scheme import NESTED, RINGS, ModelMistake, Scheme, compose_scheme
from platform.plan.step_collectives import communication
from platform.predict import async_choice, choose_schedule, pair_choice
from platform.predict.choose_schedule import count_microbatches, find_dealing_rounds, find_even_rounds, place_chunks
from platform.predict.legal_hints import keep_legal_hints
from platform.predict.memory_budget import MemoryForecast
from platform.predict.recorded_passes import violations_of_graphs

CHOICES = {"auto": ("gather", "heads", "ring"), "nested": NESTED}  # kinds of context among which a context_kind chooses
BROKEN = "planner"  # what a line is about that no user sees
MESHES_SHOWN = 4
MESHES_TRIED = 60  # nearest meshes that are planned to find legal ones; each takes milliseconds
FACTORIZATIONS = 10_000
DEEP = 32  # models of more layers are first planned with two, so that a refusal is quick at any depth


def expert_group_size(config: Config, data: int) -> int:
    """Choose how many of the `data` replicas of a plan to build share the experts, up to parallel.experts."""
    most, inside = min(config.parallel.experts, data), prod(expert_axis_sizes(config).values())
    experts = config.model.experts // inside  # of each of the tensor ranks that divide them
    uneven, numbers = can_have_uneven_experts(config), range(1, min(most, experts) + 1)
    return max((n for n in numbers if data % n == 0 and (uneven or experts % n == 0)), default=1)


def zero_group_size(config: Config, groups: int, experts: int) -> int:
    """Choose how many of the `groups` of `experts` replicas of a plan to build share the tensors that ZeRO shards: the
    largest divisor that makes up to parallel.zero_group replicas, at least one; 0 for all groups, and without ZeRO."""
    most = min(max(config.parallel.zero_group // experts, 1), groups)
    group_size = max(n for n in range(1, most + 1) if groups % n == 0)
    return group_size if config.parallel.zero and config.parallel.zero_group and group_size < groups else 0


def context_axis_sizes(config: Config, kind: str) -> dict[str, int]:
    """Return the sizes of the axes that the contexts of a plan to build have, of a `kind` of context_kind, not auto."""
    ranks, inner = config.parallel.context, config.parallel.context_heads
    exchange = ranks if kind == "heads" else inner if kind in NESTED else 1
    return {"context": ranks // exchange, "exchange": exchange}


def choose_context_kinds(config: Config, data: int) -> list[str]:
    """Return the kinds of a configuration's contexts that parallel.context_kind allows: where it chooses, those with a
    legal plan for `data` replicas, the one that moves the fewest bytes first, if any. One layer is planned."""
    kind = config.parallel.context_kind
    choices = CHOICES.get(kind, (kind,))
    if config.parallel.context == 1 or len(choices) == 1:
        return [choices[0]]
    bytes_by_kind = {}
    for kind in choices:
        *_, plan = plans = _plans_of_one_layer(config, data, kind)
        rotates = plan and any(c.op == "rotate" for o in plan.operations.values() for c in o.collectives)
        if plan and all(plans) and plan.scheme.ring == rotates:
            bytes_by_kind[kind] = sum(communication(plan).values())
    return sorted(bytes_by_kind, key=bytes_by_kind.__getitem__) or [choices[0]]


def _find_stated_memory(config: Config) -> float:
    """Return the bytes of a device that a configuration states, inf if none, or if not all know its schedule."""
    # alike before devices are looked for and after, in the driver and in workers
    known = config.pipeline.kind in ("none", *SHIPPED)
    return (config.cluster.device_memory * 1e9 or nominal_memory(config.cluster.gpu) or inf) if known else inf


def make_plan(
    config: Config,
    workers: int | None = None,
    stage_of: Sequence[int] | None = None,
    parts: Sequence[Sequence[str]] = (),
) -> Plan:
    """Build the plan of a run from its configuration. `workers`: number of workers, from which parallel.data=-1 is
    settled (None: one replica). `stage_of`: the pipeline stage of every model chunk, in order; from the schedule if
    None. `parts`: the units of every chunk; of about equal cost if there are none.

    Raises ConfigError with one line per violation, and such hints as are legal.
    """
    try:
        return _make_plan(config, workers, stage_of, parts)
    except ConfigError as error:
        refusals = partial(list_refusals, workers=workers)
        raise ConfigError(keep_legal_hints(config, error.violations, refusals)) from error


@refuse_exits()
def _make_plan(
    config: Config,
    workers: int | None,
    stage_of: Sequence[int] | None,
    parts: Sequence[Sequence[str]] = (),
    weighs: bool = True,
) -> Plan:
    """Build the plan of a run as `make_plan` does, with the hints of its refusals as they come. `weighs`: True to
    take contexts of another kind that fits where the kind that moves the fewest bytes lacks memory."""
    data = count_replicas(config, workers)
    first, *others = choose_context_kinds(config, data)
    plan, memory = _build_kind_plan(config, data, first, stage_of, parts), _find_stated_memory(config)
    if not others or memory == inf or not weighs:
        return plan
    parallel, cluster = replace(config.parallel, data=data), replace(config.cluster, device="auto")
    weighed = replace(config, parallel=parallel, cluster=cluster)
    if (needs := MemoryForecast(weighed, plan)).exceeds_memory(memory):
        for kind in others:
            less = _build_kind_plan(config, data, kind, stage_of, parts)
            if not MemoryForecast(weighed, less).exceeds_memory(memory):
                sizes = f"{needs.peak_bytes / 1e9:.4g} of {memory / 1e9:.4g} GB"
                why = f"with {first}, which moves fewer bytes, a worker needs {sizes}"
                return replace(less, warnings=(*less.warnings, f"parallel.context_kind={kind}: {why}"))
    return plan


def _build_kind_plan(
    config: Config, data: int, kind: str, stage_of: Sequence[int] | None, parts: Sequence[Sequence[str]]
) -> Plan:
    """Build the plan of a run over `data` replicas whose contexts are of a `kind`; the rest as in `make_plan`."""
    scheme, is_placed = compose_config_scheme(config, data, kind), stage_of is not None
    try:
        model = build_model(config.model)
        if few := _violation_of_chunk_count(config, len(getattr(model, "units", ("the model",)))):
            raise ConfigError([few, *_find_other_violations([few], config, data, kind)])
        if config.model.layers > DEEP:  # all layers are alike
            shallow = build_model(replace(config.model, layers=2))
            build_plan(shallow, scheme, data=data, microbatch=config.train.microbatch, microbatches=1)
        stage_of = place_chunks(config, data) if stage_of is None else stage_of
        plan = _build_unchecked_plan(config, model, scheme, data, stage_of, parts)
        if (rounds := find_even_rounds(config, plan)) != scheme.rounds:
            plan = _build_unchecked_plan(config, model, replace(scheme, rounds=rounds), data, stage_of, parts)
    except ModelMistake as error:
        legal = closest_values(error.name, error.legal)
        raise ConfigError("model.kind", config.model.kind, f"{error.name}: {error.reason}", legal) from None
    except IllegalPlan as error:
        *lines, last = error.violations
        others = _find_other_violations(error.violations, config, data, kind)
        meshes = [str(m).replace("'", "") for m in islice(_iterate_legal_meshes(config, data), MESHES_SHOWN)]
        also = f"; tensor.axes of as many workers that do: {' or '.join(meshes)}" if meshes else ""
        raise ConfigError([*lines, last + also, *others]) from None
    further = (*_warnings_of_ring(plan, config.model.dropout), *_warnings_of_emulation(plan, config.cluster.gpu))
    plan = _mark_special_updates(config, replace(plan, warnings=(*plan.warnings, *further)))
    from platform.predict.step_price import choose_bucket_size, chooses_narrow_gathers  # with numpy

    plan = replace(plan, bucket_mib=choose_bucket_size(config, plan))
    plan = replace(plan, gathers_tiles=chooses_narrow_gathers(config, plan))
    of_optimizer = [optimizers.violations_of_patterns, optimizers.violations_of_splits]
    of_optimizer += [optimizers.violations_of_stored_states]
    checks = [*of_optimizer, choose_schedule.violations_of_kernel, violations_of_loss, _violations_of_documents]
    checks += [_violations_of_quantised_weights, _violations_of_cut_blocks]
    if not is_placed:  # by a worker of a run, or for another system that is predicted
        checks += [choose_schedule.violations_of_selective, violations_of_graphs]
        checks += [async_choice.violations_of_async_products, pair_choice.violations_of_pairs]
    if refused := [line for check in checks for line in check(config, plan)]:
        raise ConfigError([*refused, *_find_other_violations(refused, config, data, kind)])
    plan = async_choice.choose_async_products(config, _add_shorter_plans(config, plan, data, kind))
    plan = pair_choice.choose_pairs(config, plan)
    return replace(plan, warnings=(*plan.warnings, *async_choice.warnings_of_async_products(config, plan)))


def settle_for_workers(config: Config, plan: Plan) -> None:
    """Write into a configuration what its plan chose by the file of cluster.hardware, which workers may lack."""
    if plan.zero < 3:
        config.parallel.bucket_mib = plan.bucket_mib
    elif plan.has_scaled_products:
        config.quantise.gather = "on" if plan.gathers_tiles else "off"
    async_choice.settle_async_products(config, plan)
    pair_choice.settle_pairs(config, plan)


def compose_config_scheme(config: Config, data: int, kind: str) -> Scheme:
    """Compose the scheme of a configuration for `data` replicas, whose contexts are of a `kind`."""
    parallel, experts = config.parallel, expert_group_size(config, data)
    return compose_scheme(
        asdict(config.tensor),
        asdict(config.branch),
        data,
        zero=zero_group_size(config, data // experts, experts),
        experts=experts,
        lent=parallel.lent_experts,
        context=context_axis_sizes(config, kind),
        rounds=find_dealing_rounds(config),
        ring=kind in RINGS and parallel.context > 1,
        tensor_experts=parallel.tensor_experts,
    )


def _build_unchecked_plan(
    config: Config,
    model: RecordableModel,
    scheme: Scheme,
    data: int,
    stage_of: Sequence[int],
    parts: Sequence[Sequence[str]] = (),
) -> Plan:
    """Build the plan of a configured `model` over `data` replicas, without what only updates need; `stage_of`, `parts`:
    the stage, and the units if they are given, of every chunk. Raises ModelMistake, IllegalPlan."""
    loss = training_loss_name(config)
    return build_plan(
        model,
        scheme,
        data=data,
        microbatch=config.train.microbatch,
        microbatches=count_microbatches(config, data),
        sequences=config.train.global_batch,
        stage_of=stage_of,
        recompute=Recompute(config.recompute, config.recompute_every, config.recompute_offload),
        mlp_chunks=config.train.mlp_chunks,
        compiles_collectives=config.train.compile_collectives,
        scatter_gather=config.pipeline.scatter_gather,
        precision=base_precision(config.precision),
        quantise=choose_quantised_products(config),
        zero=config.parallel.zero,
        turns=config.pipeline.kind == "none",
        dropout=config.model.dropout,
        fused_dropout=config.model.fused_dropout,
        attention_kernel=config.train.attention_kernel,
        loss=LabelLoss(
            loss,
            training_objective_name(config) in WEIGHTED,
            loss in PAIR_LOSSES,
            settings.top if (settings := distill_settings(config)) else 0,
        ),
        parts=parts,
        frozen=_find_frozen(config, model),
        adapters=find_adapters(config.model, config.tune, model),
    )


def _add_shorter_plans(config: Config, plan: Plan, data: int, kind: str) -> Plan:
    """Return the plan with a plan for each shorter length of its sequences (train.length_ramp), of the same parameters
    on the same ranks. Raises ConfigError with a line per length without such a plan. `kind`: the contexts'."""
    shorter_plans: dict[int, Plan] = {}
    lines: list[str] = []
    stage_of, parts = [c.stage for c in plan.chunks], [c.units for c in plan.chunks]
    for entry, phase in zip(config.train.length_ramp[:-1], parse_length_ramp(config.train), strict=False):
        short = fix_sequence_length(config, phase.length)
        try:
            short_plan = _build_unchecked_plan(short, build_model(short.model), plan.scheme, data, stage_of, parts)
        except IllegalPlan as error:
            lines += _violations_of_shorter_plan(config, entry, error, data, kind)
            continue
        if _places_of_weights(short_plan) != _places_of_weights(plan):
            constraint = f"model.kind={config.model.kind} has other parameters at this length"
            lines.append(format_violation("train.length_ramp", entry, constraint, [[]]))
        lines += (format_violation("train.length_ramp", entry, line.partition("; ")[0], [[]])
                  for line in _violations_of_cut_blocks(config, short_plan))  # fmt: skip
        updated = {name: getattr(plan, name) for name in _SPECIAL}
        shorter_plans[phase.length] = replace(short_plan, **updated)
    refuse_all(lines)
    return replace(plan, shorter=shorter_plans)


def _violations_of_shorter_plan(config: Config, entry: str, error: IllegalPlan, data: int, kind: str) -> Iterator[str]:
    """Yield a refusal line for each reason in the `error` of the plan that an entry of train.length_ramp asks for."""
    start, _, length = entry.partition(":")
    every = find_divisors(config.model.length)
    others = (n for n in every if _plan_of_one_layer(fix_sequence_length(config, n), data, kind))
    legal = [f"{start}:{n}" for n in closest_values(int(length), others)] or ["[]"]
    for reason in error.violations:
        yield format_violation("train.length_ramp", entry, reason.partition(";")[0], legal)


def _places_of_weights(plan: Plan) -> list[tuple[Any, ...]]:
    """Return what of each parameter of a plan decides where its blocks lie, and where its gradients are summed."""
    reduced = plan.reductions
    return [(p.name, plan.global_shape(p), plan.layout(p), reduced.get(p.name), plan.stages_of[p.name])
            for p in (*plan.parameters, *plan.states)]  # fmt: skip


def count_replicas(config: Config, workers: int | None) -> int:
    """Return the number of data replicas to plan for: parallel.data or, where it is -1, `workers` (None: one replica's)
    divided by the product of all other axes. Raises ConfigError if that leaves a rest."""
    if config.parallel.data != -1:
        return config.parallel.data
    inner = prod(n for _, n in compose_scheme(asdict(config.tensor), asdict(config.branch), 1).axes)
    inner *= config.pipeline.stages * config.parallel.context
    workers = workers or inner
    if workers > WORKERS:
        raise ConfigError(f"parallel.data=-1: {workers} workers, of which there may be {WORKERS}")
    if workers < inner or workers % inner:
        worker_count = format_count(workers, "worker")
        raise ConfigError(f"parallel.data=-1: {worker_count}, no multiple of {inner}, the other axes' product")
    return workers // inner


_SPECIAL = "matrices", "factored", "stored", "quantised", "quantised_kind", "bucket_mib", "gathers_tiles"


def _mark_special_updates(config: Config, plan: Plan) -> Plan:
    """Return the plan with the names of its parameters that are kept in 4 bits (QLoRA), whole matrices (Muon), factored
    (Adafactor)."""
    plan = replace(plan, stored=optimizers.describe_stored_states(config.optimizer))
    if config.tune.kind == "qlora":
        base = (p for p in plan.parameters if p.name in plan.frozen)
        names = tuple(p.name for p in base if can_quantise(p))
        plan = replace(plan, quantised=names, quantised_kind=[*NF4_KINDS][config.tune.double])
    if config.optimizer.kind == "muon":
        return replace(
            plan, matrices=tuple(n for n in find_muon_matrices(config.optimizer, plan) if n not in plan.frozen)
        )
    if config.optimizer.kind == "adafactor":
        return replace(plan, factored=tuple(find_factored_matrices(plan)))
    return plan


def _warnings_of_ring(plan: Plan, dropout: float) -> Iterator[str]:
    """Yield a warning for a plan, as it is built, in which keys are to go around, and some attention gathers them."""
    if not plan.scheme.ring:
        return
    gathers = [name for (kind, name) in plan.operations if kind == Ops.relayout.kind and name.endswith("attention.key")]
    if names := dict.fromkeys(name.split(".", 2)[-1].removesuffix(".key") for name in gathers):
        reasons = {"tensor.uneven=true": plan.scheme.uneven, f"model.dropout={dropout}": dropout}
        why = next((reason for reason, holds in reasons.items() if holds), "another axis splits length there")
        yield f"keys of {', '.join(names)} are gathered, not passed around a ring: {why}"


def _warnings_of_emulation(plan: Plan, gpu: str) -> Iterator[str]:
    """Yield a warning for products in 8 bits for which the named `gpu`, or some if none is named, has no kernel."""
    how, accelerator = plan.quantisation, find_accelerator(gpu)
    if how is None or (accelerator and how.has_kernels(accelerator.capability)):
        return
    able = [title for capability, title in ARCHITECTURES.items() if how.has_kernels(capability)]
    emulated = f"products with a scale for each {how.scale} are emulated in {plan.precision}"
    yield f"{emulated}{f' on {gpu}' if accelerator else ''}: kernels for them are on {' and '.join(able) or 'no GPU'}"


def _violation_of_chunk_count(config: Config, units: int) -> str:
    """Return the refusal line of a plan with more pipeline chunks than its model has `units` (blocks, ...), or ""."""
    stages, chunks = config.pipeline.stages, config.pipeline.chunks
    if stages * chunks <= units:
        return ""
    constraint = f"x pipeline.chunks={chunks} is more than the {units} units of the model (embeddings, blocks, head)"
    legal = units // chunks or f"pipeline.chunks={max(1, units // stages)}"
    return format_violation("pipeline.stages", stages, constraint, [legal])


def _find_frozen(config: Config, model: RecordableModel) -> tuple[str, ...]:
    """Return the names of a model's parameters that match a pattern of train.freeze, which no update changes. Raises
    ConfigError for a pattern that matches none, and if no parameter is left to train."""
    names = [p.name for p in model.parameters() if not p.is_state]
    if config.tune.kind != "none":
        return tuple(names)
    matches_by_pattern = {pattern: fnmatch.filter(names, pattern) for pattern in config.train.freeze}
    vain = {p: closest_values(p, names)[:3] for p, matched in matches_by_pattern.items() if not matched}
    reason = "matches no parameter of the model"
    lines = [format_violation("train.freeze", pattern, reason, legal) for pattern, legal in vain.items()]
    frozen = tuple(name for name in names if any(name in matched for matched in matches_by_pattern.values()))
    if len(frozen) == len(names):
        lines.append(format_violation("train.freeze", ",".join(matches_by_pattern), "leaves no parameter to train"))
    refuse_all(lines)
    return frozen


def _violations_of_quantised_weights(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a refusal line if the plan cuts a weight inside a block of elements in 4 bits (the numbers would be others
    than one process has), or if a weight is no whole blocks."""
    unit, double = NF4_KINDS[plan.quantised_kind], config.tune.double
    cut = [p for p in plan.parameters if p.name in frozenset(plan.quantised) and plan.cuts_blocks(p, unit)]
    if cut:
        also = f" and {len(cut) - 1} more" if cut[1:] else ""
        axes = "+".join(plan.mesh.order_axes({a for p in cut for a in plan.layout(p).axes}))
        how = f"is cut by {axes} inside a block" if axes else "is not of whole blocks"
        constraint = f"{cut[0].name}{also} {how} of {unit} elements with one scale{' of scales' if double else ''}"
        key, legal = ("tune.double", False) if double else ("tune.kind", "lora")
        yield format_violation(key, getattr(config.tune, key.partition(".")[2]), constraint, [legal])


def _violations_of_cut_blocks(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a refusal line for each way in which a plan's products in 8 bits would be other numbers than in one
    process, with the first of them."""
    names_by_reason: dict[str, list[str]] = {}
    for planned in plan.operations.values():
        for group in planned.groups:
            for e in group.einsums:
                if why := describe_other_scales(plan.planner, planned.operation, group, e):
                    names_by_reason.setdefault(why, []).append(planned.operation.name)
    for why, names in names_by_reason.items():
        also = f" and {len(names) - 1} more" if names[1:] else ""
        legal = ["none"] if any(g.panels for o in plan.operations.values() for g in o.groups) else ["row", "tensor"]
        yield format_violation(
            "quantise.scale", config.quantise.scale, f"{why}, in products of {names[0]}{also}", legal
        )


def _violations_of_documents(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a refusal line for a plan whose model does not read where documents begin, if data.document_mask is set."""
    if config.data.document_mask and "begins" not in plan.reader_layouts:
        constraint = f"model.kind={config.model.kind} does not read `begins`, where a token's document begins"
        yield format_violation("data.document_mask", True, constraint, [False])


def plan_quickly(config: Config, weighs: bool = True) -> Plan | None:
    """Build the plan of a candidate configuration, for searches over many; None if it is refused. A shipped pipeline
    schedule's table is not made: the stages of its chunks are known. `weighs` as in `_make_plan`."""
    pipeline = config.pipeline
    loop = tuple(range(pipeline.stages)) * pipeline.chunks  # where the shipped schedules place chunks
    try:
        plan = _make_plan(config, None, loop if pipeline.kind in ("none", *SHIPPED) else None, weighs=weighs)
    except ConfigError:
        return None
    return None if any(choose_schedule.violations_of_selective(config, plan)) else plan


def _iterate_legal_meshes(config: Config, data: int) -> Iterator[dict[str, int]]:
    """Yield, as remedies for an illegal plan, sizes of the tensor scheme's axes by name, with the configured product,
    on which this model has a legal plan over `data` replicas, the nearest to the configured sizes first."""
    configured_axes = {axis: config.tensor.axes.get(axis, 1) for axis in list_tensor_axes(config.tensor)}
    workers = prod(configured_axes.values())
    factorizations = islice(find_factorizations(workers, len(configured_axes)), FACTORIZATIONS)
    candidates = [dict(zip(configured_axes, sizes, strict=True)) for sizes in factorizations]
    candidates.sort(key=lambda axes: sum(abs(axes[a] - n) for a, n in configured_axes.items()))
    for axes in candidates[:MESHES_TRIED]:
        if has_legal_plan(replace(config, tensor=replace(config.tensor, axes=axes)), data):
            yield axes


def has_legal_plan(config: Config, data: int) -> bool:
    """Return True if one layer of the configured model has a legal plan over `data` replicas, at all lengths."""
    return all(_plans_of_one_layer(config, data, choose_context_kinds(config, data)[0]))


def _plans_of_one_layer(config: Config, data: int, kind: str) -> list[Plan | None]:
    """Return `_plan_of_one_layer` of a configuration for each length of its sequences, ascending."""
    lengths = (phase.length for phase in length_phases(config))
    return [_plan_of_one_layer(fix_sequence_length(config, length), data, kind) for length in lengths]


def _plan_of_one_layer(config: Config, data: int, kind: str) -> Plan | None:
    """Return the plan of one layer of the model over `data` replicas, contexts of a `kind`; None if it is illegal."""
    try:
        return _build_layer_plan(config, data, kind)
    except IllegalPlan:
        return None


def list_refusals(config: Config, workers: int | None = None) -> list[str]:
    """Return the refusal lines of a configuration's values, and of one layer of its plan where it can have one."""
    lines = violations_of_configuration(config)
    if fields.violations_of_types(config) or config.plan.search or [*layout_rules.violations_of_worker_count(config)]:
        return lines
    if any(fields.KEYS[key].planned for key in fields.violations_of_values(config)):
        return lines
    try:
        data = count_replicas(config, workers)
        return [*lines, *violations_of_layers(config, data, choose_context_kinds(config, data)[0])]
    except ConfigError as error:
        return [*lines, *error.violations]
    except Exception as error:  # of a planner that an illegal value breaks
        return [*lines, f"{BROKEN}: {error}"]


def complete_violations(config: Config, lines: Sequence[str], with_plan: bool = True) -> list[str]:
    """Return the refusal lines of a configuration with legal hints; `with_plan`: and what its plan is refused for."""
    known = {BROKEN, *map(find_refused_key, lines)}
    follows = not with_plan or any(key.startswith(("tensor.", "branch.")) for key in known)  # from an unsound scheme
    more = [line for line in ([] if follows else list_refusals(config)) if find_refused_key(line) not in known]
    return keep_legal_hints(config, [*lines, *more], list_refusals)


def _build_layer_plan(config: Config, data: int, kind: str) -> Plan:
    """Build the plan of one layer of the model over `data` replicas, contexts of a `kind`. Raises IllegalPlan."""
    model, scheme = build_model(replace(config.model, layers=1)), compose_config_scheme(config, data, kind)
    return build_plan(model, scheme, data=data, microbatch=config.train.microbatch, microbatches=1)


def violations_of_layers(config: Config, data: int, kind: str) -> Iterator[str]:
    """Yield the refusal lines of a configuration's plan over `data` replicas, contexts of a `kind`, that its number of
    stages and one layer of its model show, at all lengths."""
    if few := _violation_of_chunk_count(config, len(getattr(build_model(config.model), "units", ("the model",)))):
        yield few
    for entry, phase in zip([*config.train.length_ramp[:-1], ""], length_phases(config), strict=False):
        try:
            _build_layer_plan(fix_sequence_length(config, phase.length), data, kind)
        except IllegalPlan as error:
            yield from _violations_of_shorter_plan(config, entry, error, data, kind) if entry else error.violations


def _find_other_violations(lines: Sequence[str], config: Config, data: int, kind: str) -> list[str]:
    """Return the lines of `violations_of_layers` about other keys than the refusal `lines` of a plan are about."""
    known = {*map(find_refused_key, lines)}
    return [line for line in violations_of_layers(config, data, kind) if find_refused_key(line) not in known]

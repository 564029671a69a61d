"""Validation of a whole configuration: each value by itself (`platform.config.bounds`), then rules that relate keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any

from platform.boundary.refusals import closest, violation
from platform.config.bounds import KEYS, flat_values, violations_of_types, violations_of_values
from platform.config.durations import nearest_rhythms, rhythm_of, seconds_of
from platform.config.execution import ON_RAY, Cluster
from platform.config.extending.own_settings import violations_of_settings
from platform.config.fields import Branch, Config
from platform.config.identity import violations_of_allowances
from platform.config.key import SECONDS, WORKERS
from platform.config.layout_map import axes_of, violations_of_tables
from platform.config.rules.data_rules import violations_of_data, violations_of_documents, violations_of_objective
from platform.config.rules.optimizer_rules import violations_of_optimizer
from platform.config.rules.train_rules import (
    violations_of_evaluation,
    violations_of_ramp,
    violations_of_smoothing,
    violations_of_start,
)
from platform.plan.language.numbers import divisors
from platform.plan.language.scheme import RESERVED
from platform.plan.memory.hardware import ACCELERATORS, memory_of
from platform.plan.schedule.generators import NO_TABLE, ONE_CHUNK


def violations_of_configuration(config: Config) -> list[str]:
    """Return one refusal line per mistake in a configuration; [] if there is none.

    Reads no file, device or cluster. A rule is skipped where one of the keys it relates is already wrong by itself.
    """
    found = violations_of_values(config)
    if violations_of_types(config):
        return [line for lines in found.values() for line in lines]
    related = (rule(config) for keys, rule in RELATIONS if not found.keys() & keys)
    return [line for lines in (*found.values(), *related) for line in lines]


def _refused(config: Config, key: str, constraint: str, legal: Iterable[Any] = ()) -> str:
    """Return the refusal line of `key`, at odds with others: `constraint` says why, `legal` are values to suggest."""
    return violation(key, flat_values(config)[key], constraint, legal)


def _attention(config: Config) -> Iterator[str]:
    """Yield a refusal line for each number of heads that does not divide what it must (model width, query heads), and
    for an odd width per head under rotary positions."""
    m = config.model
    rope = "model.positions=rope needs an even d_kv"
    if not m.d_kv and m.d_model % m.heads:
        constraint = f"must divide model.d_model={m.d_model} where model.d_kv is not given"
        yield _refused(config, "model.heads", constraint, closest(m.heads, divisors(m.d_model)))
    elif m.positions == "rope" and m.d_kv % 2:
        yield _refused(config, "model.d_kv", rope, [m.d_kv - 1, m.d_kv + 1])
    elif m.positions == "rope" and not m.d_kv and m.d_model // m.heads % 2:
        legal = closest(m.heads, [h for h in divisors(m.d_model) if m.d_model // h % 2 == 0])
        constraint = f"{rope}, not model.d_model / model.heads = {m.d_model // m.heads}"
        yield _refused(config, "model.heads", constraint, legal)
    if m.kv_heads and m.heads % m.kv_heads:
        legal = closest(m.kv_heads, divisors(m.heads))
        yield _refused(config, "model.kv_heads", f"must divide model.heads={m.heads}", legal)


def _rotary(config: Config) -> Iterator[str]:
    """Yield a refusal line for each mistake in how rotary positions are scaled."""
    m, kind = config.model, f"model.rope_scaling={config.model.rope_scaling}"
    if m.rope_scaling == "none":
        return
    if m.positions != "rope":
        yield _refused(config, "model.rope_scaling", f"model.positions={m.positions} has no rotations", ["none"])
    if m.rope_scaling == "linear":
        return
    if not m.rope_original_length:
        yield _refused(config, "model.rope_original_length", f"{kind} needs the length before", [m.length])
    if m.rope_high <= m.rope_low:
        yield _refused(config, "model.rope_high", f"must be > model.rope_low={m.rope_low:g}", [m.rope_low * 4])


def _seen(config: Config) -> Iterator[str]:
    """Yield a refusal line for each restriction of what attention sees that the kind of model does not know, and for
    layers with a window that the model lacks."""
    m, wrong = config.model, f"model.kind={config.model.kind} has no such attention"
    if m.kind in ("encoder", "encoder_decoder", "two_layer"):
        if m.window:
            yield _refused(config, "model.window", wrong, [0])
        if config.data.document_mask:
            yield _refused(config, "data.document_mask", wrong, [False])
    if m.segments and m.kind in ("decoder", "encoder_decoder", "two_layer"):
        yield _refused(config, "model.segments", f"model.kind={m.kind} has no segments", [0])
    if m.window_layers and not m.window:
        yield _refused(config, "model.window_layers", "model.window=0 is no window", [[]])
    elif beyond := [n for n in m.window_layers if n >= m.layers]:
        yield violation("model.window_layers", beyond[0], f"layers are 0 to {m.layers - 1}", [m.layers - 1])


def _head(config: Config) -> Iterator[str]:
    """Yield a refusal line if the head's transform is to have a gated activation."""
    m, gated = config.model, ("swiglu", "geglu", "geglu_tanh", "reglu")
    if m.head_transform and m.activation in gated:
        yield _refused(config, "model.activation", "model.head_transform=true has no gate", ["gelu", "gelu_tanh"])


def _replicas(config: Config) -> Iterator[str]:
    if config.parallel.data == 0 or config.parallel.data < -1:
        yield _refused(config, "parallel.data", KEYS["parallel.data"].constraint, [1, -1])


def too_many_workers(config: Config) -> Iterator[str]:
    """Yield a refusal line, which names the longest axis, if the sizes of all mesh axes of a configuration (replicas,
    stages, tensor, branch) multiply to more than WORKERS; `platform.config.bounds` refuses an axis too long by
    itself."""
    sizes = {
        "parallel.data": max(1, config.parallel.data),
        "pipeline.stages": config.pipeline.stages,
        **{f"tensor.axes.{name}": size for name, size in config.tensor.axes.items()},
        **{f"branch.axes.{name}": size for name, size in config.branch.axes.items()},
    }
    if (product := prod(sizes.values())) > WORKERS:
        longest = max(sizes, key=lambda key: sizes[key])
        rest = product // sizes[longest]
        what = " x ".join(f"{key}={size}" for key, size in sizes.items() if size > 1)
        legal = [WORKERS // rest] if rest <= WORKERS else []
        constraint = f"{what} are {product} workers, of which there may be {WORKERS}"
        yield violation(longest, sizes[longest], constraint, legal)


def _sample(config: Config) -> Iterator[str]:
    if config.model.kind in ("encoder", "two_layer") and config.monitor.sample:
        yield _refused(config, "monitor.sample", f"model.kind={config.model.kind} generates no text", [0])


def _stop_at(config: Config) -> Iterator[str]:
    """Yield a violation if the run is to stop after its last step."""
    steps = config.train.steps
    if config.train.stop_at > steps:
        yield _refused(config, "train.stop_at", f"must be <= train.steps={steps}", [steps])


def _time_limit(config: Config) -> Iterator[str]:
    """Yield a refusal line if `run.time_limit` is no duration, or longer than clocks and timers take."""
    key = "run.time_limit"
    try:
        if seconds_of(config.run.time_limit) > SECONDS:
            yield _refused(config, key, f"must be <= {SECONDS} seconds", [SECONDS])
    except ValueError:
        yield _refused(config, key, KEYS[key].constraint, ["3600", "1:00:00"])


def _violations_of_checkpoint_every(config: Config) -> Iterator[str]:
    """Yield a refusal line if `checkpoint.every` is neither a number of steps nor a duration."""
    key, every = "checkpoint.every", config.checkpoint.every
    try:
        rhythm_of(every)
    except ValueError:
        if isinstance(every, int):
            yield _refused(config, key, "must be >= 0", [0])
        else:
            yield _refused(config, key, KEYS[key].constraint, nearest_rhythms(every))


def _workers(config: Config) -> Iterator[str]:
    """Yield violations of the bounds on the number of workers, and of spares."""
    least, most = config.elastic.min_workers, config.elastic.max_workers
    if most and most < least:
        yield _refused(config, "elastic.max_workers", f"must be 0 or >= elastic.min_workers={least}", [0, least])
    if config.elastic.spares and config.cluster.kind == "inline":
        yield _refused(config, "elastic.spares", "cluster=inline is a world of one in one process", [0])


FAULT_KINDS = ("kill", "stop", "raise", "lock", "gil", "nan", "flip")
FAULT_SECTIONS = (  # sections of a step, as its clock records them; an action of a pipeline table (0F0) is legal too
    "step", "data", "forward", "backward", "exposed_comm", "bubble", "reduce", "optimizer", "checkpoint",
)  # fmt: skip
FAULT = re.compile(
    rf"(?P<step>\d{{1,12}}):(?P<kind>{'|'.join(FAULT_KINDS)}):(?P<rank>\d{{1,12}})(?::(?P<section>\w+))?", re.ASCII
)
_ACTION = re.compile(r"\d+[FBIW]\d+", re.ASCII)


def _faults(config: Config) -> Iterator[str]:
    """Yield a refusal line per entry of `elastic.faults`, the failures to inject for a test, that would never be
    injected: malformed, or at a step or section of a step that the run lacks."""
    steps = config.train.steps
    for fault in config.elastic.faults:
        if not (found := FAULT.fullmatch(fault)):
            kinds = "|".join(FAULT_KINDS)
            example = "20:kill:3:backward"
            yield violation("elastic.faults", fault, f"must be STEP:KIND:RANK[:SECTION], KIND {kinds}", [example])
            continue
        _, kind, rank, *section = fault.split(":")
        if not 1 <= int(found["step"]) <= steps:
            nearest = ":".join([str(min(max(1, int(found["step"])), steps)), kind, rank, *section])
            yield violation("elastic.faults", fault, f"its step must be from 1 to train.steps={steps}", [nearest])
        if found["section"] and found["section"] not in FAULT_SECTIONS and not _ACTION.fullmatch(found["section"]):
            legal = [f"{found['step']}:{kind}:{rank}:{name}" for name in closest(found["section"], FAULT_SECTIONS)[:3]]
            yield violation("elastic.faults", fault, f"a step has no section {found['section']}", legal)


def absent_ranks(config: Config, workers: int) -> Iterator[str]:
    """Yield a refusal line per entry of `elastic.faults`, the failures to inject for a test, at a rank that never
    exists: `workers` start the run, and it may grow to `elastic.max_workers`."""
    most = max(workers, config.elastic.max_workers)
    for fault in config.elastic.faults:
        if (found := FAULT.fullmatch(fault)) and int(found["rank"]) >= most:
            step, kind, _, *section = fault.split(":")
            nearest = ":".join([step, kind, str(most - 1), *section])
            yield violation("elastic.faults", fault, f"its rank must be below the {most} that the run has", [nearest])


def _verify_every(config: Config) -> Iterator[str]:
    """Yield a violation if replicas are to be compared where there are none."""
    if config.train.verify_every and config.parallel.zero == 3:
        constraint = "parallel.zero=3 keeps each weight once: there are no replicas to compare"
        yield _refused(config, "train.verify_every", constraint, [0])


def _deterministic(config: Config) -> Iterator[str]:
    """Yield a refusal line if a deterministic run's CPU workers may have other numbers of threads when restarted."""
    cluster = config.cluster
    if config.train.deterministic and cluster.kind == "ray" and cluster.device != "cuda" and not cluster.threads:
        constraint = "train.deterministic=true needs one number on all machines, as sums on a CPU depend on it"
        yield _refused(config, "cluster.threads", constraint, [1])


def _loss_scale(config: Config) -> Iterator[str]:
    """Yield a violation if the loss scale begins below its least value."""
    if config.loss_scale.least > config.loss_scale.initial:
        constraint = f"must be <= loss_scale.initial={config.loss_scale.initial:g}"
        yield _refused(config, "loss_scale.least", constraint, [config.loss_scale.initial])


def _buckets(config: Config) -> Iterator[str]:
    """Yield a violation if the buckets of relative positions do not fit the distance."""
    m = config.model
    if m.positions == "relative" and m.distance <= m.buckets // 2:
        constraint = f"must be more than half of model.buckets={m.buckets}"
        yield _refused(config, "model.distance", constraint, [m.buckets // 2 + 1])


def _pipeline(config: Config) -> Iterator[str]:
    """Yield a refusal line for each number of stages or chunks that the pipeline schedule cannot have, and for a table
    of a schedule that is missing or not read."""
    p = config.pipeline
    for key, size in (("pipeline.stages", p.stages), ("pipeline.chunks", p.chunks)):
        if p.kind == "none" and size != 1:
            yield _refused(config, key, "pipeline=none has one", [1])
    if p.kind in ONE_CHUNK and p.chunks != 1:
        legal = [1, "pipeline=interleaved", "pipeline=zb_h1"]
        yield _refused(config, "pipeline.chunks", f"pipeline={p.kind} has one chunk per stage", legal)
    if p.kind == "file" and not p.file:
        yield _refused(config, "pipeline.file", NO_TABLE, ["pipeline.file=FILE"])
    elif p.kind != "file" and p.file:
        yield _refused(config, "pipeline.file", "only for pipeline=file", ["pipeline=file", ""])


def _zero(config: Config) -> Iterator[str]:
    """Yield a violation if ZeRO is combined with a branch that keeps common parameters on one sub-grid."""
    if config.parallel.zero and config.branch.only:
        reason = f"not built yet beside branch={config.branch.kind}, whose common parameters are on sub-grid 0 alone"
        yield _refused(config, "parallel.zero", reason, [0])


def _scheme(config: Config) -> Iterator[str]:
    """Yield a refusal line for a tensor scheme without its table, each size of an axis that it does not declare, a
    layout that it does not read, and each mistake in the tables of tensor and branch."""
    tensor, declared = config.tensor, axes_of(config.tensor)
    if tensor.scheme not in ("serial", "layout") and not (tensor.regions or tensor.parameters):
        yield _refused(config, "tensor.scheme", "a scheme's name without its table; write tensor=NAME")
    elif tensor.scheme != "layout":
        for name, size in tensor.axes.items():
            if name not in declared:
                legal = [*(f"tensor.axes.{n}={size}" for n in closest(name, declared)), 1]
                yield violation(f"tensor.axes.{name}", size, f"tensor={tensor.scheme} has no such axis", legal)
        if tensor.layout is not None:
            yield _refused(config, "tensor.layout", "only for tensor=layout")
    yield from violations_of_tables(config)


def _branch(config: Config) -> Iterator[str]:
    """Yield a refusal line for a branch scheme without its table, and for each branch axis that has no scheme or whose
    name a tensor axis has."""
    tensor, branch = config.tensor, config.branch
    if branch.kind != "none" and not (branch.append or branch.prepend):
        yield _refused(config, "branch.kind", "a branch's name without its table; write branch=NAME")
    for name, size in branch.axes.items():
        if branch.kind == "none":
            yield violation(f"branch.axes.{name}", size, "branch=none has no axes", [1, "branch=NAME"])
        elif name in tensor.axes or name in axes_of(tensor):
            yield violation(f"branch.axes.{name}", size, f"tensor={tensor.scheme} has an axis {name} already")


def _slice_via(config: Config) -> Iterator[str]:
    """Yield a violation if a branch without an all-to-all is to replace it."""
    if config.branch.slice_via != "all_to_all" and not slices_heads(config.branch):
        constraint = f"branch={config.branch.kind} has no all-to-all that it would replace"
        yield _refused(config, "branch.slice_via", constraint, ["all_to_all"])


def slices_heads(branch: Branch) -> bool:
    """Return True if a branch scheme splits the batch in region `attention` and other dims in `core`, the attention
    itself: it then slices heads by all-to-all, the collective that `branch.slice_via` may replace."""
    return "core" in branch.append and "batch" in branch.append.get("attention", ())


def _axis_names(config: Config) -> Iterator[str]:
    """Yield a refusal line for each tensor or branch axis whose name is reserved or no ASCII identifier."""
    for group, axes in (("tensor", config.tensor.axes), ("branch", config.branch.axes)):
        for name, size in axes.items():
            if name in RESERVED:
                yield violation(f"{group}.axes.{name}", size, f"the names {', '.join(RESERVED)} are reserved")
            elif not (name.isascii() and name.isidentifier()):
                yield violation(f"{group}.axes.{name}", size, "an axis is named by letters, digits and _")


def _gpu(config: Config) -> Iterator[str]:
    """Yield a violation if the GPU is not among the known accelerators."""
    gpu = config.cluster.gpu
    if gpu and memory_of(gpu) is None:
        names = ["-".join(known.name.split()) for known in ACCELERATORS]
        yield _refused(config, "cluster.gpu", "unknown", closest(gpu, names)[:3])


RUNTIME_ENV = (  # fields of Ray's runtime_env
    "config", "conda", "container", "env_vars", "excludes", "image_uri", "nsight", "pip", "py_executable", "py_modules",
    "uv", "worker_process_setup_hook", "working_dir",
)  # fmt: skip


def _ray(config: Config) -> Iterator[str]:
    """Yield a refusal line for each key that only cluster=ray reads under another cluster, each unknown field of the
    runtime environment, and a request to the autoscaler that would ask for nothing in particular or not be waited
    for."""
    c, default = config.cluster, Cluster()
    for name in ON_RAY:
        if c.kind != "ray" and getattr(c, name) != getattr(default, name):
            yield _refused(config, f"cluster.{name}", "only cluster=ray reads it", [getattr(default, name)])
    for name, value in c.runtime_env.items():
        if name not in RUNTIME_ENV:
            legal = [f"cluster.runtime_env.{near}" for near in closest(name, RUNTIME_ENV)[:3]]
            yield violation(f"cluster.runtime_env.{name}", value, "unknown key", legal)
    if c.autoscale and c.device == "auto":
        yield _refused(config, "cluster.device", "cluster.autoscale=true must know what to ask for", ["cuda", "cpu"])
    if c.autoscale and not c.wait:
        yield _refused(config, "cluster.wait", "cluster.autoscale=true needs time in which machines start", [1800])


# (keys, rule): the rule runs only if none of these keys is wrong by itself.
RELATIONS: tuple[tuple[set[str], Callable[[Config], Iterator[str]]], ...] = (
    ({"model.d_model", "model.heads", "model.kv_heads", "model.d_kv"}, _attention),
    ({"model.positions", "model.rope_scaling", "model.rope_low", "model.rope_high", "model.length"}, _rotary),
    ({"model.kind", "model.layers", "model.window", "model.window_layers", "model.segments"}, _seen),
    ({"model.activation"}, _head),
    (set(), _replicas),
    ({"parallel.data", "pipeline.stages", "tensor.axes", "branch.axes"}, too_many_workers),
    ({"train.steps", "elastic.faults"}, _faults),
    ({"model.kind", "monitor.sample"}, _sample),
    ({"train.steps", "train.stop_at"}, _stop_at),
    ({"train.global_batch", "train.ramp_from", "train.ramp_by", "train.ramp_samples"}, violations_of_ramp),
    ({"eval.every", "eval.patience", "eval.least_gain", "train.ema"}, violations_of_evaluation),
    (set(), violations_of_start),
    ({"data.objective", "model.kind", "model.label_smoothing", "train.loss"}, violations_of_smoothing),
    ({"run.time_limit"}, _time_limit),
    ({"checkpoint.every"}, _violations_of_checkpoint_every),
    ({"elastic.min_workers", "elastic.max_workers"}, _workers),
    ({"train.verify_every", "parallel.zero"}, _verify_every),
    ({"cluster.kind", "cluster.device", "cluster.threads"}, _deterministic),
    ({"loss_scale.initial", "loss_scale.least"}, _loss_scale),
    ({"optimizer.betas", "optimizer.kind", "optimizer.schedule", "train.steps"}, violations_of_optimizer),
    ({"data.kind", "data.validation", "eval.every"}, violations_of_data),
    ({"data.kind", "data.objective", "model.kind", "model.length"}, violations_of_objective),
    ({"data.kind", "data.objective", "model.kind"}, violations_of_documents),
    ({"model.buckets", "model.distance"}, _buckets),
    ({"pipeline.kind", "pipeline.stages", "pipeline.chunks", "pipeline.file"}, _pipeline),
    (set(), _scheme),
    (set(), _branch),
    ({"branch.slice_via"}, _slice_via),
    ({"parallel.zero"}, _zero),
    (set(), _axis_names),
    (set(), _gpu),
    ({"cluster.kind", "cluster.device", "cluster.wait"}, _ray),
    (set(), violations_of_allowances),
    (set(), violations_of_settings),
)

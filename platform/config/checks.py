"""What a configuration may be: each value by itself (`platform.config.bounds`), and how values go together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf, prod
from typing import Any

from platform.config.bounds import (
    BOUNDS,
    CHOICES,
    MOST,
    NOT_BUILT,
    SECONDS,
    WORKERS,
    allow,
    impossible_values,
    leaves,
    not_built,
    wrong_values,
)
from platform.config.fields import (
    OBJECTIVES,
    Branch,
    Config,
    ConfigError,
    Rules,
    Tensor,
    closest,
    objective_of,
    violation,
)
from platform.config.identity import wrong_allowances
from platform.config.tables import read_yaml, wrong_tables
from platform.plan.language.layout import DIMS
from platform.plan.language.numbers import divisors
from platform.plan.language.scheme import REGIONS, RESERVED
from platform.plan.memory.hardware import MEMORIES, memory_of
from platform.plan.schedule.generators import ONE_CHUNK

__all__ = [
    "BOUNDS", "CHOICES", "MOST", "NOT_BUILT", "allow", "allow_dims", "axes_of", "impossible_values", "leaves",
    "not_built", "parse_layout", "seconds_of", "slices", "too_many_workers", "violations", "wrong_values",
]  # fmt: skip

KNOWN_DIMS = list(DIMS)  # of tensors, as tensor.layout names them


def allow_dims(names: Iterable[str]) -> None:
    """Adds the dims of a model of the user's own."""
    KNOWN_DIMS.extend(name for name in names if name not in KNOWN_DIMS)


def violations(config: Config) -> list[str]:
    """Everything that is impossible in a configuration by itself, one line each; [] if nothing is.

    Pure: looks at no file, device or cluster.
    """
    found = wrong_values(config)
    related = (rule(config) for keys, rule in RELATIONS if not found.keys() & keys)
    return [line for lines in (*found.values(), *related) for line in lines]


def _attention(config: Config) -> Iterator[str]:
    m = config.model
    if not m.d_kv and m.d_model % m.heads:
        constraint = f"must divide model.d_model={m.d_model} where model.d_kv is not given"
        yield violation("model.heads", m.heads, constraint, closest(m.heads, divisors(m.d_model)))
    elif m.positions == "rope" and m.d_kv % 2:
        yield violation("model.d_kv", m.d_kv, "model.positions=rope needs an even d_kv", [m.d_kv - 1, m.d_kv + 1])
    elif m.positions == "rope" and not m.d_kv and m.d_model // m.heads % 2:
        legal = closest(m.heads, [h for h in divisors(m.d_model) if m.d_model // h % 2 == 0])
        constraint = (
            f"model.positions=rope needs an even d_kv, not model.d_model / model.heads = {m.d_model // m.heads}"
        )
        yield violation("model.heads", m.heads, constraint, legal)
    if m.kv_heads and m.heads % m.kv_heads:
        legal = closest(m.kv_heads, divisors(m.heads))
        yield violation("model.kv_heads", m.kv_heads, f"must divide model.heads={m.heads}", legal)


def _replicas(config: Config) -> Iterator[str]:
    data = config.parallel.data
    if data == 0 or data < -1:
        yield violation("parallel.data", data, "must be >= 1, or -1 for as many as the workers give", [1, -1])


def too_many_workers(config: Config) -> Iterator[str]:
    """One axis too long is refused by its own bound; these are too many together."""
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


def _text(config: Config) -> Iterator[str]:
    if config.model.kind in ("encoder", "two_layer") and config.monitor.sample:
        constraint = f"model.kind={config.model.kind} generates no text"
        yield violation("monitor.sample", config.monitor.sample, constraint, [0])


def _stop(config: Config) -> Iterator[str]:
    if config.train.stop_at > config.train.steps:
        constraint = f"must be <= train.steps={config.train.steps}"
        yield violation("train.stop_at", config.train.stop_at, constraint, [config.train.steps])


def _time_limit(config: Config) -> Iterator[str]:
    try:
        if seconds_of(config.run.time_limit) > SECONDS:
            yield violation("run.time_limit", config.run.time_limit, f"must be <= {SECONDS} seconds", [SECONDS])
    except ValueError:
        constraint = "must be seconds or H:MM:SS"
        yield violation("run.time_limit", config.run.time_limit, constraint, ["3600", "1:00:00"])


def _every(config: Config) -> Iterator[str]:
    every = config.checkpoint.every
    try:
        rhythm_of(every)
    except ValueError:
        if isinstance(every, int):
            yield violation("checkpoint.every", every, "must be >= 0", [0])
        else:
            yield violation("checkpoint.every", every, f"must be {RHYTHM}", nearest_rhythms(every))


RHYTHM = "a number of steps, or a duration like 45s, 30m or 1h30m"
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}  # seconds
_DURATION = re.compile(r" *".join(rf"(?:([0-9]+(?:\.[0-9]+)?){unit})?" for unit in _UNITS))


def rhythm_of(every: int | str) -> tuple[int, float]:
    """`checkpoint.every` as (steps, seconds), of which one is 0. Raises ValueError for what is neither."""
    if isinstance(every, int) or re.fullmatch(r"[0-9]+", every):
        if (steps := int(every)) < 0:
            raise ValueError(every)
        return steps, 0.0
    found = _DURATION.fullmatch(every.strip())
    amounts = [float(number or 0) for number in found.groups()] if found else []
    seconds = sum(n * unit for n, unit in zip(amounts, _UNITS.values(), strict=False))
    if not 0 < seconds < inf:
        raise ValueError(every)
    return 0, seconds


def nearest_rhythms(every: str) -> list[str]:
    """What may have been meant."""
    found = re.search(r"[0-9]{1,9}", every)
    number = int(found[0]) if found else 30
    return [str(number), f"{number or 1}m"]


def seconds_of(duration: str) -> float:
    """90, 1:30 or 0:01:30 as seconds; "" is 0. Raises ValueError for what is none of these."""
    parts = duration.split(":") if duration else ["0"]
    numbers = [float(part) for part in parts]
    seconds = sum(n * 60**i for i, n in enumerate(reversed(numbers)))
    if len(parts) > 3 or not all(0 <= n < inf for n in numbers):
        raise ValueError(duration)
    return seconds


def _elastic(config: Config) -> Iterator[str]:
    e = config.elastic
    if e.max_workers and e.max_workers < e.min_workers:
        constraint = f"must be 0 or >= elastic.min_workers={e.min_workers}"
        yield violation("elastic.max_workers", e.max_workers, constraint, [0, e.min_workers])
    if e.spares and config.cluster.kind == "inline":
        yield violation("elastic.spares", e.spares, "cluster=inline is a world of one in one process", [0])


FAULT_KINDS = ("kill", "stop", "raise", "lock", "gil", "nan", "flip")
FAULT_SECTIONS = (  # of a step, as its clock books them; or an action of a pipeline's table, such as 0F0
    "step", "data", "forward", "backward", "exposed_comm", "bubble", "reduce", "optimizer", "checkpoint",
)  # fmt: skip
FAULT = re.compile(
    rf"(?P<step>\d{{1,12}}):(?P<kind>{'|'.join(FAULT_KINDS)}):(?P<rank>\d{{1,12}})(?::(?P<section>\w+))?", re.ASCII
)
_ACTION = re.compile(r"\d+[FBIW]\d+", re.ASCII)


def _faults(config: Config) -> Iterator[str]:
    """Faults that strike nobody: a word that is none, or a step or section that no run has."""
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
    """Yield a line per fault of a rank that a run which starts with so many workers never has."""
    most = max(workers, config.elastic.max_workers)
    for fault in config.elastic.faults:
        if (found := FAULT.fullmatch(fault)) and int(found["rank"]) >= most:
            step, kind, _, *section = fault.split(":")
            nearest = ":".join([step, kind, str(most - 1), *section])
            yield violation("elastic.faults", fault, f"its rank must be below the {most} that the run has", [nearest])


def _verify(config: Config) -> Iterator[str]:
    every = config.train.verify_every
    if every and config.parallel.zero == 3:
        constraint = "parallel.zero=3 keeps each weight once: there are no replicas to compare"
        yield violation("train.verify_every", every, constraint, [0])


def _optimizer(config: Config) -> Iterator[str]:
    if len(config.optimizer.betas) != 2:
        yield violation("optimizer.betas", config.optimizer.betas, "must be two numbers", [[0.9, 0.95]])


def _data(config: Config) -> Iterator[str]:
    if config.data.kind == "text" and not config.data.path:
        yield violation("data.path", "", "data=text needs a file, a folder or a glob", ["data.path=FILE"])
    if config.eval.every and not config.data.validation:
        yield violation("data.validation", 0, f"eval.every={config.eval.every} needs a held-out split", [0.05])


def _objective(config: Config) -> Iterator[str]:
    data, m = config.data, config.model
    objective, legal = objective_of(config), OBJECTIVES[m.kind]
    if objective not in legal or (objective == "pairs") != (data.kind == "pairs"):
        fitting = [o for o in legal if (o == "pairs") == (data.kind == "pairs")]
        constraint = f"model.kind={m.kind} and data={data.kind} do not go with it"
        yield violation("data.objective", objective, constraint, fitting)
    elif objective == "span_denoising" and (m.length < 3 or m.source_length == 1):
        yield violation("model.length", m.length, "span denoising needs at least 3, and a source of 2", [3])
    if m.source_length and m.kind != "encoder_decoder":
        yield violation("model.source_length", m.source_length, f"model.kind={m.kind} has one length", [0])


def _buckets(config: Config) -> Iterator[str]:
    m = config.model
    if m.positions == "relative" and m.distance <= m.buckets // 2:
        yield violation("model.distance", m.distance, f"must be more than half of model.buckets={m.buckets}")


def _pipeline(config: Config) -> Iterator[str]:
    p = config.pipeline
    for key, size in (("stages", p.stages), ("chunks", p.chunks)):
        if p.kind == "none" and size != 1:
            yield violation(f"pipeline.{key}", size, "pipeline=none has one", [1])
    if p.kind in ONE_CHUNK and p.chunks != 1:
        constraint = f"pipeline={p.kind} has one chunk per stage"
        yield violation("pipeline.chunks", p.chunks, constraint, [1, "pipeline=interleaved", "pipeline=zb_h1"])
    if p.kind == "file" and not p.file:
        yield violation("pipeline.file", "", "pipeline=file needs the table of a schedule, one line per stage")
    elif p.kind != "file" and p.file:
        yield violation("pipeline.file", p.file, "only for pipeline=file")


def _zero(config: Config) -> Iterator[str]:
    if config.parallel.zero and config.branch.only:
        reason = f"not built yet beside branch={config.branch.kind}, whose common parameters are on sub-grid 0 alone"
        yield violation("parallel.zero", config.parallel.zero, reason, [0])


def _scheme(config: Config) -> Iterator[str]:
    tensor, declared = config.tensor, axes_of(config.tensor)
    if tensor.scheme not in ("serial", "layout") and not (tensor.regions or tensor.parameters):
        constraint = not_built("tensor", tensor.scheme) or "a scheme's name without its table; write tensor=NAME"
        yield violation("tensor.scheme", tensor.scheme, constraint)
    elif tensor.scheme != "layout":
        for name, size in tensor.axes.items():
            if name not in declared:
                legal = closest(name, declared) or ["none"]
                yield violation(f"tensor.axes.{name}", size, f"tensor={tensor.scheme} has no such axis", legal)
        if tensor.layout is not None:
            yield violation("tensor.layout", tensor.layout, "only for tensor=layout")
    yield from wrong_tables(config, KNOWN_DIMS)


def _branch(config: Config) -> Iterator[str]:
    tensor, branch = config.tensor, config.branch
    if branch.kind != "none" and not (branch.append or branch.prepend):
        constraint = not_built("branch", branch.kind) or "a branch's name without its table; write branch=NAME"
        yield violation("branch.kind", branch.kind, constraint)
    for name, size in branch.axes.items():
        if branch.kind == "none":
            yield violation(f"branch.axes.{name}", size, "branch=none has no axes", ["none"])
        elif name in tensor.axes or name in axes_of(tensor):
            yield violation(f"branch.axes.{name}", size, f"tensor={tensor.scheme} has an axis {name} already")


def _slice_via(config: Config) -> Iterator[str]:
    branch = config.branch
    if branch.slice_via != "all_to_all" and not slices(branch):
        constraint = f"branch={branch.kind} has no all-to-all that it would replace"
        yield violation("branch.slice_via", branch.slice_via, constraint, ["all_to_all"])


def slices(branch: Branch) -> bool:
    """Whether a kind of branch slices heads by all-to-all around the attention: the batch is split before it."""
    return "core" in branch.append and "batch" in branch.append.get("attention", ())


def _axis_names(config: Config) -> Iterator[str]:
    for group, axes in (("tensor", config.tensor.axes), ("branch", config.branch.axes)):
        for name, size in axes.items():
            if name in RESERVED:
                yield violation(f"{group}.axes.{name}", size, f"the names {' and '.join(RESERVED)} are reserved")
            elif not (name.isascii() and name.isidentifier()):
                yield violation(f"{group}.axes.{name}", size, "an axis is named by letters, digits and _")


def _gpu(config: Config) -> Iterator[str]:
    if config.cluster.gpu and memory_of(config.cluster.gpu) is None:
        names = ["-".join(name.split()) for name, _ in MEMORIES]
        yield violation("cluster.gpu", config.cluster.gpu, "unknown", closest(config.cluster.gpu, names)[:3])


RELATIONS: tuple[tuple[set[str], Callable[[Config], Iterator[str]]], ...] = (  # judged where each key may be right
    ({"model.d_model", "model.heads", "model.kv_heads", "model.d_kv"}, _attention),
    (set(), _replicas),
    ({"parallel.data", "pipeline.stages", "tensor.axes", "branch.axes"}, too_many_workers),
    ({"train.steps", "elastic.faults"}, _faults),
    ({"model.kind", "monitor.sample"}, _text),
    ({"train.steps", "train.stop_at"}, _stop),
    ({"run.time_limit"}, _time_limit),
    ({"checkpoint.every"}, _every),
    ({"elastic.min_workers", "elastic.max_workers"}, _elastic),
    ({"train.verify_every", "parallel.zero"}, _verify),
    ({"optimizer.betas"}, _optimizer),
    ({"data.kind", "data.validation", "eval.every"}, _data),
    ({"data.kind", "data.objective", "model.kind", "model.length"}, _objective),
    ({"model.buckets", "model.distance"}, _buckets),
    ({"pipeline.kind", "pipeline.stages", "pipeline.chunks", "pipeline.file"}, _pipeline),
    (set(), _scheme),
    (set(), _branch),
    ({"branch.slice_via"}, _slice_via),
    ({"parallel.zero"}, _zero),
    (set(), _axis_names),
    (set(), _gpu),
    (set(), wrong_allowances),
)


def axes_of(tensor: Tensor) -> list[str]:
    """The axes that the chosen scheme declares, outer to inner: its order, else what its table mentions."""
    return tensor.order or _mentioned(tensor)


def _mentioned(tensor: Tensor) -> list[str]:
    tables = [*tensor.regions.values(), *tensor.parameters.values()]
    return list(dict.fromkeys(a for table in tables for axes in table.values() for a in axes))


def parse_layout(layout: str | Mapping[str, Any], axes: Iterable[str]) -> tuple[Rules, Rules]:
    """(regions, parameters) of the user's own layout over `axes`.

    `layout` is one line, "batch:rows;heads:cols" (dims apart by `;`, `,`, `|` or spaces, two axes on one dim as
    "heads:a+b"), or a map {dim: axis or list of axes}. Either holds for every region and every parameter; or it is a
    map {region: such a map}, in which `parameters` counts as a region. Raises ConfigError: one line for each unknown
    dim, region or axis.
    """
    table = _read_layout(layout)
    if not isinstance(table, Mapping):
        raise ConfigError(violation("tensor.layout", layout, "must be dim:axis, or a map", ["batch:rows;heads:cols"]))
    regions = (*REGIONS, "parameters")
    named = table if any(isinstance(v, Mapping) for v in table.values()) else dict.fromkeys(regions, table)
    known = list(axes)
    rules: Rules = {}
    lines = []
    for region, part in named.items():
        if region not in regions:
            lines.append(violation("tensor.layout", region, "no such region", closest(region, regions)))
        rules[region] = {dim: _axis_list(dim, value) for dim, value in (part or {}).items()}
        for dim, names in rules[region].items():
            if dim not in KNOWN_DIMS:
                lines.append(violation("tensor.layout", dim, "no such dim", closest(dim, KNOWN_DIMS)))
            if len(set(names)) < len(names):
                legal = [f"{dim}:{'+'.join(dict.fromkeys(names))}"]
                lines.append(violation("tensor.layout", f"{dim}:{'+'.join(names)}", "an axis splits a dim once", legal))
            for name in (name for name in names if name not in known):
                legal = closest(name, known) or ["tensor.axes.NAME=k makes one"]
                lines.append(violation("tensor.layout", f"{dim}:{name}", "no such axis in tensor.axes", legal))
    if lines:
        raise ConfigError(list(dict.fromkeys(lines)))  # one map for every region would repeat its mistakes
    return rules, {"all": rules.pop("parameters", {})}


def _read_layout(layout: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(layout, str) and layout.lstrip().startswith("{"):
        import yaml

        try:
            layout = read_yaml(layout)
        except yaml.YAMLError as error:
            raise ConfigError(violation("tensor.layout", layout, f"not YAML ({str(error).splitlines()[0]})")) from None
    if not isinstance(layout, str):
        return layout
    words = re.sub(r"\s*([:+])\s*", r"\1", layout).replace(";", " ").replace(",", " ").replace("|", " ").split()
    if wrong := [word for word in words if not re.fullmatch(r"\w+:\w+(\+\w+)*", word)]:
        lines = [violation("tensor.layout", word, "must be dim:axis or dim:axis+axis") for word in wrong]
        raise ConfigError(lines)
    dims = [word.partition(":")[0] for word in words]
    if twice := [dim for dim in dict.fromkeys(dims) if dims.count(dim) > 1]:
        axes = {dim: [a for d, _, a in (w.partition(":") for w in words) if d == dim] for dim in twice}
        legal = {dim: [f"{dim}:{'+'.join(dict.fromkeys(found))}"] for dim, found in axes.items()}
        raise ConfigError([violation("tensor.layout", dim, "is given twice", legal[dim]) for dim in twice])
    return dict(word.split(":") for word in words)


def _axis_list(dim: str, value: Any) -> list[str]:
    names = value.split("+") if isinstance(value, str) else [] if value is None else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            violation("tensor.layout", f"{dim}:{value}", "must be the name of an axis, or a list of names")
        )
    return list(names)

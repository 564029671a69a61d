"""What a value may be: tables of choices, bounds and relations, and what is not built yet.

A capability joins by a longer tuple in CHOICES and a shorter NOT_BUILT.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from math import inf
from operator import ge, gt, le, lt
from typing import Any

from platform.config import (
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
from platform.identity import wrong_allowances
from platform.plan.hardware import MEMORIES, memory_of
from platform.plan.layout import DIMS
from platform.plan.scheme import GATHERED, REGIONS, RESERVED, SLICE_VIA

CHOICES: dict[str, tuple[Any, ...]] = {
    "precision": ("fp64", "fp32", "bf16"),
    "recompute": ("none", "selective", "full"),
    "model.kind": ("decoder", "encoder", "encoder_decoder", "two_layer"),
    "model.fused_dropout": (False,),
    "model.norm": ("layernorm", "rmsnorm"),
    "model.activation": ("gelu", "relu", "swiglu", "geglu"),
    "model.positions": ("learned", "rope", "sinusoidal", "relative"),
    "data.kind": ("stdlib", "text", "pairs", "synthetic"),
    "data.objective": ("", "causal", "masked", "span_denoising", "pairs"),
    "optimizer.kind": ("adamw",),
    "optimizer.schedule": ("constant", "cosine", "inverse_sqrt"),
    "parallel.zero": (0, 1, 3),
    "branch.order": ("inner", "outer"),
    "branch.slice_via": tuple(SLICE_VIA),
    "pipeline.kind": ("none", "gpipe", "1f1b", "interleaved", "zb_h1", "file"),
    "train.on_spike": ("rollback", "skip", "stop"),
    "tensor.gathered": tuple(GATHERED),
    "cluster.kind": ("local", "ray", "processes", "inline"),
    "cluster.device": ("auto", "cpu", "cuda"),
    "cluster.memory": ("refuse", "warn"),
    "monitor.kind": ("console", "wandb"),
}


def allow(key: str, value: Any) -> None:
    """Adds a choice: how a module named in `extend` makes its own models, optimizers and the like legal."""
    CHOICES[key] = tuple(dict.fromkeys((*CHOICES[key], value)))


KNOWN_DIMS = list(DIMS)  # of tensors, as tensor.layout names them


def allow_dims(names: Iterable[str]) -> None:
    """Adds the dims of a model of the user's own."""
    KNOWN_DIMS.extend(name for name in names if name not in KNOWN_DIMS)


NOT_BUILT: dict[tuple[str, Any], str] = {  # (key, value): what is missing
    ("precision", "fp16"): "float16 with a loss scale",
    ("model.fused_dropout", True): "attention masks drawn inside a fused kernel",
}

BOUNDS: dict[str, str] = {
    "seed": ">= 0",
    "recompute_every": ">= 1",
    "train.steps": ">= 1",
    "train.stop_at": ">= 0",
    "train.global_batch": ">= 1",
    "train.microbatch": ">= 1",
    "model.layers": ">= 1",
    "model.d_model": ">= 1",
    "model.heads": ">= 1",
    "model.kv_heads": ">= 0",
    "model.d_kv": ">= 0",
    "model.d_ff": ">= 0",
    "model.length": ">= 1",
    "model.vocab": ">= 1",
    "model.source_length": ">= 0",
    "model.buckets": ">= 4",
    "model.distance": ">= 1",
    "model.label_smoothing": ">= 0 and < 1",
    "model.io": ">= 1",
    "model.hidden": ">= 1",
    "model.dropout": ">= 0 and < 1",
    "model.rope_theta": "> 0",
    "data.validation": ">= 0 and < 1",
    "optimizer.lr": ">= 0 and < inf",
    "optimizer.betas": ">= 0 and < 1",
    "optimizer.eps": "> 0 and < inf",
    "optimizer.weight_decay": ">= 0 and < inf",
    "optimizer.clip": ">= 0",
    "optimizer.warmup_steps": ">= 0",
    "optimizer.min_lr": ">= 0 and <= 1",
    "tensor.axes": ">= 1",
    "branch.axes": ">= 1",
    "pipeline.stages": ">= 1",
    "pipeline.chunks": ">= 1",
    "checkpoint.every": ">= 0",
    "checkpoint.keep": ">= 1",
    "checkpoint.keep_every": ">= 0",
    "train.spike": ">= 0",
    "run.time_margin": ">= 0",
    "elastic.min_workers": ">= 1",
    "elastic.max_workers": ">= 0",
    "elastic.spares": ">= 0",
    "elastic.wait": ">= 0",
    "elastic.hang_seconds": "> 0",
    "elastic.slow": ">= 0",
    "elastic.attempts": ">= 1",
    "elastic.snapshot_every": ">= 0",
    "eval.every": ">= 0",
    "eval.batches": ">= 1",
    "cluster.wait": ">= 0",
    "cluster.device_memory": ">= 0 and < inf",
    "cluster.threads": ">= 0",
    "monitor.every": ">= 1",
    "monitor.sample": ">= 0",
}


def leaves(config: Config) -> dict[str, Any]:
    """Every key that can be given, with its value: {"seed": 0, "train.steps": 100, "tensor.axes": {}, ...}."""
    out: dict[str, Any] = {}
    for group, value in vars(config).items():
        out |= {f"{group}.{k}": v for k, v in vars(value).items()} if is_dataclass(value) else {group: value}
    return out


def not_built(key: str, value: Any) -> str | None:
    """What is missing, where the value is a capability that is planned but not there yet."""
    group = key.removesuffix(".kind").removesuffix(".scheme")
    what = NOT_BUILT.get((group, value))
    return what and f"not built yet ({what})"


def violations(config: Config) -> list[str]:
    """Everything that is impossible in a configuration by itself, one line each; [] if nothing is.

    Pure: looks at no file, device or cluster.
    """
    found = _wrong_values(config)
    related = (rule(config) for keys, rule in RELATIONS if not found.keys() & keys)
    return [line for lines in (*found.values(), *related) for line in lines]


def impossible_values(config: Config) -> list[str]:
    """The part of `violations` that one key alone shows, whatever the others are."""
    return [line for lines in _wrong_values(config).values() for line in lines]


def _wrong_values(config: Config) -> dict[str, list[str]]:
    return {key: lines for key, value in leaves(config).items() if (lines := list(_single(key, value)))}


def _single(key: str, value: Any) -> Iterator[str]:
    """What is wrong with one value, whatever the others are."""
    if key in CHOICES and value not in CHOICES[key]:
        yield violation(key, value, not_built(key, value) or "unknown", closest(value, CHOICES[key]))
    if bounds := BOUNDS.get(key):
        items = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {"": value}
        for name, number in items.items():
            broken = [b for b in bounds.split(" and ") if not _holds(number, *b.split())]
            legal = [b.split()[1] for b in broken[:1] if "=" in b]
            if broken:
                yield violation(f"{key}.{name}".rstrip("."), number, f"must be {bounds}", legal)


def _holds(number: float, comparison: str, limit: str) -> bool:
    compare: Callable[[float, float], bool] = {">=": ge, ">": gt, "<=": le, "<": lt}[comparison]
    return compare(number, float(limit))  # nothing holds for NaN


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _attention(config: Config) -> Iterator[str]:
    m = config.model
    if not m.d_kv and m.d_model % m.heads:
        constraint = f"must divide model.d_model={m.d_model} where model.d_kv is not given"
        yield violation("model.heads", m.heads, constraint, closest(m.heads, _divisors(m.d_model)))
    elif m.positions == "rope" and m.d_kv % 2:
        yield violation("model.d_kv", m.d_kv, "model.positions=rope needs an even d_kv", [m.d_kv - 1, m.d_kv + 1])
    elif m.positions == "rope" and not m.d_kv and m.d_model // m.heads % 2:
        legal = closest(m.heads, [h for h in _divisors(m.d_model) if m.d_model // h % 2 == 0])
        constraint = (
            f"model.positions=rope needs an even d_kv, not model.d_model / model.heads = {m.d_model // m.heads}"
        )
        yield violation("model.heads", m.heads, constraint, legal)
    if m.kv_heads and m.heads % m.kv_heads:
        legal = closest(m.kv_heads, _divisors(m.heads))
        yield violation("model.kv_heads", m.kv_heads, f"must divide model.heads={m.heads}", legal)


def _replicas(config: Config) -> Iterator[str]:
    data = config.parallel.data
    if data == 0 or data < -1:
        yield violation("parallel.data", data, "must be >= 1, or -1 for as many as the workers give", [1, -1])


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
        seconds_of(config.run.time_limit)
    except ValueError:
        constraint = "must be seconds or H:MM:SS"
        yield violation("run.time_limit", config.run.time_limit, constraint, ["3600", "1:00:00"])


def seconds_of(duration: str) -> float:
    """90, 1:30 or 0:01:30 as seconds; "" is 0. Raises ValueError for what is none of these."""
    parts = duration.split(":") if duration else ["0"]
    numbers = [float(part) for part in parts]
    if len(parts) > 3 or not all(0 <= n < inf for n in numbers):
        raise ValueError(duration)
    return sum(n * 60**i for i, n in enumerate(reversed(numbers)))


def _elastic(config: Config) -> Iterator[str]:
    e = config.elastic
    if e.max_workers and e.max_workers < e.min_workers:
        constraint = f"must be 0 or >= elastic.min_workers={e.min_workers}"
        yield violation("elastic.max_workers", e.max_workers, constraint, [0, e.min_workers])
    if e.spares and config.cluster.kind == "inline":
        yield violation("elastic.spares", e.spares, "cluster=inline is a world of one in one process", [0])
    for fault in e.faults:
        if not FAULT.fullmatch(fault):
            kinds = "|".join(FAULT_KINDS)
            example = "20:kill:3:backward"
            yield violation("elastic.faults", fault, f"must be STEP:KIND:RANK[:SECTION], KIND {kinds}", [example])


FAULT_KINDS = ("kill", "stop", "raise", "lock", "gil", "nan")
FAULT = re.compile(rf"(?P<step>\d+):(?P<kind>{'|'.join(FAULT_KINDS)}):(?P<rank>\d+)(?::(?P<section>\w+))?")


def _optimizer(config: Config) -> Iterator[str]:
    if len(config.optimizer.betas) != 2:
        yield violation("optimizer.betas", config.optimizer.betas, "must be two numbers", [[0.9, 0.95]])


def _data(config: Config) -> Iterator[str]:
    if config.data.kind == "text" and not config.data.path:
        yield violation("data.path", "", "data=text needs a file, a folder or a glob")
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
    for name in _mentioned(tensor):
        if name not in declared:
            yield violation("tensor.order", tensor.order, f"the table names an axis {name}, which is not among them")


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
            elif not name.isidentifier():
                yield violation(f"{group}.axes.{name}", size, "an axis is named by letters, digits and _")


def _gpu(config: Config) -> Iterator[str]:
    if config.cluster.gpu and memory_of(config.cluster.gpu) is None:
        names = ["-".join(name.split()) for name, _ in MEMORIES]
        yield violation("cluster.gpu", config.cluster.gpu, "unknown", closest(config.cluster.gpu, names)[:3])


RELATIONS: tuple[tuple[set[str], Callable[[Config], Iterator[str]]], ...] = (  # judged where each key may be right
    ({"model.d_model", "model.heads", "model.kv_heads", "model.d_kv"}, _attention),
    (set(), _replicas),
    ({"model.kind", "monitor.sample"}, _text),
    ({"train.steps", "train.stop_at"}, _stop),
    ({"run.time_limit"}, _time_limit),
    ({"elastic.min_workers", "elastic.max_workers"}, _elastic),
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
    regions = (*REGIONS, "parameters")
    named = table if any(isinstance(v, Mapping) for v in table.values()) else dict.fromkeys(regions, table)
    known = list(axes)
    rules: Rules = {}
    lines = []
    for region, part in named.items():
        if region not in regions:
            lines.append(violation("tensor.layout", region, "no such region", closest(region, regions)))
        rules[region] = {dim: _axis_list(value) for dim, value in (part or {}).items()}
        for dim, names in rules[region].items():
            if dim not in KNOWN_DIMS:
                lines.append(violation("tensor.layout", dim, "no such dim", closest(dim, KNOWN_DIMS)))
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
            layout = yaml.safe_load(layout)
        except yaml.YAMLError as error:
            raise ConfigError(violation("tensor.layout", layout, f"not YAML ({str(error).splitlines()[0]})")) from None
    if not isinstance(layout, str):
        return layout
    words = re.sub(r"\s*([:+])\s*", r"\1", layout).replace(";", " ").replace(",", " ").replace("|", " ").split()
    if wrong := [word for word in words if not re.fullmatch(r"\w+:\w+(\+\w+)*", word)]:
        lines = [violation("tensor.layout", word, "must be dim:axis or dim:axis+axis") for word in wrong]
        raise ConfigError(lines)
    return dict(word.split(":") for word in words)


def _axis_list(value: str | Sequence[str] | None) -> list[str]:
    return value.split("+") if isinstance(value, str) else list(value or [])

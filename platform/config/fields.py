"""Typed configuration: one dataclass per Hydra group, declared in `platform.config.groups`.

A key is said once, at its field: type, default, legal values and a line of guidance (`platform.config.key`).
`docs/configuration.md` and `--help` are made of them, and values are checked against them.

Mistakes are found in three steps, all before any process starts: unknown keys and wrong types while the configuration
is composed, illegal values by `violations_of_values`, which looks at each key by itself, and by
`platform.config.validation`, and all that needs the whole plan (divisibility by axes, legal layouts) by
`platform.predict.make_plan`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from math import inf
from operator import attrgetter, ge, gt, le, lt
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints
from unicodedata import category

from platform.boundary.refusals import ConfigError, closest_values, format_value, format_violation, refuse_all
from platform.boundary.schema import By, fits_type
from platform.config.groups import (
    Branch,
    Checkpoint,
    Cluster,
    Data,
    Elastic,
    Eval,
    LossScaling,
    Model,
    Monitor,
    Optimizer,
    Parallel,
    Pipeline,
    Planning,
    Quantise,
    Resume,
    Run,
    Tensor,
    Train,
    Tune,
)
from platform.config.key import Key, describe_type, key
from platform.plan.model_types import CROSS_ENTROPY, DISTILL, PAIR_LOSSES
from platform.plan.quantisation import EXACT, MX_BLOCK, Quantisation


@dataclass
class Config:
    """Whole configuration of a run; `platform.config.identity` lists the keys that a resumed run must keep."""

    run: Run = field(default_factory=Run)
    extend: list[str] = key(
        [],
        "your own modules, imported by the driver and by every worker",
        pattern=r"[^\W\d]\w*(\.[^\W\d]\w*)*",
        constraint="must be the name of a module, such as my_module for my_module.py in a folder of PYTHONPATH",
    )
    seed: int = key(0, "seed of all that is random: weights, data order, dropout, samples", ">= 0", most=2**63 - 1)
    precision: str = key(
        "fp32", "type to compute in; fp16 scales the loss; fp8, mxfp8: bf16, with the products of blocks in 8 bits",
        ("fp64", "fp32", "bf16", "fp16", "fp8", "mxfp8"),
    )  # fmt: skip
    quantise: Quantise = field(default_factory=Quantise, metadata={"planned": True})
    recompute: str = key(
        "none", "recomputed in backward: nothing, the inside of attention, or blocks; auto: the planner chooses",
        ("none", "selective", "full"), planned=True, left_open=10,
    )  # fmt: skip
    recompute_every: int = key(
        1, "recompute=full: blocks recomputed at a time; -1: the planner chooses", ">= 1", most=10_000, planned=True,
        left_open=12,
    )  # fmt: skip
    recompute_offload: bool = key(
        False, "recompute=full: keep the inputs of blocks in host memory (on CPUs, a copy that saves nothing)",
        planned=True,
    )  # fmt: skip
    loss_scale: LossScaling = field(default_factory=LossScaling)
    train: Train = field(default_factory=Train)
    tune: Tune = field(default_factory=Tune, metadata={"planned": True})
    model: Model = field(default_factory=Model, metadata={"planned": True})
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer, metadata={"identity": "free"})
    parallel: Parallel = field(default_factory=Parallel, metadata={"planned": True})
    tensor: Tensor = field(default_factory=Tensor, metadata={"planned": True})
    branch: Branch = field(default_factory=Branch, metadata={"planned": True})
    pipeline: Pipeline = field(default_factory=Pipeline, metadata={"planned": True})
    plan: Planning = field(default_factory=Planning)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    resume: Resume = field(default_factory=Resume)
    eval: Eval = field(default_factory=Eval)
    elastic: Elastic = field(default_factory=Elastic)
    cluster: Cluster = field(default_factory=Cluster)
    monitor: Monitor = field(default_factory=Monitor)

    def to_dict(self) -> dict[str, Any]:
        """Return this configuration as nested plain data, group -> key -> value, from which `from_dict` builds it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """Build a Config from nested plain values, as `to_dict` returns them; missing keys get their defaults.

        Raises ConfigError for unknown keys and wrong types.
        """
        config, (_, groups) = cls(), read_declared_types(Config)
        for name, value in values.items():
            if name in groups and isinstance(value, dict):
                vars(getattr(config, name)).update(value)
            else:
                vars(config)[name] = value
        refuse_all(line for lines in violations_of_types(config).values() for line in lines)
        return config


SentConfig = Annotated[Config, By(Config.from_dict)]  # as driver and workers exchange it: no number changes its type


def list_key_fields() -> dict[str, Field[Any]]:
    """Return the dataclass field of every configuration key by its full name, such as `train.steps`, in order."""
    fields_by_key: dict[str, Field[Any]] = {}
    _, groups = read_declared_types(Config)
    for f in fields(Config):
        group = groups.get(f.name)
        fields_by_key |= {f"{f.name}.{inner.name}": inner for inner in fields(group)} if group else {f.name: f}
    return fields_by_key


@cache
def read_declared_types(cls: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return, of the configuration's dataclass `cls`, all fields' types by name, and its groups' dataclasses."""
    groups = {f.name: f.default_factory for f in fields(cls) if is_dataclass(f.default_factory)}
    return get_type_hints(cls), groups


def find_declared_type(key: str) -> Any:
    """Find the declared type of what stands at a place of a configuration, such as "data", `data.sources.web.path` or
    `cluster.labels.zone`; Any where none is declared."""
    declared: Any = Config
    for name in key.split(".") if key else []:
        declared = _find_inner_type(declared, name)
    return declared


def _find_inner_type(declared: Any, name: str) -> Any:
    """Find the declared type of the key `name` of a group of keys, whose class is `declared`, or of each value of a
    list or map; Any without one."""
    if is_dataclass(declared):
        undeclared = {(Data, "sources"): dict[str, Data], (Config, "hydra"): dict[str, dict[str, dict[str, str]]]}
        return undeclared.get((declared, name)) or read_declared_types(declared)[0].get(name, Any)  # type: ignore[arg-type]
    return get_args(declared)[-1] if get_origin(declared) in (list, dict) else Any


def keep_typed_characters(value: Any, text: Any, declared: Any) -> Any:
    """Return the `value` of a place in a configuration as a parser read it, with the characters that the user typed in
    place of each number, truth value and null that is `declared` as text. `text`: the same, all of it read as text."""
    if declared == dict[str, str] and isinstance(text, dict):
        return text
    if isinstance(value, dict) and isinstance(text, dict) and len(value) == len(text):
        return {
            name: keep_typed_characters(part, part_text, _find_inner_type(declared, text_name))
            for (name, part), (text_name, part_text) in zip(value.items(), text.items(), strict=True)
        }
    if isinstance(value, list) and isinstance(text, list):
        inner = _find_inner_type(declared, "")
        return [keep_typed_characters(part, part_text, inner) for part, part_text in zip(value, text, strict=True)]
    return text if declared is str and isinstance(value, int | float | None) else value


def violations_of_types(config: Any) -> dict[str, list[str]]:
    """Return key -> [refusal line] for a configuration's unknown keys, and values of another type than declared."""
    if type(config) is not Config:
        reason = "must be a Config, as compose() returns it"
        return {"config": [format_violation("config", describe_value(config), reason)]}
    mistyped = _find_mistyped_keys(config)
    return {key: [format_violation(key, describe_value(value), why, near)] for key, value, why, near in mistyped}


def _find_mistyped_keys(part: Any, prefix: str = "") -> Iterator[tuple[str, Any, str, list[str]]]:
    """Yield (key, value, constraint, nearest legal keys) for each attribute of a Config, or of its group of keys
    `prefix`, that is no key, is missing (None), or has another type than declared."""
    hints, groups = read_declared_types(part.__class__)
    for name, value in (dict.fromkeys(hints) | vars(part)).items():
        key = f"{prefix}{name}"
        if name not in hints:
            near = find_synonyms(key) or [prefix + close for close in closest_values(name, hints)[:3]]
            yield key, value, "unknown key", near
        elif name in groups and type(value) is groups[name]:
            yield from _find_mistyped_keys(value, f"{name}.")
        elif name in groups:
            yield key, value, f"must be a {groups[name].__name__}, as Config has it", []
        elif not fits_type(value, hints[name]):
            yield key, value, f"must be {describe_type(hints[name])}", []


@cache
def _read_synonyms() -> dict[str, str]:
    """Read the table of other systems' words for keys: word -> key."""
    import yaml

    table = yaml.safe_load(Path(__file__).with_name("synonyms.yaml").read_text())
    return {word: key for key, words in table.items() for word in words}


def find_synonyms(unknown: str) -> list[str]:
    """Return the key for whose name another system has the last part of an unknown key, as a list; [] if none has."""
    word = unknown.rpartition(".")[2].replace("-", "_").lower()
    return [_read_synonyms()[word]] if word in _read_synonyms() else []


# model.kind -> legal values of data.objective; the first is the default
OBJECTIVES: dict[str, Sequence[str]] = {
    "decoder": ["causal", "preference"],
    "encoder": ["masked"],
    "encoder_decoder": ["span_denoising", "pairs"],
    "two_layer": ["causal"],
}


Compose = Callable[[Sequence[str]], Config]  # arguments that a user types -> the configuration


def allow_objective(kind: str, name: str) -> None:
    """Add `name` to the values of the configuration key data.objective that go with a kind of model."""
    OBJECTIVES[kind] = tuple(dict.fromkeys((*OBJECTIVES.get(kind, ()), name)))


def training_objective_name(config: Config) -> str:
    """Return a configuration's training objective: `data.objective`, else the default for `model.kind` and the data."""
    by_data = {"pairs": "pairs", "preferences": PREFERENCE}
    return config.data.objective or by_data.get(config.data.kind) or OBJECTIVES.get(config.model.kind, ("",))[0]


PREFERENCE = "preference"  # the objective of pairs of answers, with one of PAIR_LOSSES
WEIGHTED: set[str] = {PREFERENCE}  # values of data.objective whose samples say what each label counts
LOSS_OF = {PREFERENCE: PAIR_LOSSES[0]}  # value of data.objective -> its loss, unless that is cross-entropy


def training_loss_name(config: Config) -> str:
    """Return the name of the loss that a configuration trains with: `train.loss`, else the loss of its objective."""
    return config.train.loss or LOSS_OF.get(training_objective_name(config), CROSS_ENTROPY)


def choose_quantisation(config: Config) -> Quantisation | None:
    """Return how a configuration quantises operands of products to 8 bits; None where it does not."""
    q = config.quantise
    by_precision = {"fp8": "block", "mxfp8": "mx"}
    scale = by_precision.get(config.precision, "none") if q.scale == "auto" else q.scale
    if scale == "none":
        return None
    powers = scale in EXACT if q.powers == "auto" else q.powers == "on"
    return Quantisation(scale, MX_BLOCK if scale == "mx" else q.block, powers, q.gradients)


def choose_quantised_products(config: Config) -> tuple[Quantisation, list[str], list[str]] | None:
    """Return how products of a configuration are in 8 bits, and the patterns of weights that are or are not."""
    how = choose_quantisation(config)
    return (how, config.quantise.layers, config.quantise.skip) if how else None


@dataclass
class DistillSettings:
    """Settings of a loss by what a teacher says of labels."""

    weight: float = key(
        0.5, "of the divergence from the teacher; the labels' cross-entropy has the rest", "> 0 and <= 1"
    )
    temperature: float = key(
        1.0, "by which the logits of both are divided; its square multiplies the divergence", "> 0"
    )
    direction: str = key("forward", "forward: KL(teacher, model); reverse: KL(model, teacher)", ("forward", "reverse"))
    top: int = key(64, "classes that are kept of the teacher for each label, its likeliest; 0 = all", ">= 0")


def distill_settings(config: Config) -> DistillSettings | None:
    """Return a configuration's settings of distillation, `top` as the number of classes kept; None without it."""
    if training_loss_name(config) != DISTILL:
        return None
    known = {f.name for f in fields(DistillSettings)}
    settings = DistillSettings(**{name: v for name, v in config.train.loss_settings.items() if name in known})
    return replace(settings, top=min(settings.top, config.model.vocab) or config.model.vocab)


def hash_values(values: Any) -> str:
    """Return a short hash of a configuration's values, plain data, the same in every process: 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def describe_value(value: Any) -> str:
    """Return a configuration's value, of any type, as a refusal shows it: by its type, unless that is plain."""
    return format_value(value) if fits_type(value, Any) else f"a {type(value).__name__}"


_SHARED = {f.name: f.metadata for f in fields(Config) if is_dataclass(f.default_factory)}  # by the keys of a group
KEYS: dict[str, Key] = {
    name: replace(legal, **{fact: value for fact, value in _SHARED.get(group, {}).items() if not getattr(legal, fact)})
    for name, f in list_key_fields().items()
    for group, legal in [(name.rpartition(".")[0], f.metadata["key"])]
}
_OURS = {name: legal.choices for name, legal in KEYS.items()}
_NAME = r"\w[\w.-]*"  # of what a user's module registers
LONGEST = 10_000  # most characters in one text


def allow_choice(key: str, value: Any, *functions: Any) -> None:
    """Add `value`, such as a model's name, to the legal choices of a configuration key, such as "model.kind", when a
    user's module (named in `extend`) registers it with some `functions`. Raises ConfigError for a value that is no
    name, for a name of ours, and for a function that cannot be called."""
    if not isinstance(value, str) or not re.fullmatch(_NAME, value):
        raise ConfigError(key, value, "no name to register: letters, digits, _, - and . are legal")
    if value in _OURS[key]:
        raise ConfigError(key, value, "is built in; register another name", [f"own_{value}"])
    for function in functions:
        if not callable(function):
            reason = f"is registered with a {type(function).__name__}, where a function or a class is needed"
            raise ConfigError(key, value, reason)
    KEYS[key] = replace(KEYS[key], choices=tuple(dict.fromkeys((*KEYS[key].choices, value))))


def flatten_config(config: Config) -> dict[str, Any]:
    """Return every key of a configuration with its value, flat: {"seed": 0, "train.steps": 100, ...}."""
    return {key: attrgetter(key)(config) for key in KEYS}


def set_value(config: Config, key: str, value: Any) -> None:
    """Set the value of a key of a configuration, or of a mixture's source, data.sources.NAME.KEY, in place."""
    group, _, name = key.rpartition(".")
    source = group.removeprefix("data.sources.")
    values = vars(getattr(config, group) if group else config) if source == group else config.data.sources[source]
    values[name] = value


def violations_of_values(config: Config) -> dict[str, list[str]]:
    """Return the configuration keys whose values are illegal by themselves (type, choice, bounds, characters), each
    with one refusal line per mistake. Rules that relate keys are in `platform.config.validation`."""
    type_violations = violations_of_types(config)
    if any(key not in KEYS for key in type_violations):  # groups of keys are missing
        return type_violations
    values = flatten_config(config)
    lines = {k: type_violations.get(k) or [*violations_of_value(k, values[k], KEYS[k])] for k in KEYS}
    return {key: mistakes for key, mistakes in lines.items() if mistakes}


def list_value_violations(config: Config) -> list[str]:
    """Return the refusal lines of a configuration's illegal values, in the order in which the keys are declared."""
    return [line for lines in violations_of_values(config).values() for line in lines]


def violations_of_value(key: str, value: Any, legal: Key) -> Iterator[str]:
    """Yield a refusal line per mistake in the value of one key, declared by `legal`: no legal choice, or else each
    number out of bounds and each illegal text in it."""
    if legal.choices and value not in legal.choices:
        yield format_violation(key, value, "unknown", closest_values(value, legal.choices))
        return
    for name, part in _iterate_scalars(value):
        where = f"{key}.{name}".rstrip(".")
        if isinstance(part, str):
            yield from _violations_of_text(where if isinstance(value, Mapping) else key, legal, part)
        elif type(part) in (int, float):
            yield from _violations_of_number(where, legal, part)


def _iterate_scalars(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (place, part) for every scalar nested in the value of a configuration key, so that each is checked. `name`
    is the place of `value` itself: names in maps and indices in lists joined by dots, such as "rows.0". Texts that are
    names in a map are yielded too, with the place ""."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from ((("", key),) if isinstance(key, str) else ())
            yield from _iterate_scalars(part, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _iterate_scalars(part, f"{name}.{number}".lstrip("."))
    else:
        yield name, value


def _violations_of_number(where: str, legal: Key, number: float) -> Iterator[str]:
    """Yield a refusal line if a number breaks the bounds that its key declares (`legal`); `where` is the key with the
    number's place in its value, such as "tensor.axes.t"."""
    bounds, most = legal.bounds, legal.most
    broken = [b for b in bounds.split(" and ") if bounds and not _satisfies_bound(number, *b.split())]
    if broken:
        default = [value] if (value := flatten_config(Config()).get(where)) is not None else []
        nearest = broken[0].split()[1:] if "=" in broken[0] else default  # an end that is not legal itself has none
        yield format_violation(where, number, f"must be {bounds}", nearest)
    elif not number <= most:
        yield format_violation(where, number, f"must be <= {most}", [most])
    elif not bounds and not number >= -most:
        yield format_violation(where, number, f"must be >= {-most}", [-most])


def _violations_of_text(where: str, legal: Key, text: str) -> Iterator[str]:
    """Yield a refusal line if a text has a control character, a line separator or half a surrogate pair, is too long,
    or does not match the pattern that its key declares (`legal`); `where` is the key with the text's place in its
    value."""
    if illegal_character := next((c for c in text if category(c) in ("Cc", "Cs", "Zl", "Zp")), None):
        cure = "leave it out, or set LANG=C.UTF-8" if "\udc80" <= illegal_character <= "\udcff" else "leave it out"
        constraint = f"has the character U+{ord(illegal_character):04X}, which no text may have; {cure}"
        yield format_violation(where, text, constraint)
    elif len(text) > LONGEST:
        yield format_violation(where, text, f"must have at most {LONGEST:,} characters")
    elif legal.pattern and not re.fullmatch(legal.pattern, text):
        yield format_violation(where, text, legal.constraint)


def _satisfies_bound(number: float, comparison: str, limit: str) -> bool:
    """Return True if a configured `number` COMPARISON `limit` holds, such as >= "0" or < "inf"; never for NaN."""
    compare: Callable[[float, float], bool] = {">=": ge, ">": gt, "<=": le, "<": lt}[comparison]
    return compare(number, inf if limit == "inf" else float(limit))  # every comparison with NaN is False


ALL = "all"  # in plan.search: every key that the planner can choose


def is_open_key(config: Config, key: str) -> bool:
    """Return True if the value of a configuration key, or of `tensor.axes.NAME`, is left open, for the planner."""
    named = config.plan.search
    group = key.rpartition(".")[0]
    return ALL in named or key in named or group == "tensor.axes" and bool({"tensor", group} & {*named})

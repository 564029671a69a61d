"""Typed configuration: one dataclass per Hydra group, declared in `platform.config.groups`.

A key is said once, at its field: type, default, legal values and a line of guidance (`platform.config.key`).
`docs/configuration.md` and `--help` are made of them, and values are checked against them.

Mistakes are found in three steps, all before any process starts: unknown keys and wrong types while the configuration
is composed, illegal values by `platform.config.checks`, and all that needs the whole plan (divisibility by axes, legal
layouts) by `platform.planning.make_plan`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, get_type_hints

from platform.boundary.refusals import closest, in_words, refuse_all, violation
from platform.boundary.schema import By, fits
from platform.config.groups.data_group import Data
from platform.config.groups.execution_group import Checkpoint, Cluster, Elastic, Monitor, Planning, Resume, Run
from platform.config.groups.mesh_group import Branch, Parallel, Pipeline, Tensor
from platform.config.groups.model_group import Model
from platform.config.groups.optimizer_group import Optimizer
from platform.config.groups.train_group import Eval, LossScaling, Train
from platform.config.key import key, type_in_words
from platform.plan.language.functions import CROSS_ENTROPY


@dataclass
class Config:
    """Whole configuration of a run; `platform.config.identity` lists the keys that a resumed run must keep."""

    run: Run = field(default_factory=Run)
    extend: list[str] = key(
        [],
        "your own modules, imported by the driver and by every worker",
        pattern=r"[^\W\d]\w*(\.[^\W\d]\w*)*",
        constraint="must be the name of a module, such as my_package.my_module",
    )
    seed: int = key(0, "seed of all that is random: weights, data order, dropout, samples", ">= 0", most=2**63 - 1)
    precision: str = key("fp32", "type to compute in; fp16 scales the loss", ("fp64", "fp32", "bf16", "fp16"))
    recompute: str = key(
        "none",
        "recomputed in backward: nothing, the inside of attention, or blocks; auto: the planner chooses",
        ("none", "selective", "full"),
    )
    recompute_every: int = key(1, "recompute=full: blocks recomputed at a time", ">= 1", most=10_000)
    recompute_offload: bool = key(
        False, "recompute=full: keep the inputs of blocks in host memory (on CPUs, a copy that saves nothing)"
    )
    loss_scale: LossScaling = field(default_factory=LossScaling)
    train: Train = field(default_factory=Train)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    parallel: Parallel = field(default_factory=Parallel)
    tensor: Tensor = field(default_factory=Tensor)
    branch: Branch = field(default_factory=Branch)
    pipeline: Pipeline = field(default_factory=Pipeline)
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
        config, (_, groups) = cls(), declared(Config)
        for name, value in values.items():
            if name in groups and isinstance(value, dict):
                vars(getattr(config, name)).update(value)
            else:
                vars(config)[name] = value
        refuse_all(line for lines in violations_of_types(config).values() for line in lines)
        return config


SentConfig = Annotated[Config, By(Config.from_dict)]  # as driver and workers exchange it: no number changes its type


def key_fields() -> dict[str, Field[Any]]:
    """Return the dataclass field of every configuration key by its full name, such as `train.steps`, in order."""
    found: dict[str, Field[Any]] = {}
    _, groups = declared(Config)
    for f in fields(Config):
        group = groups.get(f.name)
        found |= {f"{f.name}.{inner.name}": inner for inner in fields(group)} if group else {f.name: f}
    return found


@cache
def declared(cls: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return, of the configuration's dataclass `cls`, all fields' types by name, and its groups' dataclasses."""
    groups = {f.name: f.default_factory for f in fields(cls) if is_dataclass(f.default_factory)}
    return get_type_hints(cls), groups


def violations_of_types(config: Any) -> dict[str, list[str]]:
    """Return key -> [refusal line] for a configuration's unknown keys, and values of another type than declared."""
    if type(config) is not Config:
        return {"config": [violation("config", shown_value(config), "must be a Config, as compose() returns it")]}
    return {key: [violation(key, shown_value(value), why, near)] for key, value, why, near in _mistyped(config)}


def _mistyped(part: Any, prefix: str = "") -> Iterator[tuple[str, Any, str, list[str]]]:
    """Yield (key, value, constraint, nearest legal keys) for each attribute of a Config, or of its group of keys
    `prefix`, that is no key, is missing (None), or has another type than declared."""
    hints, groups = declared(part.__class__)
    for name, value in (dict.fromkeys(hints) | vars(part)).items():
        key = f"{prefix}{name}"
        if name not in hints:
            yield key, value, "unknown key", [prefix + near for near in closest(name, hints)[:3]]
        elif name in groups and type(value) is groups[name]:
            yield from _mistyped(value, f"{name}.")
        elif name in groups:
            yield key, value, f"must be a {groups[name].__name__}, as Config has it", []
        elif not fits(value, hints[name]):
            yield key, value, f"must be {type_in_words(hints[name])}", []


# model.kind -> legal values of data.objective; the first is the default
OBJECTIVES: dict[str, Sequence[str]] = {
    "decoder": ["causal"],
    "encoder": ["masked"],
    "encoder_decoder": ["span_denoising", "pairs"],
    "two_layer": ["causal"],
}


Compose = Callable[[Sequence[str]], Config]  # arguments that a user types -> the configuration


def allow_objective(kind: str, name: str) -> None:
    """Add `name` to the values of the configuration key data.objective that go with a kind of model."""
    OBJECTIVES[kind] = tuple(dict.fromkeys((*OBJECTIVES.get(kind, ()), name)))


def objective_of(config: Config) -> str:
    """Return a configuration's training objective: `data.objective`, else the default for `model.kind` and the data."""
    default = "pairs" if config.data.kind == "pairs" else OBJECTIVES.get(config.model.kind, ("",))[0]
    return config.data.objective or default


WEIGHTED: set[str] = set()  # values of data.objective whose samples say what each label counts
LOSS_OF: dict[str, str] = {}  # value of data.objective -> the loss that it comes with, unless that is cross-entropy


def loss_of(config: Config) -> str:
    """Return the name of the loss that a configuration trains with: `train.loss`, else the loss of its objective."""
    return config.train.loss or LOSS_OF.get(objective_of(config), CROSS_ENTROPY)


def short_hash(values: Any) -> str:
    """Return a short hash of a configuration's values, plain data, the same in every process: 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def shown_value(value: Any) -> str:
    """Return a configuration's value, of any type, as a refusal shows it: by its type, unless that is plain."""
    return in_words(value) if fits(value, Any) else f"a {type(value).__name__}"

"""Typed configuration: one dataclass per Hydra group.

A key is said once, at its field: type, default, legal values and a line of guidance (`platform.config.key`).
`docs/configuration.md` and `--help` are made of them, and values are checked against them.

Mistakes are found in three steps, all before any process starts: unknown keys and wrong types while the configuration
is composed, illegal values by `platform.config.checks`, and all that needs the whole plan (divisibility by axes, legal
layouts) by `platform.planning.make_plan`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, get_type_hints

from platform.boundary.refusals import ConfigError, in_words, violation
from platform.boundary.schema import By
from platform.config.execution import Checkpoint, Cluster, Elastic, Monitor, Resume, Run
from platform.config.groups.data_group import Data
from platform.config.groups.train_group import Eval, LossScaling, Train
from platform.config.key import WORKERS, fits, is_plain, key, own_settings, type_in_words
from platform.plan.language.functions import CROSS_ENTROPY
from platform.plan.language.scheme import GATHERED, SLICE_VIA

Rules = dict[str, dict[str, list[str]]]  # region or parameter role -> tensor dim -> mesh axes, major to minor


@dataclass
class Model:
    """Kind, sizes and parts of the model."""

    source: str = key("", "model=from_hf: the folder that transformers saved, or its URL; keys are read from it")
    kind: str = key("decoder", "the model", ("decoder", "encoder", "encoder_decoder", "two_layer"), open=True)
    layers: int = key(2, "Transformer layers; encoder_decoder: in each of its two stacks", ">= 1", most=1000)
    d_model: int = key(64, "width of the residual stream", ">= 1", most=2**20)
    heads: int = key(4, "attention heads", ">= 1", most=2**16)
    kv_heads: int = key(0, "key and value heads of grouped-query attention; 0 = model.heads", ">= 0", most=2**16)
    d_kv: int = key(0, "width of one head; 0 = d_model / heads", ">= 0", most=2**16)
    d_ff: int = key(0, "width of the feed-forward layer; 0 = 4 * d_model", ">= 0", most=2**24)
    length: int = key(64, "tokens per sequence", ">= 1", most=2**24)
    source_length: int = key(0, "encoder_decoder: tokens per encoder sequence; 0 = model.length", ">= 0", most=2**24)
    vocab: int = key(512, "rows of the embedding, before any padding", ">= 1", most=2**24)
    io: int = key(64, "two_layer: width of its input and output", ">= 1", most=2**24)
    hidden: int = key(256, "two_layer: width between its layers", ">= 1", most=2**24)
    dropout: float = key(0.0, "probability that an activation is set to 0; 0 = no dropout", ">= 0 and < 1")
    fused_dropout: bool = key(False, "attention's masks are drawn inside its kernel, per rank: not as other plans do")
    norm: str = key("layernorm", "normalisation", ("layernorm", "rmsnorm"))
    norm_eps: float = key(1e-5, "what norms add to the variance", "> 0 and < 1")
    post_norm: bool = key(False, "normalise after the residual connection, as in the original Transformer")
    embedding_norm: bool = key(False, "normalise the embeddings too, as BERT does")
    activation: str = key(
        "gelu",
        "pointwise function of the feed-forward layer; _tanh: GELU's approximation; swiglu, geglu, reglu: gated",
        ("gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu", "geglu_tanh", "reglu"),
    )
    positions: str = key("learned", "how attention knows positions", ("learned", "rope", "sinusoidal", "relative"))
    rope_theta: float = key(10000.0, "positions=rope: base of the rotation frequencies", "> 0")
    rope_scaling: str = key(
        "none", "positions=rope: how angles are scaled to longer sequences", ("none", "linear", "llama3", "yarn")
    )
    rope_factor: float = key(1.0, "rope_scaling: how much longer the sequences are", ">= 1")
    rope_original_length: int = key(0, "rope_scaling=llama3, yarn: length before", ">= 0", most=2**24)
    rope_low: float = key(1.0, "rope_scaling=llama3, yarn: pairs of fewer turns in that length are all scaled", "> 0")
    rope_high: float = key(4.0, "rope_scaling=llama3, yarn: pairs of more turns are not scaled", "> 0")
    rope_magnitude: float = key(0.0, "rope_scaling=yarn: factor on queries and keys; 0 = 0.1 ln(factor) + 1", ">= 0")
    buckets: int = key(32, "positions=relative: entries of the bias table per head", ">= 4", most=2**16)
    distance: int = key(128, "positions=relative: positions farther apart than this share one entry", ">= 1")
    window: int = key(0, "attention sees so many tokens back, its own among them; 0 = all", ">= 0", most=2**24)
    window_layers: list[int] = key([], "layers, from 0, with model.window; [] = all", ">= 0", most=1000)
    within_documents: bool = key(False, "no token sees a document before its own: set by data.document_mask")
    attention_scale: float = key(0.0, "factor on attention's scores; 0 = 1 / sqrt(d_kv)", ">= 0", most=1e6)
    query_key_norm: bool = key(False, "RMSNorm over each head's queries and keys")
    segments: int = key(
        0, "encoder: rows of a second embedding, of each token's document; 0 = none", ">= 0", most=2**16
    )
    bias: bool = key(True, "linear layers have biases")
    attention_bias: str = key(
        "", 'biases of attention: all, none, those of Q, K and V; "" = as model.bias', ("", "all", "qkv", "none")
    )
    tied: bool = key(True, "the output projection shares the weights of the embedding")
    head_transform: bool = key(False, "a layer, activation and norm before the output projection, as in BERT")
    head_bias: bool = key(False, "the output projection has a bias")
    logit_scale: float = key(1.0, "factor on the logits", "> 0", most=1e6)
    label_smoothing: float = key(0.0, "share of the target probability spread over the vocabulary", ">= 0 and < 1")
    settings: dict[str, Any] = own_settings("model")


@dataclass
class Optimizer:
    """Update rule, and the schedule of its learning rate."""

    kind: str = key(
        "adamw",
        "the optimizer",
        ("adamw", "sgd", "lion", "muon", "adafactor"),
        open=True,
    )
    lr: float = key(1e-3, "peak learning rate, reached after warm-up", ">= 0 and < inf", most=1e6)
    betas: list[float] = key(
        [0.9, 0.95], "decay rates of Adam's two moments; of Lion's update and its momentum", ">= 0 and < 1"
    )
    momentum: float = key(0.9, "sgd, muon: decay rate of the momentum; 0 = none", ">= 0 and < 1")
    nesterov: bool = key(False, "sgd, muon: Nesterov's momentum, which looks one update ahead")
    matrices: str = key("", 'muon: regular expression of its parameters; "" = weights of hidden layers')
    newton_schulz: int = key(5, "muon: iterations that make a matrix orthogonal", ">= 1", most=99)
    matrix_lr: str = key(
        "match_rms_adamw", "muon: how optimizer.lr is scaled by a matrix's shape", ("match_rms_adamw", "original")
    )
    beta2_decay: float = key(
        -0.8, "adafactor: update t takes t to this power of the new squares into its moments", ">= -10 and <= 0"
    )
    update_clip: float = key(1.0, "adafactor: largest root mean square of an update, before its rate", ">= 1")
    relative_step: bool = key(False, "adafactor: the learning rate is at most 1 / sqrt(update)")
    scale_by_weight: bool = key(True, "adafactor: the rate is times the root mean square of what is updated")
    least_scale: float = key(1e-3, "adafactor: optimizer.scale_by_weight is by this at least", ">= 0", most=1e6)
    groups: list[dict[str, Any]] = key(
        [],
        "factors by parameter: {match: REGULAR EXPRESSION, lr: FACTOR, weight_decay: FACTOR}; the first that matches",
    )
    eps: float = key(
        1e-8, "Adam's epsilon, added to the denominator; adafactor: its least value", "> 0 and < inf", most=1e6
    )
    weight_decay: float = key(
        0.1, "weight decay, decoupled but for sgd; not of vectors (norms, biases)", ">= 0 and < inf", most=1e6
    )
    clip: float = key(1.0, "largest global gradient norm; 0 = no clipping", ">= 0")
    schedule: str = key(
        "cosine",
        "learning rate after warm-up",
        ("constant", "cosine", "cosine_restarts", "inverse_sqrt", "linear", "wsd"),
        open=True,
    )
    warmup_steps: int = key(0, "updates of linear warm-up from 0 to optimizer.lr", ">= 0")
    min_lr: float = key(0.1, "the cosines, linear and wsd end at this fraction of optimizer.lr", ">= 0 and <= 1")
    cycles: int = key(2, "cosine_restarts: falls from optimizer.lr, of equal length", ">= 1", most=10**6)
    decay_steps: int = key(0, "wsd: updates of the last, linear fall; 0 = a tenth of train.steps", ">= 0")
    settings: dict[str, Any] = own_settings("optimizer")
    schedule_settings: dict[str, Any] = own_settings("learning-rate schedule")


@dataclass
class Parallel:
    """Data parallelism and ZeRO."""

    data: int = key(
        1, "data-parallel replicas", most=WORKERS, constraint="must be >= 1, or -1 for as many as the workers give"
    )
    zero: int = key(
        0, "ZeRO shards over replicas: 1 = optimizer state, 2 = gradients too, 3 = parameters too", (0, 1, 2, 3)
    )
    zero_group: int = key(
        0,
        "replicas that share what ZeRO shards, such as those of a node: the largest divisor of parallel.data up to"
        " this; 0 = all replicas",
        ">= 0",
        most=WORKERS,
    )
    overlap: bool = key(
        True, "reduce gradients under backward passes, gather shards a block and weights a matrix ahead"
    )


@dataclass
class Tensor:
    """Tensor parallelism: a table from tensor dims to mesh axes."""

    scheme: str = key("serial", "name of the scheme: set by tensor=NAME")
    order: list[str] = key([], "axes of the scheme, outer to inner; [] = in order of mention")
    axes: dict[str, int] = key({}, "size of each axis; an axis not given has size 1", ">= 1", most=WORKERS)
    regions: Rules = key({}, "activations: region -> dim -> axes")
    parameters: Rules = key({}, "parameters: role (all, in, out, vector) -> dim -> axes")
    gathered: str = key("keep", "gathered operands: keep, gather again in backward, or SUMMA's panels", tuple(GATHERED))
    layout: Any = key(None, "tensor=layout: your own map from dims to axes, one line or YAML")


@dataclass
class Branch:
    """Branch splitting (D&SP): a table of dims that are split over sub-grids."""

    kind: str = key("none", "name of the branch scheme: set by branch=NAME")
    axes: dict[str, int] = key({}, "size of each branch axis; an axis not given has size 1", ">= 1", most=WORKERS)
    order: str = key("inner", "place of its axes inside the mesh; outer = D&SP's naive order", ("inner", "outer"))
    append: dict[str, list[str]] = key({}, "region -> dims split by the branch axes last")
    prepend: dict[str, list[str]] = key({}, "region -> dims split by the branch axes first")
    only: list[str] = key([], "regions (and `parameters`) that exist on sub-grid 0 alone")
    slice_via: str = key(
        "all_to_all", "collective that slices heads; all_gather = as in SUPER (Jain et al.)", tuple(SLICE_VIA)
    )


@dataclass
class Pipeline:
    """Stages of the model, and the schedule of their microbatches."""

    kind: str = key("none", "the schedule", ("none", "gpipe", "1f1b", "interleaved", "zb_h1", "file"), open=True)
    stages: int = key(1, "pipeline stages", ">= 1", most=1000)
    chunks: int = key(1, "model chunks per stage", ">= 1", most=1000)
    file: str = key("", "pipeline=file: path of the schedule's table, one line of actions per stage")
    scatter_gather: bool = key(True, "send 1/n of a tensor that n ranks replicate, and gather it after")
    settings: dict[str, Any] = own_settings("pipeline schedule")


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
        "none", "recomputed in backward: nothing, the inside of attention, or blocks", ("none", "selective", "full")
    )
    recompute_every: int = key(1, "recompute=full: blocks recomputed at a time", ">= 1", most=10_000)
    loss_scale: LossScaling = field(default_factory=LossScaling)
    train: Train = field(default_factory=Train)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    parallel: Parallel = field(default_factory=Parallel)
    tensor: Tensor = field(default_factory=Tensor)
    branch: Branch = field(default_factory=Branch)
    pipeline: Pipeline = field(default_factory=Pipeline)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    resume: Resume = field(default_factory=Resume)
    eval: Eval = field(default_factory=Eval)
    elastic: Elastic = field(default_factory=Elastic)
    cluster: Cluster = field(default_factory=Cluster)
    monitor: Monitor = field(default_factory=Monitor)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """Build a Config from nested plain values, as `to_dict` returns them; missing keys get their defaults.

        Raises ConfigError for an unknown key or a wrong type.
        """
        return _build(cls, values, "")


SentConfig = Annotated[Config, By(Config.from_dict)]  # as driver and workers exchange it: no number changes its type


def key_fields() -> dict[str, Field[Any]]:
    """Return the dataclass field of every configuration key by its full name, such as `train.steps`, in order."""
    found: dict[str, Field[Any]] = {}
    for f in fields(Config):
        group = _group(f)
        found |= {f"{f.name}.{inner.name}": inner for inner in fields(group)} if group else {f.name: f}
    return found


def _group(f: Field[Any]) -> Any:
    """Return the dataclass, such as Train, of a field of Config that is a group of keys, else None."""
    return f.default_factory if is_dataclass(f.default_factory) else None


def _build(cls: type, values: dict[str, Any], prefix: str) -> Any:
    """Build the dataclass `cls` (Config, or recursively a group of keys) from plain values; `prefix` is the group's
    name with a dot, "" for Config. Raises ConfigError for an unknown key or a wrong type."""
    hints, parts = declared(cls)
    if unknown := [f"{prefix}{k}" for k in values if k not in hints]:
        raise ConfigError([f"{key}: unknown key" for key in unknown])
    if wrong := [
        violation(f"{prefix}{k}", v, f"must be {'keys with values' if k in parts else type_in_words(hints[k])}")
        for k, v in values.items()
        if not (isinstance(v, dict) if k in parts else fits(v, hints[k]))
    ]:
        raise ConfigError(wrong)
    return cls(**{k: _build(parts[k], v, f"{k}.") if k in parts else v for k, v in values.items()})


@cache
def declared(cls: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return, of the dataclass `cls`, the types of all fields by name, and the dataclasses of the groups of keys."""
    groups = {f.name: group for f in fields(cls) if (group := _group(f))}
    return get_type_hints(cls), groups


# model.kind -> legal values of data.objective; the first is the default
OBJECTIVES: dict[str, Sequence[str]] = {
    "decoder": ["causal"],
    "encoder": ["masked"],
    "encoder_decoder": ["span_denoising", "pairs"],
    "two_layer": ["causal"],
}


def allow_objective(kind: str, name: str) -> None:
    """Add `name` to the values of data.objective that go with a kind of model."""
    OBJECTIVES[kind] = tuple(dict.fromkeys((*OBJECTIVES.get(kind, ()), name)))


def objective_of(config: Config) -> str:
    """Return the training objective: `data.objective`, else the default for `model.kind` and the data."""
    default = "pairs" if config.data.kind == "pairs" else OBJECTIVES.get(config.model.kind, ("",))[0]
    return config.data.objective or default


WEIGHTED: set[str] = set()  # values of data.objective whose samples say what each label counts
LOSS_OF: dict[str, str] = {}  # value of data.objective -> the loss that it comes with, unless that is cross-entropy


def loss_of(config: Config) -> str:
    """Return the name of the loss that a configuration trains with: `train.loss`, else the loss of its objective."""
    return config.train.loss or LOSS_OF.get(objective_of(config), CROSS_ENTROPY)


def short_hash(values: Any) -> str:
    """Return a short hash of plain data, the same in every process: 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def shown_value(value: Any) -> str:
    """Return any value, whose own methods may fail, as a refusal shows it: by its type, unless that is plain."""
    if type(value) in (str, int, float, bool, type(None), list, dict) and is_plain(value):
        return in_words(value)
    return f"a {type(value).__name__}"

"""Typed configuration: one dataclass per Hydra group, and ConfigError, the one exception for a user's mistakes.

Mistakes are found in three steps, all before any process starts: unknown keys and wrong types while the configuration
is composed, illegal values by `platform.config.checks`, and all that needs the whole plan (divisibility by axes, legal
layouts) by `platform.planning.make_plan`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from platform.boundary.schema import By

Rules = dict[str, dict[str, list[str]]]  # region or parameter role -> tensor dim -> mesh axes, major to minor


class ConfigError(ValueError):
    """User's mistakes; `violations` holds one line for each: key, value, constraint and the nearest legal values."""

    def __init__(self, violations: Sequence[str] | str):
        given = [violations] if isinstance(violations, str) else violations
        self.violations = ["\n".join(map(printable, v.split("\n"))) for v in given]  # a violation may hold a table
        super().__init__("\n".join(self.violations))


@dataclass
class Run:
    dir: str = ""  # "" = runs/EXPERIMENT-HASH
    time_limit: str = ""  # seconds or H:MM:SS, then the run stops as by a signal; "" = the Slurm allocation; 0 = none
    time_margin: float = 120.0  # seconds reserved before the limit for the last checkpoint


@dataclass
class Train:
    steps: int = 100  # updates; the learning-rate schedule spans them
    stop_at: int = 0  # end after this step, with a checkpoint; 0 = run to `steps`
    global_batch: int = 16  # sequences per update, over all replicas
    microbatch: int = 4  # sequences per microbatch of one data-parallel replica
    spike: float = 0.0  # a loss above this factor times the median of the last 32 is a spike; 0 = detect none
    verify_every: int = 0  # steps between comparisons of the replicas' weights and optimizer state; 0 = never
    on_spike: str = "rollback"  # on a spike or a non-finite loss or gradient: rollback (redo the step) | skip | stop


@dataclass
class Model:
    kind: str = "decoder"  # decoder | encoder | encoder_decoder | two_layer, or a registered one
    layers: int = 2  # Transformer layers; encoder_decoder: in each of its two stacks
    d_model: int = 64  # width of the residual stream
    heads: int = 4  # attention heads
    kv_heads: int = 0  # key and value heads of grouped-query attention; 0 = heads
    d_kv: int = 0  # width of one head; 0 = d_model / heads
    d_ff: int = 0  # width of the feed-forward layer; 0 = 4 * d_model
    length: int = 64  # tokens per sequence
    source_length: int = 0  # encoder_decoder: tokens per sequence of the encoder; 0 = length
    vocab: int = 512  # rows of the embedding, before any padding
    io: int = 64  # two_layer: width of its input and output
    hidden: int = 256  # two_layer: width between its layers
    dropout: float = 0.0  # probability that an activation is set to 0; 0 = no dropout
    fused_dropout: bool = False  # not built yet: draw attention masks in a fused kernel; they differ between layouts
    norm: str = "layernorm"  # layernorm | rmsnorm
    post_norm: bool = False  # normalise after the residual connection, as in the original Transformer
    activation: str = "gelu"  # gelu | relu | swiglu | geglu
    positions: str = "learned"  # learned | rope | sinusoidal | relative
    rope_theta: float = 10000.0  # positions=rope: base of the rotation frequencies
    buckets: int = 32  # positions=relative: entries of the bias table per head
    distance: int = 128  # positions=relative: positions farther apart than this share one entry
    bias: bool = True  # linear layers have biases
    tied: bool = True  # the output projection shares the weights of the embedding
    label_smoothing: float = 0.0  # share of the target probability spread over the vocabulary


@dataclass
class Data:
    kind: str = "stdlib"  # stdlib | text | pairs | synthetic, or a registered one
    path: str = ""  # data=text, data=pairs: a file, a folder, a glob, or .jsonl
    field: str = "text"  # .jsonl: name of the field that holds the text
    target_path: str = ""  # data=pairs: file whose lines translate the lines of `path`
    target_field: str = "target"  # data=pairs from .jsonl: name of the field that translates `field`
    objective: str = ""  # causal | masked | span_denoising | pairs; "" = the default for model.kind and the data
    validation: float = 0.05  # fraction of the documents held out for validation; 0 = none
    cache: str = ""  # folder for tokenised corpora; "" = ~/.cache/elastic-platform


@dataclass
class Optimizer:
    kind: str = "adamw"  # adamw, or a registered one
    lr: float = 1e-3  # peak learning rate, reached after warm-up
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # Adam's decay rates of the first and second moment
    eps: float = 1e-8  # Adam's epsilon, added to the denominator
    weight_decay: float = 0.1  # decoupled weight decay; never applied to vectors (norms, biases)
    clip: float = 1.0  # largest global gradient norm; 0 = no clipping
    schedule: str = "cosine"  # constant | cosine | inverse_sqrt, or a registered one
    warmup_steps: int = 0  # updates of linear warm-up from 0 to lr
    min_lr: float = 0.1  # the cosine schedule ends at this fraction of lr


@dataclass
class Parallel:
    data: int = 1  # data-parallel replicas; -1 = as many as the workers allow
    zero: int = 0  # ZeRO over the replicas: 0 = off | 1 = shard optimizer state | 3 = parameters and gradients too


@dataclass
class Tensor:
    scheme: str = "serial"  # name of the tensor-parallel scheme: set by tensor=NAME
    order: list[str] = field(default_factory=list)  # axes of the scheme, outer to inner; [] = in order of mention
    axes: dict[str, int] = field(default_factory=dict)  # size of each axis; an axis not given has size 1
    regions: Rules = field(default_factory=dict)  # activations: region -> dim -> axes
    parameters: Rules = field(default_factory=dict)  # parameters: role (all | in | out | vector) -> dim -> axes
    gathered: str = "keep"  # gathered operands: keep | again (gather again in backward) | panels (SUMMA where legal)
    layout: Any = None  # tensor=layout: your own map from dims to axes, one line or YAML


@dataclass
class Branch:
    kind: str = "none"  # name of the branch scheme (D&SP): set by branch=NAME
    axes: dict[str, int] = field(default_factory=dict)  # size of each branch axis; an axis not given has size 1
    order: str = "inner"  # inner: branch axes innermost in the mesh, inside a node | outer: D&SP's naive order
    append: dict[str, list[str]] = field(default_factory=dict)  # region -> dims split by the branch axes last
    prepend: dict[str, list[str]] = field(default_factory=dict)  # region -> dims split by the branch axes first
    only: list[str] = field(default_factory=list)  # regions (and `parameters`) that exist on sub-grid 0 alone
    slice_via: str = "all_to_all"  # slice heads by: all_to_all | all_gather (as many bytes as SUPER, Jain et al.)


@dataclass
class Pipeline:
    kind: str = "none"  # none | gpipe | 1f1b | interleaved | zb_h1 | file, or a registered one
    stages: int = 1  # pipeline stages
    chunks: int = 1  # model chunks per stage
    file: str = ""  # pipeline=file: path of the schedule table, one line per stage (platform.plan.schedule.csv_file)
    scatter_gather: bool = True  # between stages, send 1/n of a tensor that n ranks replicate, and gather it after


@dataclass
class Checkpoint:
    url: str = ""  # a path or any fsspec URL; "" = run.dir/checkpoints
    every: int | str = 0  # steps, or a duration such as 30m or 1h30m; also one at the end; 0 = neither
    on_stop: bool = True  # save when a signal, a time limit or a notice ends the run, whatever `every` is
    keep: int = 2  # number of newest checkpoints to keep; older ones are deleted
    keep_every: int = 0  # keep checkpoints at multiples of this many steps for good; 0 = none
    timeout: float = 3600.0  # seconds that a save may take before the run ends; 0 = no limit
    resume: str = "auto"  # auto | never | must, or the path or URL of a checkpoint


@dataclass
class Resume:
    allow: list[str] = field(default_factory=list)  # keys or groups of the identity that may change on resume


@dataclass
class Eval:
    every: int = 0  # steps between evaluations of the validation loss; 0 = never
    batches: int = 4  # global batches of the held-out split per evaluation


@dataclass
class Elastic:
    min_workers: int = 0  # fewest workers to start and continue with; 0 = start with all, continue with any number
    max_workers: int = 0  # most workers that the mesh may grow to; 0 = its size at the start
    spares: int = 0  # extra workers kept ready to replace lost ones
    replace: bool = True  # start a new worker for each lost one
    wait: float = 600.0  # seconds to wait for min_workers, or for storage that fails to save, before the run ends
    hang_seconds: float = 10.0  # a worker hangs if silent so long, or if a step takes longer and over 5 usual steps
    snapshot_every: int = 1  # steps between snapshots of the state in host memory, own and of peers; 0 = none
    slow: float = 1.5  # report a worker whose own work takes this factor times its stage's median; 0 = never
    replace_slow: bool = False  # replace a slow worker if a spare is ready
    attempts: int = 3  # failures of the same step after which the run ends
    faults: list[str] = field(default_factory=list)  # faults to inject, once each: STEP:KIND:RANK[:SECTION]


@dataclass
class Cluster:
    kind: str = "local"  # local | ray | processes | inline
    device: str = "auto"  # auto | cpu | cuda
    wait: float = 0.0  # seconds to wait at the start until there is a place for each worker; 0 = refuse at once
    memory: str = "refuse"  # if the plan needs more memory than a device has: refuse | warn
    gpu: str = ""  # GPU type to plan for, such as A100-80GB: its memory counts where no GPU is seen
    device_memory: float = 0.0  # GB of memory of a worker's device; 0 = as seen, else as cluster.gpu says
    threads: int = 0  # CPU threads per worker; 0 = the machine's cores divided among its workers


@dataclass
class Monitor:
    kind: str = "console"  # console | wandb
    every: int = 10  # steps between console lines
    sample: int = 0  # tokens of text to generate at the end of the run; 0 = none
    timeline: bool = False  # write timeline.json and timeline.svg: what every worker really did
    log_launches: bool = False  # write every collective that every worker launches to logs/
    project: str = "elastic-platform"  # name of the W&B project


@dataclass
class Config:
    """Whole configuration of a run; `platform.config.identity` tells which keys a resumed run must keep."""

    run: Run = field(default_factory=Run)
    extend: list[str] = field(default_factory=list)  # your own modules, imported by the driver and by every worker
    seed: int = 0  # seed of all that is random: weights, data order, dropout, samples
    precision: str = "fp32"  # fp64 | fp32 | bf16
    recompute: str = "none"  # recomputed in backward: none | selective (inside of attention) | full (whole blocks)
    recompute_every: int = 1  # recompute=full: blocks recomputed at a time; the input of each group is kept
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
        """Build a Config from the result of `to_dict`; missing keys get their defaults.

        Raises ConfigError for an unknown key or a wrong type.
        """
        return _build(cls, values, "")


SentConfig = Annotated[Config, By(Config.from_dict)]  # as driver and workers exchange it: no number changes its type


def _build(cls: type, values: dict[str, Any], prefix: str) -> Any:
    known = {f.name: f for f in fields(cls)}
    if unknown := [f"{prefix}{k}" for k in values if k not in known]:
        raise ConfigError([f"{key}: unknown key" for key in unknown])
    parts = {k: part for k, f in known.items() if is_dataclass(part := globals().get(str(f.type)))}
    hints = get_type_hints(cls)
    if wrong := [
        violation(f"{prefix}{k}", v, f"must be {_words(hints[k], k in parts)}")
        for k, v in values.items()
        if not (isinstance(v, dict) if k in parts else _fits(v, hints[k]))
    ]:
        raise ConfigError(wrong)
    return cls(**{k: _build(parts[k], v, f"{k}.") if k in parts else v for k, v in values.items()})  # type: ignore[arg-type]


def _fits(value: Any, hint: Any) -> bool:
    """Return True if plain data has the type of a field; an integer is accepted as a float."""
    kind, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if kind is list:
        return isinstance(value, list) and all(_fits(v, inner[0]) for v in value)
    if kind is dict:
        return isinstance(value, dict) and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    return isinstance(value, (int, float) if hint is float else hint)


_WORDS = {str: "text", int: "an integer", float: "a number", bool: "true or false"}


def _words(hint: Any, group: bool) -> str:
    kind, inner = get_origin(hint), get_args(hint)
    if kind is list:
        return "a list, each of it " + _words(inner[0], False)
    return "keys with values" if group or kind is dict else _WORDS.get(hint, str(hint))


RESUME = ("auto", "never", "must")  # checkpoint.resume; anything else is a path or URL

# model.kind -> legal values of data.objective; the first is the default
OBJECTIVES: dict[str, Sequence[str]] = {
    "decoder": ["causal"],
    "encoder": ["masked"],
    "encoder_decoder": ["span_denoising", "pairs"],
    "two_layer": ["causal"],
}


def objective_of(config: Config) -> str:
    """Return the training objective: `data.objective`, else the default for `model.kind` and the data."""
    default = "pairs" if config.data.kind == "pairs" else OBJECTIVES[config.model.kind][0]
    return config.data.objective or default


def digest(values: Any) -> str:
    """Return a short hash of plain data, the same in every process: 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def violation(key: str, value: Any, constraint: str, legal: Iterable[Any] = ()) -> str:
    """Return one line for the user: "KEY=VALUE: constraint; nearest legal: a, b"."""
    given, *names = [str(v).lower() if isinstance(v, bool) else str(v) for v in (value, *legal)]
    if len(given) > SHOWN:
        given = f"{given[:SHOWN]}... ({len(given)} characters)"
    return printable(f"{key}={given}: {constraint}" + (f"; nearest legal: {', '.join(names)}" if names else ""))


SHOWN = 300  # most characters of a value in a line for the user


def printable(line: str) -> str:
    """Return the text with every unprintable character escaped: one line that is safe for any terminal."""
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in line)


def closest(value: Any, legal: Iterable[Any]) -> list[Any]:
    """Return the legal values, most similar first: the three nearest integers, or all names by spelling."""
    values = list(legal)
    if all(type(v) is int for v in (value, *values)):
        return sorted(values, key=lambda v: (abs(v - value), v))[:3]
    names = {str(v): v for v in values}
    similar = get_close_matches(str(value), names, n=3, cutoff=0.5)
    return [names[n] for n in dict.fromkeys([*similar, *names])]

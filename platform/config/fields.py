"""The typed configuration: one dataclass per Hydra group, and the one exception for a user's mistakes.

Strict by construction: an unknown key or a wrong type is refused while the configuration is composed.
`platform.config.checks` finds impossible values; what needs the whole plan (divisibility by axes, legal layouts) is
checked by `platform.planning.make_plan`. All before any process starts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_args, get_origin, get_type_hints

Rules = dict[str, dict[str, list[str]]]  # region or parameter role -> tensor dim -> mesh axes, major to minor


class ConfigError(ValueError):
    """A user's mistake. `violations` holds one line each: key, value, constraint and the nearest legal values."""

    def __init__(self, violations: Sequence[str] | str):
        given = [violations] if isinstance(violations, str) else violations
        self.violations = ["\n".join(map(printable, v.split("\n"))) for v in given]  # a table has several lines
        super().__init__("\n".join(self.violations))


@dataclass
class Run:
    dir: str = ""  # "" = runs/EXPERIMENT-HASH
    time_limit: str = ""  # seconds or H:MM:SS, then it stops as by a signal; "" = the Slurm allocation; 0 = none
    time_margin: float = 120.0  # seconds before the end that are left for the last checkpoint


@dataclass
class Train:
    steps: int = 100  # updates that the learning-rate schedule spans
    stop_at: int = 0  # end after this step, with a checkpoint; 0 = at `steps`
    global_batch: int = 16  # sequences per update
    microbatch: int = 4  # sequences per microbatch and data-parallel replica
    spike: float = 0.0  # a loss above so many times the median of the last 32 is a spike; 0 = none is
    verify_every: int = 0  # steps between comparisons of the replicas' weights and optimizer state; 0 = none
    on_spike: str = "rollback"  # a spike, or a loss or gradient that is not finite: rollback | skip | stop


@dataclass
class Model:
    kind: str = "decoder"  # decoder | encoder | encoder_decoder | two_layer
    layers: int = 2  # of each stack
    d_model: int = 64
    heads: int = 4
    kv_heads: int = 0  # grouped-query attention; 0 = heads
    d_kv: int = 0  # 0 = d_model / heads
    d_ff: int = 0  # 0 = 4 * d_model
    length: int = 64  # tokens per sequence
    source_length: int = 0  # encoder_decoder: tokens per sequence of the encoder; 0 = length
    vocab: int = 512  # rows of the embedding, before any padding
    io: int = 64  # model=two_layer: width of its input and output
    hidden: int = 256  # model=two_layer: width between its layers
    dropout: float = 0.0
    fused_dropout: bool = False  # attention masks drawn inside a fused kernel: faster, differs between layouts
    norm: str = "layernorm"  # layernorm | rmsnorm
    post_norm: bool = False  # norms after the residual connection, as in the original Transformer
    activation: str = "gelu"  # gelu | relu | swiglu | geglu
    positions: str = "learned"  # learned | rope | sinusoidal | relative
    rope_theta: float = 10000.0
    buckets: int = 32  # positions=relative: entries of the bias per head
    distance: int = 128  # positions=relative: beyond it all positions share an entry
    bias: bool = True
    tied: bool = True  # the output projection is the embedding
    label_smoothing: float = 0.0  # share of the target that is spread over the vocabulary


@dataclass
class Data:
    kind: str = "stdlib"  # stdlib | text | synthetic
    path: str = ""  # data=text: a file, a folder, a glob, or .jsonl
    field: str = "text"  # the field of a .jsonl object that holds the text
    target_path: str = ""  # data=pairs: the file whose lines translate those of `path`
    target_field: str = "target"  # data=pairs: the field of a .jsonl object that translates `field`
    objective: str = ""  # causal | masked | span_denoising | pairs; "" = what suits model.kind and the data
    validation: float = 0.05  # fraction of the documents that is held out; 0 = none
    cache: str = ""  # tokenised corpora; "" = ~/.cache/elastic-platform


@dataclass
class Optimizer:
    kind: str = "adamw"
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1  # none on vectors
    clip: float = 1.0  # largest global gradient norm; 0 = no clipping
    schedule: str = "cosine"  # constant | cosine | inverse_sqrt
    warmup_steps: int = 0
    min_lr: float = 0.1  # the cosine ends at this fraction of lr


@dataclass
class Parallel:
    data: int = 1  # replicas; -1 = as many as the workers give
    zero: int = 0


@dataclass
class Tensor:
    scheme: str = "serial"
    order: list[str] = field(default_factory=list)  # the scheme's axes, outer to inner; [] = as written in `axes`
    axes: dict[str, int] = field(default_factory=dict)  # sizes; 1 where not given
    regions: Rules = field(default_factory=dict)
    parameters: Rules = field(default_factory=dict)  # role (all | in | out | vector) -> dim -> axes
    gathered: str = "keep"  # gathered operands until the backward pass: keep | again | panels (SUMMA, where it applies)
    layout: Any = None  # tensor=layout: the user's own map, one line or YAML


@dataclass
class Branch:
    kind: str = "none"
    axes: dict[str, int] = field(default_factory=dict)
    order: str = "inner"  # inner: branch axes innermost in the mesh, inside a node | outer: D&SP's naive order
    append: dict[str, list[str]] = field(default_factory=dict)  # region -> dims whose lists end with the branch axes
    prepend: dict[str, list[str]] = field(default_factory=dict)  # region -> dims whose lists begin with them
    only: list[str] = field(default_factory=list)  # regions (and parameters) that exist on sub-grid 0 alone
    slice_via: str = "all_to_all"  # kinds that slice: all_to_all | all_gather (the volume of paper 002)


@dataclass
class Pipeline:
    kind: str = "none"  # none | gpipe | 1f1b | interleaved | zb_h1 | file, or a registered one
    stages: int = 1
    chunks: int = 1  # model chunks per stage
    file: str = ""  # pipeline=file: the table, one line per stage (platform.plan.schedule.csv_file)
    scatter_gather: bool = True


@dataclass
class Checkpoint:
    url: str = ""  # a path or any fsspec URL; "" = run.dir/checkpoints
    every: int | str = 0  # steps, or a duration like 30m or 1h30m, between checkpoints, and one at the end; 0 = none
    on_stop: bool = True  # one where a signal, a time limit or a notice ends the run, whatever `every` says
    keep: int = 2  # the newest ones; older ones are deleted
    keep_every: int = 0  # those of every so many steps are kept for good; 0 = none
    timeout: float = 3600.0  # seconds that a save may take, then the run ends; 0 = any time
    resume: str = "auto"  # auto | never | must, or a checkpoint's path or URL


@dataclass
class Resume:
    allow: list[str] = field(default_factory=list)  # keys of the run's identity that may be other ones than there


@dataclass
class Eval:
    every: int = 0  # validation loss every so many steps; 0 = never
    batches: int = 4  # global batches of the held-out split


@dataclass
class Elastic:
    min_workers: int = 0  # with fewer the run waits, also at its start; 0 = starts with all, goes on with any number
    max_workers: int = 0  # the mesh grows to as many; 0 = to the size at the start
    spares: int = 0  # workers that are ready to take a lost one's place
    replace: bool = True  # start a new worker for every lost one
    wait: float = 600.0  # seconds to wait for min_workers, and for storage that takes no checkpoint; then the run ends
    hang_seconds: float = 10.0  # without a sign of life, or in a step longer than this and than 5 steps: a worker hangs
    snapshot_every: int = 1  # steps between copies of the state in host memory, own and of peers; 0 = none
    slow: float = 1.5  # a worker whose own work takes so many times the median's is reported; 0 = none
    replace_slow: bool = False  # and replaced, where a spare is ready
    attempts: int = 3  # failures without a step between them; then the run ends
    faults: list[str] = field(default_factory=list)  # to be injected, once each: STEP:KIND:RANK[:SECTION]


@dataclass
class Cluster:
    kind: str = "local"  # local | ray | processes | inline
    device: str = "auto"  # auto | cpu | cuda
    wait: float = 0.0  # seconds to wait for enough workers at the start
    memory: str = "refuse"  # a plan that needs more than a device has: refuse | warn
    gpu: str = ""  # the GPU that the run is meant for, such as A100-80GB: its memory counts where none is seen
    device_memory: float = 0.0  # GB of a worker's device; 0 = as seen, else as cluster.gpu says
    threads: int = 0  # CPU threads per worker; 0 = the machine's cores shared among its workers


@dataclass
class Monitor:
    kind: str = "console"  # console | wandb
    every: int = 10  # steps between console lines
    sample: int = 0  # tokens of text to generate when the run is done; 0 = none
    timeline: bool = False  # write timeline.json and timeline.svg: what every worker really did
    log_launches: bool = False  # write every collective launch of every worker to logs/
    project: str = "elastic-platform"


@dataclass
class Config:
    """Everything that `python -m platform.launch` composes. Identity of a run: `platform.config.identity`."""

    run: Run = field(default_factory=Run)
    extend: list[str] = field(default_factory=list)  # own modules, imported by the driver and every worker
    seed: int = 0
    precision: str = "fp32"  # fp64 | fp32 | bf16
    recompute: str = "none"
    recompute_every: int = 1  # blocks between kept activations under recompute=full
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
        """The inverse of `to_dict`; also accepts a part of the keys. Raises ConfigError for an unknown key."""
        return _build(cls, values, "")


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
    """Whether plain data has the type of a field; a whole number is a float."""
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

# model.kind -> what it can be asked to predict; the first is the default
OBJECTIVES: dict[str, Sequence[str]] = {
    "decoder": ["causal"],
    "encoder": ["masked"],
    "encoder_decoder": ["span_denoising", "pairs"],
    "two_layer": ["causal"],
}


def objective_of(config: Config) -> str:
    """What the model is asked to predict: data.objective, or what suits model.kind and the data."""
    default = "pairs" if config.data.kind == "pairs" else OBJECTIVES[config.model.kind][0]
    return config.data.objective or default


def digest(values: Any) -> str:
    """A short, stable hash of plain data."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def violation(key: str, value: Any, constraint: str, legal: Iterable[Any] = ()) -> str:
    """One line for the user: KEY=VALUE: constraint; nearest legal: a, b."""
    given, *names = [str(v).lower() if isinstance(v, bool) else str(v) for v in (value, *legal)]
    if len(given) > SHOWN:
        given = f"{given[:SHOWN]}... ({len(given)} characters)"
    return printable(f"{key}={given}: {constraint}" + (f"; nearest legal: {', '.join(names)}" if names else ""))


SHOWN = 300  # characters of a value in a line for the user


def printable(line: str) -> str:
    """Return the text as one line that every terminal takes: what is no printable character is escaped."""
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in line)


def closest(value: Any, legal: Iterable[Any]) -> list[Any]:
    """The legal values, the most similar first: the three nearest numbers, or all names by spelling."""
    values = list(legal)
    if all(type(v) is int for v in (value, *values)):
        return sorted(values, key=lambda v: (abs(v - value), v))[:3]
    names = {str(v): v for v in values}
    similar = get_close_matches(str(value), names, n=3, cutoff=0.5)
    return [names[n] for n in dict.fromkeys([*similar, *names])]

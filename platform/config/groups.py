"""Groups of keys, one dataclass each: data, execution (run, checkpoint, resume, elastic, cluster, plan, monitor), mesh
(parallel, tensor, branch, pipeline), model, optimizer, and training (train, tune, loss_scale, eval)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from platform.config.key import RHYTHM, SECONDS, WORKERS, declare_user_settings_key, fixed_key, free_key, key
from platform.plan.generators import ONE_CHUNK
from platform.plan.model_types import CROSS_ENTROPY, DISTILL, KERNELS, PAIR_LOSSES
from platform.plan.scheme import CONTEXT_KINDS, GATHERED, SLICE_VIA, TENSOR_EXPERTS, VECTORS


@dataclass
class Data:
    """Training data, and what the model predicts in it."""

    kind: str = free_key(
        "stdlib", "source of the data",
        ("stdlib", "text", "instructions", "preferences", "pairs", "tokens", "synthetic", "mixture"),
        open=True,
    )  # fmt: skip
    path: str = free_key("", "files of data: a file, a folder, a glob, or a URL of any of these", path=())
    sources: dict[str, Any] = free_key({}, "data=mixture: source -> its keys of this group, and weight or epochs")
    field: str = key("text", "files of records: name of the field that holds the text, messages or tokens")
    target_path: str = free_key("", "data=pairs: file whose lines translate the lines of data.path", path=())
    target_field: str = key("target", "name of the field that translates (data=pairs) or answers data.field")
    input_field: str = key(
        "", "data=instructions: name of the field that goes on a prompt in data.field, behind a line end; none = unread"
    )
    unread: list[str] = key(
        [], "data=instructions: fields of records and messages that are left out: tools, system, weight, ...",
        identity="none",
    )  # fmt: skip
    objective: str = key(
        "", 'what is predicted; "" = the default for model.kind and the data',
        ("", "causal", "preference", "masked", "span_denoising", "pairs"), open=True,
    )  # fmt: skip
    document_mask: bool = key(
        False, "decoder: attention and positions restart at documents, whose beginnings are not predicted"
    )
    packing: str = key(
        "cut", "rows: cut from the tokens end to end, or best_fit: of whole documents, padded", ("cut", "best_fit")
    )
    overlong: str = key(
        "split",
        "data.packing=best_fit: a document longer than a row is split over rows, cut at the end of one, or dropped",
        ("split", "cut", "drop"),
    )
    tokenizer: str = free_key(
        "train", "tokenizer.json, a folder, a tiktoken or sentencepiece file; train = its own BPE", path=("train",),
    )  # fmt: skip
    tokenizer_words: str = key("", "tiktoken: gpt2, cl100k_base, qwen, o200k_base or a regular expression of words")
    foreign_tokenizer: bool = key(
        False, "the tokenizer may be another than that of the weights of train.init, which then read other tokens",
        identity="none",
    )  # fmt: skip
    special_tokens: list[str] = key([], "special tokens that the tokenizer gets beside its own")
    end_token: str = key("", 'special token that ends documents; "" = as the tokenizer says')
    begin_token: str = key("", 'special token that begins documents; "" = as the tokenizer says')
    chat_template: str = free_key(
        "", 'how conversations are written: chatml or a file; "" = as the tokenizer says', path=("chatml",),
    )  # fmt: skip
    date: str = key(
        "", 'the day that a chat template knows as today, YYYY-MM-DD; "" = none', pattern="|[0-9]{4}-[0-9]{2}-[0-9]{2}",
        constraint="must be a day, YYYY-MM-DD", identity="free",
    )  # fmt: skip
    dtype: str = key(
        "uint16", "data=tokens: type of a .bin without an index", ("uint8", "uint16", "uint32", "int32", "int64")
    )
    separator: int = key(
        -1, "data=tokens: the token with which a document begins; -1 = none, or an index says", ">= -1", most=2**24
    )
    streaming: bool = key(
        False, "tokenise a source while it is trained on, block by block, and keep the newest blocks", identity="share"
    )
    block: int = key(
        16_000_000, "data.streaming: characters of a block, of which samples are shuffled", ">= 100", most=10**9
    )
    validation_path: str = key("", 'files that are held out for validation; "" = a part of data.path', path=())
    validation: float = key(
        0.05, "fraction of the documents held out for validation; 0 = none", ">= 0 and < 1", identity="share"
    )
    cache: str = key("", 'folder for tokenised corpora; "" = ~/.cache/elastic-platform', path=(), identity="none")
    settings: dict[str, Any] = declare_user_settings_key("source", identity="free")
    objective_settings: dict[str, Any] = declare_user_settings_key("objective")


# Groups of keys that say how a run executes: none of them changes its results, all may change on resume.

RESUME = ("auto", "never", "must")  # checkpoint.resume; anything else is a path or URL

AUTO = "auto"  # elastic.snapshot_every, checkpoint.every: until the plan settles them; cluster.hardware: by the device


def _is_on_ray(config: Any) -> bool:
    """Return True if a configuration starts its workers on Ray, which alone reads some keys of Cluster."""
    return config.cluster.kind == "ray"


@dataclass
class Run:
    """Place and time limit of a run."""

    dir: str = key("", 'the run directory; "" = runs/EXPERIMENT-HASH', path=())
    time_limit: str = key(
        "", 'stop as by a signal after; "" = at the end of the Slurm allocation, 0 = never',
        constraint="must be seconds or H:MM:SS",
    )  # fmt: skip
    time_margin: float = key(120.0, "seconds reserved before the limit for the last checkpoint", ">= 0", most=SECONDS)


@dataclass
class Checkpoint:
    """Place and time of checkpoints, and which of them a run goes on from."""

    url: str = key(
        "",
        'a path, or a URL of a storage that fsspec writes to (s3, gs, ...); "" = checkpoints/ in the run directory',
        path=(),
    )
    every: int | str = key(
        0,
        "time between checkpoints, beside that of the last step; 0 = none",
        constraint=f"must be {RHYTHM}, or auto",
    )
    last: bool = key(True, "save after the last step, whatever `every` is: what a finished run has learned")
    on_stop: bool = key(True, "save when a signal, a time limit or a notice ends the run, whatever `every` is")
    keep: int = key(2, "number of newest checkpoints to keep; older ones are deleted", ">= 1")
    best: bool = key(False, "save after the evaluation with the lowest validation loss, and keep that checkpoint too")
    keep_every: int = key(0, "keep checkpoints at multiples of this many steps for good; 0 = none", ">= 0")
    timeout: float = key(3600.0, "seconds that a save may take before the run ends; 0 = no limit", ">= 0", most=SECONDS)
    resume: str = key(
        "auto", "checkpoint to go on from", constraint=f"{', '.join(RESUME)}, or a path or URL", path=RESUME
    )


@dataclass
class Resume:
    """Changes that a resumed run may make."""

    allow: list[str] = key([], "keys or groups of the run's identity that may change on resume")


@dataclass
class Elastic:
    """Failures, spares, and how far the mesh may shrink and grow."""

    min_workers: int = key(
        0, "fewest workers to go on with; 0 = start with all, go on with any number", ">= 0", most=WORKERS
    )
    max_workers: int = key(0, "most workers that the mesh may grow to; 0 = its size at the start", ">= 0", most=WORKERS)
    spares: int = key(0, "extra workers kept ready to replace lost ones", ">= 0", most=WORKERS)
    replace: bool = key(True, "start a new worker for each lost one")
    wait: float = key(
        600.0, "seconds to wait for min_workers, or for a storage that fails, before the end", ">= 0", most=SECONDS
    )
    hang_seconds: float = key(
        3.0, "a worker hangs that is silent or blocked so long in a step, and for 3 usual ones", "> 0", most=SECONDS
    )
    snapshot_every: int | str = key(
        1,
        "steps between snapshots of the state in host memory; 0 = none; auto = as few as cluster.network has time for,"
        " or as elastic.mean_hours_between_failures makes best", ">= 0",
        constraint="must be a number of steps >= 0, or auto",
    )  # fmt: skip
    mean_hours_between_failures: float = key(
        0.0,
        "hours between failures of any of the run's workers, for snapshot_every=auto and checkpoint.every=auto; 0 = not"
        " known: the latter then reckons with 50,000 for each worker", ">= 0", most=10**6,
    )  # fmt: skip
    slow: float = key(1.5, "report a worker that takes this factor times its stage's median; 0 = never", ">= 0")
    replace_slow: bool = key(False, "replace a slow worker if a spare is ready")
    replan: bool = key(
        False, "re-form the mesh by a better plan, if steps leave their predicted time by a fifth and it pays"
    )
    attempts: int = key(3, "failures of the same step after which the run ends", ">= 1", most=10**6)
    faults: list[str] = key([], "faults to inject, once each: STEP:KIND:RANK[:SECTION]")

    @property
    def snapshot_interval(self) -> int:
        """Return the steps between snapshots by this group's key, 0 for none; `auto` is settled before a run starts."""
        assert isinstance(self.snapshot_every, int), "auto is settled"
        return self.snapshot_every


@dataclass
class Cluster:
    """Start of the workers, and their devices."""

    kind: str = key("local", "how workers are started", ("local", "ray", "processes", "inline"))
    device: str = key("auto", "auto takes GPUs if there is one per worker", ("auto", "cpu", "cuda"))
    placement: str = key(
        "pack", "cluster=ray: workers on few nodes, all on one, or on many", ("pack", "strict_pack", "spread"),
        read_if=_is_on_ray,
    )  # fmt: skip
    labels: dict[str, str] = key(
        {}, "cluster=ray: label selectors of the workers' nodes", pattern=r"!?[\w./-]{1,128}|!?in\([\w. ,-]{1,500}\)",
        constraint="must be name: value, !value, in(a,b) or !in(a,b)", read_if=_is_on_ray,
    )  # fmt: skip
    runtime_env: dict[str, Any] = key({}, "cluster=ray: Ray's runtime_env of the workers", read_if=_is_on_ray)
    autoscale: bool = key(
        False, "cluster=ray: ask Ray's autoscaler for the workers, up to elastic.max_workers", read_if=_is_on_ray
    )
    wait: float = key(0.0, "seconds to wait at the start for Ray and places; 0 = refuse at once", ">= 0", most=SECONDS)
    doctor: str = key(
        "auto", "examine workers before they get a seat; bad ones get none; auto = quick, on GPUs or several nodes",
        ("auto", "quick", "full", "off"),
    )  # fmt: skip
    tiers: list[str] = key(
        ["ray.io/region", "ray.io/availability-zone", "rack"],
        "Ray node labels that tell what a node is in, outer to inner; in Slurm also its switches",
    )
    memory: str = key("refuse", "if a plan needs more memory than a device has", ("refuse", "warn"))
    gpu: str = key("", "GPU type to plan for, such as A100-80GB: its memory counts where no GPU is seen")
    hardware: str = key(
        "auto",
        "hardware for which steps and plans are priced: a name in conf/hardware/, or FILE.yaml; auto = by the device",
    )
    device_memory: float = key(
        0.0, "GB of memory per device; 0 = as seen, else as cluster.gpu says", ">= 0", most=10**6
    )
    network: float = key(
        25.0, "Gbit/s at which a node sends to others by TCP: prices snapshots, for elastic.snapshot_every=auto", "> 0"
    )
    threads: int = key(
        0, "CPU threads per worker; 0 = OMP_NUM_THREADS, else its share of usable cores", ">= 0", most=4096
    )
    bind: bool = key(True, "a worker on a GPU keeps to the CPU cores next to it, of its NUMA node")
    check: bool = key(False, "tell at the end what the run has proven of its cluster; 1 if it is not all")


@dataclass
class Planning:
    """Keys that the planner chooses, and how much of its search it shows."""

    search: list[str] = key(
        [], "keys that the planner chooses, as `auto` and -1 leave them to it; all = every one of them"
    )
    top: int = key(0, "print so many of the best plans, and why each lost; 0 = none", ">= 0", most=1000)


@dataclass
class Monitor:
    """Display and records of a run."""

    kind: str = key("console", "display of metrics", ("console", "wandb"))
    tensorboard: bool = key(False, "also TensorBoard: files in RUN_DIR/tensorboard")
    mlflow: bool = key(False, "also MLflow: at MLFLOW_TRACKING_URI")
    trackio: bool = key(False, "also trackio: on this machine, or at TRACKIO_SPACE_ID")
    every: int = key(10, "steps between console lines", ">= 1")
    sample: int = key(0, "tokens of text to generate at the end of the run; 0 = none", ">= 0", most=10**6)
    layers: int = key(0, "steps between records of each layer's gradient norm and activations; 0 = never", ">= 0")
    timeline: bool = key(
        False, "write timeline.json and timeline.svg: what every worker really did, and its collectives"
    )
    profile: list[int] = key(
        [], "[FIRST,LAST]: steps of which chosen ranks write traces, merged into profile/; [] = none", ">= 0"
    )
    profile_ranks: list[str] = key(
        [], "ranks that are profiled; [] = one of each pipeline stage, [all] = every one",
        pattern=r"[0-9]{1,7}|all", constraint="must be ranks, or [all]",
    )  # fmt: skip
    dump: bool = key(True, "when a call of the workers does not go on, let them write stacks and collectives to dump/")
    timing: bool = key(False, "print and journal how long each phase of the run's start and end took")
    log_launches: bool = key(False, "write every collective that every worker launches to logs/")
    prometheus: bool = key(True, "cluster=ray: offer all metrics to Prometheus, by way of Ray")
    project: str = key(
        "elastic-platform", "name of the project at W&B and trackio, of the experiment at MLflow",
        pattern=r"[^\\/#?%:]{1,128}", constraint="W&B takes 1 to 128 characters, none of them \\ / # ? % :",
    )  # fmt: skip
    tags: list[str] = key(
        [], "tags of the run at W&B and MLflow", pattern=r".{1,64}", constraint="W&B takes 1 to 64 characters"
    )
    group: str = key("", 'group of the run at W&B, MLflow and trackio; "" = none')
    notes: str = key("", "notes on the run at W&B and MLflow")
    goodput_below: float = key(
        0.0, "alert once the useful share of a run's time falls below this, after an hour; 0 = never", ">= 0 and <= 1"
    )
    alert_command: str = key(
        "", 'command of the shell that each alert starts, with the alert as JSON at its input; "" = none'
    )


Rules = dict[str, dict[str, list[str]]]  # region or parameter role -> tensor dim -> mesh axes, major to minor


@dataclass
class Parallel:
    """Data parallelism and ZeRO."""

    data: int = key(
        1, "data-parallel replicas", most=WORKERS, constraint="must be >= 1, or -1 for as many as the workers give",
        left_open=16,
    )  # fmt: skip
    zero: int = key(
        0, "ZeRO shards over replicas: 1 = optimizer state, 2 = also gradients, 3 = also parameters; -1: the planner"
        " chooses", (0, 1, 2, 3), left_open=8,
        read_if=lambda c: c.branch.kind != "dsp_csub",  # not built beside it
    )  # fmt: skip
    zero_group: int = key(
        0, "replicas that share what ZeRO shards, such as all of a node: the largest divisor of parallel.data up to"
        " this; 0 = all replicas", ">= 0", most=WORKERS,
    )  # fmt: skip
    experts: int = key(
        1, "replicas that share the experts, next to each other; a run that re-forms takes the largest divisor of its"
        " replicas and of model.experts up to this; -1: the planner chooses", ">= 1", most=WORKERS, left_open=7,
    )  # fmt: skip
    context: int = key(
        1,
        "ranks that share each sequence, whose length they split, in attention too; a run that re-forms may take fewer;"
        " -1: the planner chooses", ">= 1", most=WORKERS, left_open=6,
    )  # fmt: skip
    context_kind: str = key("auto", "how attention sees keys and values of all of them", tuple(CONTEXT_KINDS))
    context_heads: int = key(
        0, "context_kind=nested, nested_ring: ranks of parallel.context, next to each other, that exchange heads",
        ">= 0", most=WORKERS,
    )  # fmt: skip
    context_balance: bool = key(
        True,
        "deal each sequence to ranks of parallel.context in pieces, of its beginning and of its end, so that causal"
        " attention is equal work for all; where lengths are multiples of twice the ranks",
    )
    context_pieces: int = key(
        0,
        "pieces that each rank gets, an even number; 0: two, and more where windows make work uneven (up to 32, of at"
        " least 128 tokens), or documents that are kept apart (up to 16, of at least 256)", ">= 0", most=1024,
    )  # fmt: skip
    tensor_experts: str = key(
        "split", "what tensor ranks do with experts; auto: the planner chooses", tuple(TENSOR_EXPERTS), left_open=11
    )
    lent_experts: int = key(
        0, "experts of others that each of parallel.experts computes too, the busiest of the step before", ">= 0",
        most=2**16,
    )  # fmt: skip
    bucket_mib: int | str = key(
        "auto",
        "MiB of gradients that are summed over replicas at once, of whole blocks; 0 = each block by itself; auto = by"
        " the links, if cluster.hardware or cluster.gpu names them, else 25, and with zero=3 0", ">= 0", most=2**20,
        constraint="must be a whole number of MiB >= 0, or auto",
    )  # fmt: skip
    overlap: bool = key(
        True, "reduce gradients under backward passes, gather shards a block and weights a matrix ahead"
    )


@dataclass
class Tensor:
    """Tensor parallelism: a table from tensor dims to mesh axes."""

    scheme: str = key("serial", "name of the scheme: set by tensor=NAME; tensor=auto: the planner chooses", left_open=1)
    order: list[str] = key([], "axes of the scheme, outer to inner; [] = in order of mention")
    axes: dict[str, int] = key(
        {}, "size of each axis; an axis not given has size 1; -1: the planner chooses", ">= 1", most=WORKERS,
        left_open=2,
    )  # fmt: skip
    regions: Rules = key({}, "activations: region -> dim -> axes")
    parameters: Rules = key({}, "parameters: role (all, in, out, vector) -> dim -> axes")
    gathered: str = key(
        "keep", "gathered operands: keep, gather again in backward, or SUMMA's panels; auto: the planner chooses",
        tuple(GATHERED), left_open=13,
    )  # fmt: skip
    vectors: str = key(
        "even", "ranks that hold norms and biases in 3-D schemes: all, or those with equal indices along y and z, as in"
        " algorithms 7 and 8 of Bian et al.", tuple(VECTORS),
    )  # fmt: skip
    uneven: bool = key(False, "dims that axes do not divide are cut into blocks that differ by one")
    async_products: str = key(
        "auto",
        "products with weights gather what they read, and scatter what they give, as they multiply; auto: on a GPU that"
        " cluster.gpu or cluster.hardware names, where it is predicted to be faster and no death has survivors",
        ("auto", "on", "off"),
    )
    layout: Any = key(
        None, "tensor=layout: your own map from dims to axes, one line or YAML; auto: the one predicted quickest",
        read_if=lambda c: c.tensor.scheme == "layout" and c.tensor.layout,
    )  # fmt: skip


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
        "all_to_all", "collective that slices heads; all_gather = as in SUPER (Jain et al.)", tuple(SLICE_VIA),
        read_if=lambda c: c.branch.slices_heads,
    )  # fmt: skip

    @property
    def slices_heads(self) -> bool:
        """Return True if the keys of this branch scheme split the batch in region `attention` and other dims in `core`,
        the attention itself: it then slices heads by all-to-all, the collective that `branch.slice_via` may replace."""
        return "core" in self.append and "batch" in self.append.get("attention", ())


@dataclass
class Pipeline:
    """Stages of the model, and the schedule of their microbatches."""

    kind: str = key(
        "none", "the schedule; pipeline=auto: the planner chooses",
        ("none", "gpipe", "1f1b", "interleaved", "zb_h1", "file"), open=True, left_open=3,
    )  # fmt: skip
    stages: int = key(
        1, "pipeline stages; -1: the planner chooses", ">= 1", most=1000, read_if=lambda c: c.pipeline.kind != "none",
        left_open=4,
    )  # fmt: skip
    chunks: int = key(
        1, "model chunks per stage; -1: the planner chooses", ">= 1", most=1000,
        read_if=lambda c: c.pipeline.kind not in ("none", *ONE_CHUNK), left_open=5,
    )  # fmt: skip
    file: str = key(
        "", "pipeline=file: path of the schedule's table, one line of actions per stage", path=(),
        read_if=lambda c: c.pipeline.kind == "file",
    )  # fmt: skip
    scatter_gather: bool = key(True, "send 1/n of a tensor that n ranks replicate, and gather it after")
    settings: dict[str, Any] = declare_user_settings_key("pipeline schedule")


@dataclass
class Model:
    """Kind, sizes and parts of the model."""

    source: str = key(
        "", "a folder that transformers saved, or a checkpoint, or its URL, of which the model keys are read", path=()
    )
    kind: str = key("decoder", "the model", ("decoder", "encoder", "encoder_decoder", "two_layer"), open=True)
    layers: int = key(2, "Transformer layers; encoder_decoder: in each of its two stacks", ">= 1", most=1000)
    d_model: int = key(64, "width of the residual stream", ">= 1", most=2**20)
    heads: int = key(4, "attention heads", ">= 1", most=2**16)
    kv_heads: int = key(0, "key and value heads of grouped-query attention; 0 = model.heads", ">= 0", most=2**16)
    d_kv: int = key(0, "width of one head; 0 = d_model / heads", ">= 0", most=2**16)
    kv_latent: int = key(
        0, "multi-head latent attention: width of what keys and values are made from; 0 = none", ">= 0", most=2**16
    )
    q_latent: int = key(0, "kv_latent: width of what queries are made from; 0 = d_model itself", ">= 0", most=2**16)
    d_rope: int = key(0, "kv_latent: elements of d_kv that rotate, in a key alike for all heads", ">= 0", most=2**16)
    d_value: int = key(0, "kv_latent: width of one head's values; 0 = d_kv", ">= 0", most=2**16)
    global_d_kv: int = key(0, "width of one head in layers without model.window; 0 = as in others", ">= 0", most=2**16)
    global_kv_heads: int = key(
        0, "key and value heads in layers without model.window; 0 = as in others", ">= 0", most=2**16
    )
    values_are_keys: bool = key(
        False, "in layers without a window one product makes keys and values, before norms and rotations"
    )
    attention_gate: bool = key(False, "a layer's input gates each element of attention's result, by its sigmoid")
    linear_layers: list[int] = key(
        [], "layers, from 0, with a gated delta rule in place of attention", ">= 0", most=1000
    )
    linear_key_heads: int = key(0, "linear_layers: heads of queries and keys; 0 = model.heads", ">= 0", most=2**16)
    linear_value_heads: int = key(0, "linear_layers: heads of values; 0 = as of keys", ">= 0", most=2**16)
    linear_d_key: int = key(0, "linear_layers: width of one head's keys; 0 = as in attention", ">= 0", most=2**16)
    linear_d_value: int = key(0, "linear_layers: width of one head's values; 0 = as of keys", ">= 0", most=2**16)
    linear_taps: int = key(4, "linear_layers: tokens that the convolution before a rule reads", ">= 1", most=64)
    d_ff: int = key(0, "width of the feed-forward layer; 0 = 4 * d_model", ">= 0", most=2**24)
    experts: int = key(0, "experts of a layer, in place of one feed-forward layer; 0 = none", ">= 0", most=2**16)
    experts_per_token: int = key(2, "experts that compute each token", ">= 1", most=2**16)
    experts_every: int = key(1, "1 = experts in all layers, 2 = in every second one, ...", ">= 1")
    dense_layers: list[int] = key([], "layers, from 0, that have no experts all the same", ">= 0", most=1000)
    expert_d_ff: int = key(0, "width of an expert; 0 = as model.d_ff", ">= 0", most=2**24)
    expert_bias: bool = key(False, "experts, and the scores of experts, have biases")
    shared_experts: int = key(0, "further experts that compute every token", ">= 0", most=1000)
    shared_d_ff: int = key(0, "width of all shared experts together; 0 = each as an expert", ">= 0", most=2**24)
    expert_norms: bool = key(
        False, "experts and router read the stream by norms of their own; what experts and shared experts make is"
        " normalised, and added",
    )  # fmt: skip
    expert_factors: bool = key(False, "the weights of a token's experts are times a factor of each expert")
    shared_expert_gate: bool = key(False, "a token gates the result of its shared experts, by a sigmoid")
    capacity_factor: float = free_key(
        1.25, "tokens of a sequence that an expert takes, over its even share; 0 = all that come", ">= 0", most=1e6,
    )  # fmt: skip
    router: str = key("softmax", "what makes probabilities of the experts' scores", ("softmax", "sigmoid"))
    router_normalised: bool = key(True, "the weights of a token's experts are divided by their sum")
    router_scale: float = key(1.0, "factor on the weights of a token's experts", "> 0", most=1e6)
    router_groups: int = key(1, "groups of consecutive experts; a token's lie in few", ">= 1", most=2**16)
    router_groups_kept: int = key(1, "groups in which a token's experts lie, at most", ">= 1", most=2**16)
    router_group_best: int = key(
        1, "largest probabilities of a group, the sum of which decides whether it is kept", ">= 1", most=2**16
    )
    router_jitter: float = free_key(
        0.0, "training: what a router reads is multiplied by uniform numbers in 1 -+ this", ">= 0 and < 1",
    )  # fmt: skip
    router_bias: bool = key(False, "the choice of experts, not their weights, adds a bias to each probability")
    balance_rate: float = free_key(
        0.001, "router_bias: what a step adds to the bias of experts below the mean load, and takes from others",
        ">= 0",
    )  # fmt: skip
    balance_loss: float = free_key(0.01, "factor of the loss of experts' uneven load", ">= 0")
    balance_over: str = key(
        "sequence", "load in the balance loss: of the sequence, or of the step before", ("sequence", "batch")
    )
    z_loss: float = free_key(0.0, "factor of the loss of large scores: of the square of their log-sum-exp", ">= 0")
    length: int = key(64, "tokens per sequence", ">= 1", most=2**24)
    source_length: int = key(0, "encoder_decoder: tokens per encoder sequence; 0 = model.length", ">= 0", most=2**24)
    vocab: int = key(512, "rows of the embedding, before any padding", ">= 1", most=2**24)
    io: int = key(64, "two_layer: width of its input and output", ">= 1", most=2**24)
    hidden: int = key(256, "two_layer: width between its layers", ">= 1", most=2**24)
    dropout: float = free_key(0.0, "probability that an activation is set to 0; 0 = no dropout", ">= 0 and < 1")
    fused_dropout: bool = free_key(
        False, "attention's masks are drawn inside its kernel, per rank: not as other plans do"
    )
    norm: str = key(
        "layernorm", "normalisation; _centred: by 1 + its gain, which is 0 at first",
        ("layernorm", "rmsnorm", "rmsnorm_centred"),
    )  # fmt: skip
    norm_eps: float = key(1e-5, "what norms add to the variance; norms of latents add 1e-6", "> 0 and < 1")
    post_norm: bool = key(False, "normalise after the residual connection, as in the original Transformer")
    input_norm: bool = key(True, "a layer reads the normalised stream; false: the stream as it is")
    output_norm: bool = key(False, "normalise a layer's output before it is added to the stream")
    parallel_residual: bool = key(False, "attention and feed-forward layer of a block read the same stream")
    embedding_scale: float = key(1.0, "factor on the embeddings, where they enter the stream", "> 0", most=1e6)
    residual_scale: float = key(1.0, "factor on a layer's output, before it is added to the stream", "> 0", most=1e6)
    stored_scale: bool = key(False, "the stream behind a block is multiplied by a number that is stored, not trained")
    embedding_norm: bool = key(False, "normalise the embeddings too, as BERT does")
    activation: str = key(
        "gelu",
        "pointwise function of the feed-forward layer; _tanh: GELU's approximation; swiglu, geglu, reglu: gated;"
        " _clamped: GPT-OSS's",
        ("gelu", "gelu_tanh", "relu", "silu", "swiglu", "swiglu_clamped", "geglu", "geglu_tanh", "reglu"),
    )
    positions: str = key(
        "learned", "how attention knows positions; sinusoidal: embeddings are scaled by sqrt(d_model)",
        ("learned", "rope", "sinusoidal", "relative"),
    )  # fmt: skip
    rope_theta: float = key(10000.0, "positions=rope: base of the rotation frequencies", "> 0")
    rope_pairs: str = key(
        "halves", "positions=rope: what rotates with an element: the one half a head away, or its neighbour",
        ("halves", "neighbours"),
    )  # fmt: skip
    no_rope_layers: list[int] = key([], "positions=rope: layers, from 0, without rotations", ">= 0", most=1000)
    window_rope_theta: float = key(
        0.0, "base of the rotations, not scaled, of layers with model.window; 0 = as other layers", ">= 0"
    )
    rope_share: float = key(
        1.0, "positions=rope: share of a head's elements that rotate, its first; rope_scaling=proportional: of its"
        " pairs, by the frequencies of a whole head", "> 0 and <= 1",
    )  # fmt: skip
    rope_scaling: str = key(
        "none", "positions=rope: how angles are scaled to longer sequences",
        ("none", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"),
    )  # fmt: skip
    rope_factor: float = key(1.0, "rope_scaling: how much longer the sequences are", ">= 1")
    rope_original_length: int = key(0, "rope_scaling by the length before: that length", ">= 0", most=2**24)
    rope_low: float = key(1.0, "rope_scaling=llama3, yarn: pairs of fewer turns in that length are all scaled", "> 0")
    rope_high: float = key(4.0, "rope_scaling=llama3, yarn: pairs of more turns are not scaled", "> 0")
    rope_truncate: bool = key(True, "rope_scaling=yarn: the bounds of what is scaled are rounded to whole pairs")
    rope_short: list[float] = key([], "rope_scaling=longrope: divisor of each pair's angle in that length", "> 0")
    rope_long: list[float] = key([], "rope_scaling=longrope: divisor of each pair's angle in longer sequences", "> 0")
    rope_magnitude: float = key(
        0.0, "rope_scaling=yarn, longrope: factor on queries and keys; 0 = 0.1 ln(factor) + 1, or"
        " sqrt(1 + ln(factor) / ln(length before))", ">= 0",
    )  # fmt: skip
    buckets: int = key(32, "positions=relative: entries of the bias table per head", ">= 4", most=2**16)
    distance: int = key(128, "positions=relative: positions farther apart than this share one entry", ">= 1")
    window: int = key(0, "attention sees so many tokens back, its own among them; 0 = all", ">= 0", most=2**24)
    window_layers: list[int] = key([], "layers, from 0, with model.window; [] = all", ">= 0", most=1000)
    within_documents: bool = key(False, "no token sees a document before its own: set by data.document_mask")
    position_rows: int = free_key(
        0, "positions=learned: rows of the table, if sequences are also shorter: set by train.length_ramp", ">= 0",
    )  # fmt: skip
    attention_scale: float = key(0.0, "factor on attention's scores; 0 = 1 / sqrt(d_kv)", ">= 0", most=1e6)
    attention_cap: float = key(
        0.0, "soft cap of attention's scores s, cap * tanh(s / cap) in their place; 0 = none", ">= 0", most=1e6
    )
    attention_sinks: bool = key(False, "each head may attend to nothing, by a learned score of its own")
    query_key_norm: bool = key(False, "RMSNorm of queries and keys")
    value_norm: bool = key(False, "RMSNorm of each head's values, without a gain")
    query_key_norm_over: str = key("head", "what one such norm spans: a head, or all heads", ("head", "heads"))
    segments: int = key(
        0, "encoder: rows of a second embedding, of each token's document; 0 = none", ">= 0", most=2**16
    )
    bias: bool = key(True, "linear layers have biases")
    attention_bias: str = key(
        "", 'biases of attention: all, none, of Q, K and V; "" = as model.bias', ("", "all", "qkv", "none")
    )
    tied: bool = key(True, "the output projection shares the weights of the embedding")
    head_transform: bool = key(False, "a layer, activation and norm before the output projection, as in BERT")
    head_bias: bool = key(False, "the output projection has a bias")
    logit_scale: float = key(1.0, "factor on the logits, before model.head_bias is added", "> 0", most=1e6)
    logit_cap: float = key(
        0.0, "soft cap of the logits y, cap * tanh(y / cap) in their place; 0 = none", ">= 0", most=1e6
    )
    predict_ahead: int = key(
        0, "modules of multi-token prediction (DeepSeek-V3), each of one token further; 0 = none", ">= 0", most=16
    )
    predict_ahead_weight: float = free_key(
        0.1, "predict_ahead: factor of the mean loss of its modules, beside the model's own", ">= 0", most=1e6
    )
    label_smoothing: float = free_key(0.0, "share of the target probability spread over the vocabulary", ">= 0 and < 1")
    settings: dict[str, Any] = declare_user_settings_key("model")


@dataclass
class Optimizer:
    """Update rule, and the schedule of its learning rate."""

    kind: str = fixed_key("adamw", "the optimizer", ("adamw", "sgd", "lion", "muon", "adafactor"), open=True)
    lr: float = key(1e-3, "peak learning rate, reached after warm-up", ">= 0 and < inf", most=1e6)
    betas: list[float] = key(
        [0.9, 0.95], "decay rates of Adam's two moments; of Lion's update and its momentum", ">= 0 and < 1"
    )
    momentum: float = fixed_key(0.9, "sgd, muon: decay rate of the momentum; 0 = none", ">= 0 and < 1")
    nesterov: bool = key(False, "sgd, muon: Nesterov's momentum, which looks one update ahead")
    matrices: str = fixed_key("", 'muon: regular expression of its parameters; "" = weights of hidden layers')
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
    least_scale: float = key(
        1e-3, "adafactor: lower bound of the parameter scale (second eps of torch)", ">= 0", most=1e6
    )
    groups: list[dict[str, Any]] = key(
        [],
        "factors by parameter: {match: REGULAR EXPRESSION, lr: FACTOR, weight_decay: FACTOR}; the first that matches",
    )
    eps: float = key(
        1e-8, "Adam's epsilon, added to the denominator; adafactor: its least value", "> 0 and < inf", most=1e6
    )
    weight_decay: float = key(
        0.1, "weight decay, decoupled but for sgd; not of norms, biases, relative positions, sinks", ">= 0 and < inf",
        most=1e6,
    )  # fmt: skip
    clip: float = key(1.0, "largest global gradient norm; 0 = no clipping", ">= 0")
    early: str = key(
        "auto",
        "launch an update before its loss and norm are read, and let the device skip it if they are not finite;"
        " auto: on a GPU, where optimizer and run allow it",
        ("auto", "off"),
    )
    moments: str = key(
        "fp32", "what adamw, lion and sgd keep moments in; int8: 8 bits, scaled by blocks", ("fp32", "bf16", "int8")
    )
    masters: str = key(
        "fp32", "master copies; split: precision=bf16's weights, and 16 bits that make them fp32", ("fp32", "split")
    )
    offload: str = key(
        "none", "what adamw, lion and sgd keep in host memory: states (moments, averages), and masters; auto: the"
        " planner chooses", ("none", "states", "states+masters"), left_open=15,
    )  # fmt: skip
    schedule: str = key(
        "cosine", "learning rate after warm-up",
        ("constant", "cosine", "cosine_restarts", "inverse_sqrt", "linear", "wsd"), open=True,
    )  # fmt: skip
    warmup_steps: int = key(0, "updates of linear warm-up from 0 to optimizer.lr", ">= 0")
    min_lr: float = key(0.1, "the cosines, linear and wsd end at this fraction of optimizer.lr", ">= 0 and <= 1")
    cycles: int = key(2, "cosine_restarts: falls from optimizer.lr, of equal length", ">= 1", most=10**6)
    decay_steps: int = key(0, "wsd: updates of the last, linear fall; 0 = a tenth of train.steps", ">= 0")
    settings: dict[str, Any] = declare_user_settings_key("optimizer")
    schedule_settings: dict[str, Any] = declare_user_settings_key("learning-rate schedule")


@dataclass
class Train:
    """Steps, batches, and what happens to a step whose numbers are wrong."""

    steps: int = key(100, "updates; the learning-rate schedule spans them", ">= 1")
    stop_at: int = key(0, "end after this step, with a checkpoint; 0 = run to train.steps", ">= 0")
    global_batch: int = fixed_key(16, "sequences per update, over all replicas", ">= 1", most=10**8, planned=True)
    ramp_from: int = fixed_key(
        0, "sequences of the first updates, of a batch that grows; 0 = it does not", ">= 0", most=10**8,
    )  # fmt: skip
    ramp_by: int = fixed_key(1, "train.ramp_from: sequences by which the batch grows, up to train.global_batch", ">= 1")
    ramp_samples: int = fixed_key(0, "train.ramp_from: sequences over which the batch grows", ">= 0")
    length_ramp: list[str] = free_key(
        [], "STEP:LENGTH, ...: after STEP updates, sequences of LENGTH tokens, up to model.length; [] = always these",
        pattern=r"\d{1,12}:\d{1,12}", constraint="must be STEP:LENGTH, such as 200:512",
    )  # fmt: skip
    microbatch: int = key(
        4, "sequences per microbatch of one data-parallel replica; -1: the planner chooses", ">= 1", most=10**6,
        planned=True, left_open=9,
    )  # fmt: skip
    init: str = free_key(
        "", "start from these weights: a checkpoint's URL, or a folder that transformers saved; random = from none;"
        ' "" = from model.source, if there is one', path=("random",),
    )  # fmt: skip
    loss: str = free_key(
        "", 'what a label costs; "" = as the objective says', ("", CROSS_ENTROPY, *PAIR_LOSSES, DISTILL), open=True
    )
    teacher: str = free_key("", "train.loss=distill: the model that is learned from, as train.init names one", path=())
    init_averaged: bool = free_key(False, "train.init: take the averages that train.ema kept of that run's weights")
    spike: float = key(0.0, "a loss above this factor times the median of the last 32 is a spike; 0 = never", ">= 0")
    verify_every: int = key(0, "steps between comparisons of the replicas' weights and moments; 0 = never", ">= 0")
    compile: str = key("auto", "compile what lies between collectives; auto: on GPUs", ("auto", "on", "off"))
    compile_collectives: bool = key(False, "compile blocks whole though collectives of tensor axes lie in them")
    graphs: str = key(
        "auto",
        "record passes of microbatches once, as graphs of the GPU, and replay them; auto: where the run allows it, and"
        " memory has room, as that of graphs serves nothing else",
        ("auto", "on", "off"),
    )
    ahead: str = key(
        "auto",
        "launch a step's passes before the numbers of the step before are read, so that a device never waits for its"
        " host; auto: on a GPU, where the update itself is launched early (optimizer.early) and the run allows it",
        ("auto", "off"),
    )
    pair_passes: str = key(
        "auto",
        "run a forward pass with the backward pass of an earlier microbatch: each computes while the other waits for an"
        " exchange of experts; auto: on GPUs, where a step is predicted to be shorter and memory has room",
        ("auto", "on", "off"),
    )
    attention_kernel: str = key(AUTO, "kernel of attention where one computes it; auto: torch chooses", KERNELS)
    mlp_chunks: int = key(
        1, "feed-forward layers: chunks of tokens, each with its inner activations, computed twice; 1 = whole, once;"
        " -1: the planner chooses", ">= 1", most=10**6, left_open=14,
    )  # fmt: skip
    freeze: list[str] = fixed_key(
        [], "patterns of parameters that no update changes, such as embedding or layers.[0-3].*",
        pattern=r"[\w.*?\[\]!-]+", constraint="must be the name of a parameter, or a pattern with *, ? or [...]",
    )  # fmt: skip
    ema: float = fixed_key(0.0, "decay of averaged weights, such as 0.999; 0 = none are kept", ">= 0 and < 1")
    deterministic: bool = key(False, "a step done again is equal in every bit; what cannot be is refused")
    loss_settings: dict[str, Any] = declare_user_settings_key("loss", identity="free")
    on_spike: str = key("rollback", "at a spike or non-finite number: redo, skip or stop", ("rollback", "skip", "stop"))


@dataclass
class Tune:
    """Adapters beside the weights of a model, which stay as they are."""

    kind: str = fixed_key(
        "none", "what is trained: the weights, or low-rank adapters of some (lora), beside layers in 4 bits (qlora)",
        ("none", "lora", "qlora"),
    )  # fmt: skip
    rank: int = fixed_key(16, "tune=lora: inner size of an adapter", ">= 1", most=10**5)
    alpha: float = fixed_key(32.0, "tune=lora: an adapter's product is times this / tune.rank", "> 0", most=1e6)
    rslora: bool = fixed_key(False, "tune=lora: times tune.alpha / sqrt(tune.rank)")
    targets: list[str] = fixed_key(
        ["attention.*", "mlp.*"], "tune=lora: weights with an adapter, by the last parts of their names, or patterns",
        pattern=r"[\w.*?\[\]!-]+", constraint="must be the last part of a parameter's name, or a pattern",
    )  # fmt: skip
    double: bool = fixed_key(False, "tune=qlora: scales of blocks in 8 bits, a scale for each 256 of them")
    dropout: float = free_key(0.0, "tune=lora: share of an adapter's input that is dropped in training", ">= 0 and < 1")


@dataclass
class Quantise:
    """Products in 8 bits of the weights of a model's blocks; embedding, head, norms, router and softmax stay."""

    scale: str = key(
        "auto", "what has one scale: a tensor, a row, a block, or 32 elements as MX says; auto: block under"
        " precision=fp8, mx under mxfp8, else none", ("auto", "none", "block", "tensor", "row", "mx"),
    )  # fmt: skip
    block: int = key(128, "quantise.scale=block: elements with one scale along what a product contracts", ">= 1",
                     most=10**5)  # fmt: skip
    powers: str = key("auto", "scales are powers of two; auto: of block and mx", ("auto", "on", "off"))
    gather: str = key(
        "auto", "parallel.zero=3 gathers weights in 8 bits where their numbers stay equal bit for bit; auto: unless a"
        " step would be slower on the hardware that is named", ("auto", "on", "off"),
    )  # fmt: skip
    gradients: str = key("e4m3", "form of gradients; e5m2 has a wider range, and one bit less", ("e4m3", "e5m2"))
    layers: list[str] = key(
        ["*"], "patterns of weights whose products are in 8 bits; all weights that share an input",
        pattern=r"[\w.*?\[\]!-]+", constraint="must be the name of a parameter, or a pattern with *, ? or [...]",
    )  # fmt: skip
    skip: list[str] = key(
        [], "patterns of weights whose products stay as they are, such as *.down",
        pattern=r"[\w.*?\[\]!-]+", constraint="must be the name of a parameter, or a pattern with *, ? or [...]",
    )  # fmt: skip


@dataclass
class LossScaling:
    """Factor on the loss under precision=fp16, so that small gradients do not vanish: falls at an overflow."""

    initial: float = key(2.0**16, "of the first step", "> 0")
    growth: float = key(2.0, "rises by this factor after loss_scale.growth_every updates", ">= 1", most=2.0**20)
    growth_every: int = key(2000, "updates without a change after which it rises", ">= 1")
    backoff: float = key(0.5, "falls by this factor when a gradient overflows; that step is skipped", "> 0 and < 1")
    least: float = key(1.0, "does not fall below; what overflows then is met as train.on_spike says", "> 0")


@dataclass
class Eval:
    """Evaluation on the held-out split."""

    every: int = key(0, "steps between evaluations of the validation loss; 0 = never", ">= 0")
    batches: int = key(4, "global batches of held-out rows per evaluation, each row at most once", ">= 1", most=10**6)
    averaged: bool = key(False, "evaluate the averaged weights of train.ema instead of the trained ones")
    patience: int = key(0, "evaluations in a row without a lower loss after which the run ends; 0 = never", ">= 0")
    least_gain: float = key(0.0, "eval.patience: the loss must fall by more than this to be lower", ">= 0")
    prompts: list[str] = key([], "texts that the model continues, or answers, at each evaluation, to be read")
    prompt_tokens: int = key(
        32, "eval.prompts: tokens of each continuation, each a pass of the model", ">= 1", most=10**4
    )
    tasks: list[str] = key([], "tasks of lm-eval, such as [lambada_openai], that score the model at each evaluation")
    task_folder: str = key("", "eval.tasks: a folder with task files of your own", path=())
    task_samples: int = key(0, "eval.tasks: documents of each task; 0 = all", ">= 0")

"""Groups of keys that say how a run executes: none of them changes its results, all may change on resume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from platform.config.durations import RHYTHM
from platform.config.key import SECONDS, WORKERS, key

RESUME = ("auto", "never", "must")  # checkpoint.resume; anything else is a path or URL

AUTO = "auto"  # elastic.snapshot_every, checkpoint.every: until the plan settles them; cluster.hardware: by the device

ON_RAY = ("placement", "labels", "runtime_env", "autoscale")  # keys of Cluster that only cluster=ray reads


@dataclass
class Run:
    """Place and time limit of a run."""

    dir: str = key("", 'the run directory; "" = runs/EXPERIMENT-HASH')
    time_limit: str = key(
        "",
        'stop as by a signal after; "" = at the end of the Slurm allocation, 0 = never',
        constraint="must be seconds or H:MM:SS",
    )
    time_margin: float = key(120.0, "seconds reserved before the limit for the last checkpoint", ">= 0", most=SECONDS)


@dataclass
class Checkpoint:
    """Place and time of checkpoints, and which of them a run goes on from."""

    url: str = key("", 'a path or any fsspec URL; "" = checkpoints/ in the run directory')
    every: int | str = key(
        0, "time between checkpoints; also one at the end; 0 = neither", constraint=f"must be {RHYTHM}, or auto"
    )
    on_stop: bool = key(True, "save when a signal, a time limit or a notice ends the run, whatever `every` is")
    keep: int = key(2, "number of newest checkpoints to keep; older ones are deleted", ">= 1")
    best: bool = key(False, "save after the evaluation with the lowest validation loss, and keep that checkpoint too")
    keep_every: int = key(0, "keep checkpoints at multiples of this many steps for good; 0 = none", ">= 0")
    timeout: float = key(3600.0, "seconds that a save may take before the run ends; 0 = no limit", ">= 0", most=SECONDS)
    resume: str = key("auto", "checkpoint to go on from", constraint=f"{', '.join(RESUME)}, or a path or URL")


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
        " or as elastic.mean_hours_between_failures makes best",
        ">= 0",
        constraint="must be a number of steps >= 0, or auto",
    )
    mean_hours_between_failures: float = key(
        0.0,
        "hours between failures of any of the run's workers, for snapshot_every=auto and checkpoint.every=auto; 0 = not"
        " known: the latter then reckons with 50,000 for each worker",
        ">= 0",
        most=10**6,
    )
    slow: float = key(1.5, "report a worker that takes this factor times its stage's median; 0 = never", ">= 0")
    replace_slow: bool = key(False, "replace a slow worker if a spare is ready")
    replan: bool = key(
        False, "re-form the mesh by a better plan, if steps leave their predicted time by a fifth and it pays"
    )
    attempts: int = key(3, "failures of the same step after which the run ends", ">= 1", most=10**6)
    faults: list[str] = key([], "faults to inject, once each: STEP:KIND:RANK[:SECTION]")

    @property
    def interval(self) -> int:
        """Return the configured steps between snapshots, 0 for none; `auto` is settled before a run starts."""
        assert isinstance(self.snapshot_every, int), "auto is settled"
        return self.snapshot_every


@dataclass
class Cluster:
    """Start of the workers, and their devices."""

    kind: str = key("local", "how workers are started", ("local", "ray", "processes", "inline"))
    device: str = key("auto", "auto takes GPUs if there is one per worker", ("auto", "cpu", "cuda"))
    placement: str = key(
        "pack", "cluster=ray: workers on few nodes, all on one, or on many", ("pack", "strict_pack", "spread")
    )
    labels: dict[str, str] = key(
        {},
        "cluster=ray: label selectors of the workers' nodes",
        pattern=r"!?[\w./-]{1,128}|!?in\([\w. ,-]{1,500}\)",
        constraint="must be name: value, !value, in(a,b) or !in(a,b)",
    )
    runtime_env: dict[str, Any] = key({}, "cluster=ray: Ray's runtime_env of the workers")
    autoscale: bool = key(False, "cluster=ray: ask Ray's autoscaler for the workers, up to elastic.max_workers")
    wait: float = key(0.0, "seconds to wait at the start for places; 0 = refuse at once", ">= 0", most=SECONDS)
    doctor: str = key(
        "auto",
        "examine workers before they get a seat; bad ones get none; auto = quick, on GPUs or several nodes",
        ("auto", "quick", "full", "off"),
    )
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
    threads: int = key(0, "CPU threads per worker; 0 = cores divided among a machine's workers", ">= 0", most=4096)
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
        "elastic-platform",
        "name of the project at W&B and trackio, of the experiment at MLflow",
        pattern=r"[^\\/#?%:]{1,128}",
        constraint="W&B takes 1 to 128 characters, none of them \\ / # ? % :",
    )
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

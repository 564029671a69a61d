"""Rules that refuse the keys that say how a run executes: groups run, checkpoint, elastic, cluster and monitor."""

from __future__ import annotations

import re
from collections.abc import Iterator

from platform.boundary.refusals import closest, violation
from platform.config.bounds import KEYS
from platform.config.durations import nearest_rhythms, rhythm_of, seconds_of
from platform.config.fields import Config
from platform.config.groups.execution_group import AUTO, ON_RAY, Cluster
from platform.config.key import SECONDS, refused
from platform.config.rules.profile_rules import violations_of_profile
from platform.plan.memory.hardware import ACCELERATORS, memory_of


def _time_limit(config: Config) -> Iterator[str]:
    """Yield a refusal line if `run.time_limit` is no duration, or longer than clocks and timers take."""
    key = "run.time_limit"
    try:
        if seconds_of(config.run.time_limit) > SECONDS:
            yield refused(config, key, f"must be <= {SECONDS} seconds", [SECONDS])
    except ValueError:
        yield refused(config, key, KEYS[key].constraint, ["3600", "1:00:00"])


def _rhythm(config: Config) -> Iterator[str]:
    """Yield a refusal line if `checkpoint.every` is neither a number of steps nor a duration nor `auto`."""
    key, every = "checkpoint.every", config.checkpoint.every
    try:
        rhythm_of(0 if every == AUTO else every)
    except ValueError:
        if isinstance(every, int):
            yield refused(config, key, "must be >= 0", [0])
        else:
            yield refused(config, key, KEYS[key].constraint, nearest_rhythms(every))


def _snapshots(config: Config) -> Iterator[str]:
    """Yield a refusal line if `elastic.snapshot_every` is a text other than `auto`."""
    key, every = "elastic.snapshot_every", config.elastic.snapshot_every
    if isinstance(every, str) and every != AUTO:
        yield refused(config, key, KEYS[key].constraint, [1, AUTO])


def _replan(config: Config) -> Iterator[str]:
    """Yield a refusal line if `elastic.replan` could change the plan only by losing steps."""
    if config.elastic.replan and not config.elastic.snapshot_every and not config.checkpoint.every:
        constraint = "a mesh re-forms from snapshots or checkpoints, and both are off"
        legal = ["elastic.snapshot_every=1", "checkpoint.every=30m", False]
        yield refused(config, "elastic.replan", constraint, legal)


def _workers(config: Config) -> Iterator[str]:
    """Yield a refusal line for each contradiction between the bounds on the number of workers, and of spares."""
    least, most = config.elastic.min_workers, config.elastic.max_workers
    if most and most < least:
        yield refused(config, "elastic.max_workers", f"must be 0 or >= elastic.min_workers={least}", [0, least])
    if config.elastic.spares and config.cluster.kind == "inline":
        yield refused(config, "elastic.spares", "cluster=inline is a world of one in one process", [0])


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


def _deterministic(config: Config) -> Iterator[str]:
    """Yield a refusal line if a run configured as deterministic may get other numbers of threads when restarted."""
    cluster = config.cluster
    if config.train.deterministic and cluster.kind == "ray" and cluster.device != "cuda" and not cluster.threads:
        constraint = "train.deterministic=true needs one number on all machines, as sums on a CPU depend on it"
        yield refused(config, "cluster.threads", constraint, [1])


def _gpu(config: Config) -> Iterator[str]:
    """Yield a refusal line if cluster.gpu names no known accelerator."""
    gpu = config.cluster.gpu
    if gpu and memory_of(gpu) is None:
        names = ["-".join(known.name.split()) for known in ACCELERATORS]
        yield refused(config, "cluster.gpu", "unknown", closest(gpu, names)[:3])


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
            yield refused(config, f"cluster.{name}", "only cluster=ray reads it", [getattr(default, name)])
    for name, value in c.runtime_env.items():
        if name not in RUNTIME_ENV:
            legal = [f"cluster.runtime_env.{near}" for near in closest(name, RUNTIME_ENV)[:3]]
            yield violation(f"cluster.runtime_env.{name}", value, "unknown key", legal)
    if c.autoscale and c.device == "auto":
        yield refused(config, "cluster.device", "cluster.autoscale=true must know what to ask for", ["cuda", "cpu"])
    if c.autoscale and not c.wait:
        yield refused(config, "cluster.wait", "cluster.autoscale=true needs time in which machines start", [1800])


def _sample(config: Config) -> Iterator[str]:
    """Yield a refusal line if monitor.sample wants text of a kind of model that generates none."""
    if config.model.kind in ("encoder", "two_layer") and config.monitor.sample:
        yield refused(config, "monitor.sample", f"model.kind={config.model.kind} generates no text", [0])


RULES = (
    _faults,
    _sample,
    violations_of_profile,
    _time_limit,
    _rhythm,
    _snapshots,
    _replan,
    _workers,
    _deterministic,
    _gpu,
    _ray,
)

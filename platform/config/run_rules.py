"""Rules that refuse the keys that say how a run executes: groups run, checkpoint, elastic, cluster and monitor, with a
profile of steps or ranks that a run lacks, or that would be too large.

`violations_of_environment` checks what a configuration needs on this machine: directories, storages, environment
variables; read-only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from platform.boundary.local_files import find_protocol_fault
from platform.boundary.redaction import strip_url_secrets
from platform.boundary.refusals import closest_values, format_violation
from platform.config.fields import KEYS, Config
from platform.config.groups import AUTO, RESUME, Cluster
from platform.config.key import SECONDS, parse_duration, parse_rhythm, suggest_rhythms, violation_of_key
from platform.plan.accelerators import ACCELERATORS, nominal_memory

EVERY = "all"  # monitor.profile_ranks
MOST_STEPS, MOST_RANKS = 10, 64  # of a profile, each with up to some 10 MB


def violations_of_profile(config: Config) -> Iterator[str]:
    """Yield a refusal line for each thing that is wrong with the steps of `monitor.profile`, or their ranks."""
    key, steps, last = "monitor.profile", config.monitor.profile, config.train.steps
    ranks = config.monitor.profile_ranks
    shown = f"[{', '.join(ranks)}]"
    if ranks and not steps:
        legal = ["monitor.profile=[10,12]", []]
        yield format_violation("monitor.profile_ranks", shown, "monitor.profile names no steps", legal)
    if steps and len(steps) != 2:
        yield violation_of_key(config, key, "must be [] or [FIRST,LAST]", [[steps[0], steps[-1]], []])
    elif steps and not 1 <= steps[0] <= steps[1] <= last:
        first = min(max(1, steps[0]), last)
        constraint = f"must be [FIRST,LAST] with 1 <= FIRST <= LAST <= train.steps={last}"
        yield violation_of_key(config, key, constraint, [[first, min(max(first, steps[1]), last)]])
    elif steps and steps[1] - steps[0] >= MOST_STEPS:
        constraint = f"must be at most {MOST_STEPS} steps, as a trace takes megabytes for each"
        yield violation_of_key(config, key, constraint, [[steps[0], steps[0] + MOST_STEPS - 1]])
    if EVERY in ranks and len(ranks) > 1:
        yield format_violation("monitor.profile_ranks", shown, "must be ranks, or [all] alone", [f"[{EVERY}]"])


def violations_of_profile_ranks(config: Config, workers: int) -> Iterator[str]:
    """Yield a refusal line per rank of `monitor.profile_ranks` that never exists, as `workers` start the run and it may
    grow to `elastic.max_workers`, and one if there are too many of them."""
    key, ranks, most = "monitor.profile_ranks", config.monitor.profile_ranks, max(workers, config.elastic.max_workers)
    for rank in ranks:
        if rank.isdecimal() and int(rank) >= most:
            yield format_violation(key, rank, f"must be below the {most} ranks that the run has", [most - 1])
    count = most if ranks == [EVERY] else len(set(ranks))
    if count > MOST_RANKS:
        constraint = f"{count} ranks; at most {MOST_RANKS} can be profiled at once"
        legal = [[*range(0, most, -(-most // 4))], []]
        yield format_violation(key, f"[{', '.join(ranks)}]", constraint, legal)


def _violations_of_time_limit(config: Config) -> Iterator[str]:
    """Yield a refusal line if `run.time_limit` is no duration, or longer than clocks and timers take."""
    key = "run.time_limit"
    try:
        if parse_duration(config.run.time_limit) > SECONDS:
            yield violation_of_key(config, key, f"must be <= {SECONDS} seconds", [SECONDS])
    except ValueError:
        yield violation_of_key(config, key, KEYS[key].constraint, ["3600", "1:00:00"])


def _violations_of_checkpoint_rhythm(config: Config) -> Iterator[str]:
    """Yield a refusal line if `checkpoint.every` is neither a number of steps nor a duration nor `auto`."""
    key, every = "checkpoint.every", config.checkpoint.every
    try:
        parse_rhythm(0 if every == AUTO else every)
    except ValueError:
        if isinstance(every, int):
            yield violation_of_key(config, key, "must be >= 0", [0])
        else:
            yield violation_of_key(config, key, KEYS[key].constraint, suggest_rhythms(every))


def _violations_of_snapshots(config: Config) -> Iterator[str]:
    """Yield a refusal line if `elastic.snapshot_every` is a text other than `auto`."""
    key, every = "elastic.snapshot_every", config.elastic.snapshot_every
    if isinstance(every, str) and every != AUTO:
        yield violation_of_key(config, key, KEYS[key].constraint, [1, AUTO])


def _violations_of_replan(config: Config) -> Iterator[str]:
    """Yield a refusal line if `elastic.replan` could change the plan only by losing steps."""
    if config.elastic.replan and not config.elastic.snapshot_every and not config.checkpoint.every:
        constraint = "a mesh re-forms from snapshots or checkpoints, and both are off"
        legal = ["elastic.snapshot_every=1", "checkpoint.every=30m", False]
        yield violation_of_key(config, "elastic.replan", constraint, legal)


def _violations_of_worker_bounds(config: Config) -> Iterator[str]:
    """Yield a refusal line for each contradiction between the bounds on the number of workers, and of spares."""
    least, most = config.elastic.min_workers, config.elastic.max_workers
    if most and most < least:
        constraint = f"must be 0 or >= elastic.min_workers={least}"
        yield violation_of_key(config, "elastic.max_workers", constraint, [0, least])
    if config.elastic.spares and config.cluster.kind == "inline":
        yield violation_of_key(config, "elastic.spares", "cluster=inline is a world of one in one process", [0])


FAULT_KINDS = ("kill", "stop", "raise", "lock", "gil", "nan", "flip")
FAULT_SECTIONS = (  # sections of a step, as its clock records them; an action of a pipeline table (0F0) is legal too
    "step", "data", "forward", "backward", "exposed_comm", "bubble", "reduce", "optimizer", "checkpoint",
)  # fmt: skip
_KINDS = "|".join(FAULT_KINDS)
FAULT = re.compile(rf"(?P<step>\d{{1,12}}):(?P<kind>{_KINDS}):(?P<rank>\d{{1,12}})(?::(?P<section>\w+))?", re.ASCII)
_ACTION = re.compile(r"\d+[FBIW]\d+", re.ASCII)


def _violations_of_faults(config: Config) -> Iterator[str]:
    """Yield a refusal line per entry of `elastic.faults`, the failures to inject for a test, that would never be
    injected: malformed, or at a step or section of a step that the run lacks."""
    steps = config.train.steps
    for fault in config.elastic.faults:
        if not (fault_match := FAULT.fullmatch(fault)):
            constraint = f"must be STEP:KIND:RANK[:SECTION], KIND {_KINDS}"
            yield format_violation("elastic.faults", fault, constraint, ["20:kill:3:backward"])
            continue
        step, kind, rank, section = fault_match.groups()
        if not 1 <= int(step) <= steps:
            nearest = f"{min(max(1, int(step)), steps)}{fault.removeprefix(step)}"
            constraint = f"its step must be from 1 to train.steps={steps}"
            yield format_violation("elastic.faults", fault, constraint, [nearest])
        if section and section not in FAULT_SECTIONS and not _ACTION.fullmatch(section):
            legal = [f"{step}:{kind}:{rank}:{name}" for name in closest_values(section, FAULT_SECTIONS)[:3]]
            yield format_violation("elastic.faults", fault, f"a step has no section {section}", legal)


def violations_of_fault_ranks(config: Config, workers: int) -> Iterator[str]:
    """Yield a refusal line per entry of `elastic.faults`, the failures to inject for a test, at a rank that never
    exists: `workers` start the run, and it may grow to `elastic.max_workers`."""
    most = max(workers, config.elastic.max_workers)
    for fault in config.elastic.faults:
        if (fault_match := FAULT.fullmatch(fault)) and int(fault_match["rank"]) >= most:
            step, kind, _, *section = fault.split(":")
            nearest = ":".join([step, kind, str(most - 1), *section])
            constraint = f"its rank must be below the {most} that the run has"
            yield format_violation("elastic.faults", fault, constraint, [nearest])


def _violations_of_determinism(config: Config) -> Iterator[str]:
    """Yield a refusal line if a run configured as deterministic may get other numbers of threads when restarted."""
    cluster = config.cluster
    if config.train.deterministic and cluster.kind == "ray" and cluster.device != "cuda" and not cluster.threads:
        constraint = "train.deterministic=true needs one number on all machines, as sums on a CPU depend on it"
        yield violation_of_key(config, "cluster.threads", constraint, [1])


def _violations_of_gpu(config: Config) -> Iterator[str]:
    """Yield a refusal line if cluster.gpu names no known accelerator."""
    gpu = config.cluster.gpu
    if gpu and nominal_memory(gpu) is None:
        names = ["-".join(known.name.split()) for known in ACCELERATORS]
        yield violation_of_key(config, "cluster.gpu", "unknown", closest_values(gpu, names)[:3])


RUNTIME_ENV = (  # fields of Ray's runtime_env
    "config", "conda", "container", "env_vars", "excludes", "image_uri", "nsight", "pip", "py_executable", "py_modules",
    "uv", "worker_process_setup_hook", "working_dir",
)  # fmt: skip


def _violations_of_ray(config: Config) -> Iterator[str]:
    """Yield a refusal line for each key that only cluster=ray reads under another cluster, each unknown field of the
    runtime environment, and a request to the autoscaler that would ask for nothing in particular or not be waited
    for."""
    c = config.cluster
    for name, default in vars(Cluster()).items():
        read_if = KEYS[f"cluster.{name}"].read_if
        if read_if and not read_if(config) and getattr(c, name) != default:
            yield violation_of_key(config, f"cluster.{name}", "only cluster=ray reads it", [default])
    for name, value in c.runtime_env.items():
        if name not in RUNTIME_ENV:
            legal = [f"cluster.runtime_env.{near}" for near in closest_values(name, RUNTIME_ENV)[:3]]
            yield format_violation(f"cluster.runtime_env.{name}", value, "unknown key", legal)
    if c.autoscale and c.device == "auto":
        constraint = "cluster.autoscale=true must know what to ask for"
        yield violation_of_key(config, "cluster.device", constraint, ["cuda", "cpu"])
    if c.autoscale and not c.wait:
        constraint = "cluster.autoscale=true needs time in which machines start"
        yield violation_of_key(config, "cluster.wait", constraint, [1800])


def _violations_of_urls(config: Config) -> Iterator[str]:
    """Refuse storages through whose protocol nothing can be saved, or read, and URLs of what must be a path."""
    for key, url in (("checkpoint.url", config.checkpoint.url), ("checkpoint.resume", config.checkpoint.resume)):
        if url not in ("", *RESUME) and (reason := find_protocol_fault(url, key == "checkpoint.url")):
            legal = ["a path", "s3://BUCKET/PATH", "gs://BUCKET/PATH"]
            yield format_violation(key, strip_url_secrets(url), reason, legal)
    for key, path in (("run.dir", config.run.dir), ("data.cache", config.data.cache)):
        if "://" in path:
            yield format_violation(key, path, "must be a path; only checkpoints and data may be at a URL", ["a path"])


def _violations_of_sample(config: Config) -> Iterator[str]:
    """Yield a refusal line if monitor.sample wants text of a kind of model that generates none."""
    if config.model.kind in ("encoder", "two_layer") and config.monitor.sample:
        yield violation_of_key(config, "monitor.sample", f"model.kind={config.model.kind} generates no text", [0])


RULES = (
    _violations_of_urls,
    _violations_of_faults,
    _violations_of_sample,
    violations_of_profile,
    _violations_of_time_limit,
    _violations_of_checkpoint_rhythm,
    _violations_of_snapshots,
    _violations_of_replan,
    _violations_of_worker_bounds,
    _violations_of_determinism,
    _violations_of_gpu,
    _violations_of_ray,
)


Variable = tuple[str, str, tuple[str, ...]]  # (pattern of its value, constraint in words, examples)
_NUMBER: Variable = (r"\d{1,9}", "must be an integer", ("0",))
_SIZE: Variable = (r"[1-9]\d{0,8}", "must be an integer of at least 1", ("1",))
_HOST = r"[\w.-]+|\[[0-9a-fA-F:.]+\]"
TORCHRUN: Mapping[str, Variable] = {
    "RANK": _NUMBER,
    "LOCAL_RANK": _NUMBER,
    "WORLD_SIZE": _SIZE,
    "LOCAL_WORLD_SIZE": _SIZE,
    "MASTER_PORT": (r"\d{1,5}", "must be a port", ("29500",)),
    "TORCHELASTIC_RESTART_COUNT": _NUMBER,
}
_RAY: Variable = (rf"auto|({_HOST}):\d{{1,5}}", "must be HOST:PORT, or auto", ("auto", "127.0.0.1:6379"))
_DETERMINISTIC: Mapping[str, Variable] = {  # of workers on GPUs, under train.deterministic
    "CUBLAS_WORKSPACE_CONFIG": (r":4096:8|:16:8", "must be as train.deterministic=true needs it", (":4096:8", ":16:8")),
    "NCCL_ALGO": (
        r"(?i)\^(?=.*\bnvls\b)(?=.*\bnvlstree\b).*|(?!\^)(?!.*nvls).+",
        "NVLS adds in no fixed order, which train.deterministic=true needs",
        ("^NVLS,NVLSTree", "Ring"),
    ),
}
_MODES = ("online", "offline", "disabled")
_WANDB: Variable = (r"online|offline|disabled|shared|run|dryrun|", "no mode of W&B", _MODES)


def violations_of_environment(config: Config) -> list[str]:
    """Return one refusal line per directory or environment variable that a run cannot use here; nothing is created."""
    lines = list(_violations_of_variables(config))
    folders = {"run.dir": config.run.dir, "data.cache": config.data.cache, "checkpoint.url": config.checkpoint.url}
    for key, path in folders.items():
        if path and "://" not in path and (reason := _find_directory_fault(path)):
            lines.append(format_violation(key, path, reason, ["a directory that you can write to"]))
    return lines


def _violations_of_variables(config: Config) -> Iterator[str]:
    """Yield a refusal line per environment variable of torchrun, Ray, W&B, cuBLAS or NCCL, as far as this
    configuration's run reads it, that is malformed or asks for what the run cannot have; torchrun's also if one is
    missing."""
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ
    variables_read = {
        **({"RAY_ADDRESS": _RAY} if config.cluster.kind == "ray" and not torchrun else {}),
        **({"WANDB_MODE": _WANDB} if config.monitor.kind == "wandb" else {}),
        **(TORCHRUN if torchrun else {}),
        **(_DETERMINISTIC if config.train.deterministic and config.cluster.device != "cpu" else {}),
    }
    for name, (pattern, words, legal) in variables_read.items():
        missing = torchrun and name in TORCHRUN and name not in os.environ
        if missing or (name in os.environ and not re.fullmatch(pattern, os.environ[name], re.ASCII)):
            yield format_violation(name, os.environ.get(name, ""), f"(environment) {words}", legal)


def _find_directory_fault(path: str) -> str:
    """Return why `path`, configured for a run directory, cache or checkpoints, is no writable directory and cannot
    become one; "" if it is or can."""
    path = os.path.abspath(path)
    if path.strip("/") == "":
        return "is the root of the file system"
    try:
        while not _path_exists(path):
            path = os.path.dirname(path)
    except (OSError, ValueError) as error:
        return f"cannot be used ({getattr(error, 'strerror', None) or error})"
    if not os.path.isdir(path):
        return f"cannot be used ({path} is no directory)"
    if not os.access(path, os.W_OK | os.X_OK):
        return f"cannot be used (Permission denied, or read-only: {path})"
    return ""


def _path_exists(path: str) -> bool:
    """Return True if a configured `path` exists. Raises OSError for an impossible one, such as a 300-character name."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def expand_path(key: str, path: str) -> tuple[str, list[str]]:
    """Expand ~ in the path that configuration key `key` holds, and make it absolute (a URL and "" stay as they are).
    Return it, and [] or, if ~USER names no user, one refusal line."""
    if not path or "://" in path:
        return path, []
    expanded_path = os.path.expanduser(path)
    user = path.partition("/")[0]
    if expanded_path != path or not user.startswith("~") or os.path.lexists(user):
        return os.path.abspath(expanded_path), []
    return os.path.abspath(expanded_path), [format_violation(key, path, f"there is no user {user[1:]}", [f"./{path}"])]

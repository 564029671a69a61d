"""A job of a run, from its arguments: composed and planned, sized, completed with what a job adds; and templates.
`compute_job_size` is pure: what a run's plan asks of a cluster, as nodes, CPUs, memory and seconds."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from platform.boundary.redaction import REDACTED, redact_secrets, register_url_secrets
from platform.boundary.refusals import ConfigError, format_violation, refuse_all, refuse_failures
from platform.cluster.shown_commands import replace_overrides
from platform.config.arguments import find_experiment_name, parse_typed_values
from platform.config.composition import CONF, open_composer
from platform.config.fields import KEYS, Config, flatten_config
from platform.config.key import format_hms
from platform.data.mixture import paths_by_key
from platform.jobs.job_options import JobOptions, parse_job_limit, refuse_missing_options, split_and_check_job_options
from platform.launch import compose_config
from platform.optimizer.optimizers import count_states_per_element
from platform.plan.accelerators import nominal_memory
from platform.plan.plan import Plan
from platform.predict.footprint import checkpoint_bytes, weight_bytes
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_host_bytes, predict_peak_bytes
from platform.predict.remedies import Device, violation_of_host_memory, violation_of_memory
from platform.predict.search import choose_plan

GIB = 1 << 30
_PER_NODE = 8  # workers of a node, unless job.workers says otherwise
_PROCESS = {"cuda": 6 * GIB, "cpu": 1 * GIB}  # a worker's libraries and, for a GPU, their part of its context
_NODE = {"cuda": 16 * GIB, "cpu": 2 * GIB}  # Ray's own processes, and the page cache of what is read and written
_SHARED = {"cuda": 2 * GIB, "cpu": GIB // 4}  # /dev/shm for each worker: NCCL's buffers and Ray's small object store
_CPUS = {"cuda": 8, "cpu": 1}  # for each worker
# The state of a step in host memory, in units of a worker's own: two snapshots, two of what it keeps for peers, and its
# part of a checkpoint that is being written (docs/recovery.md).
_COPIES, _SAVED = 4, 1
_ROOM = 1.1  # for what is not counted
_WRITTEN = 0.5e9  # bytes per second and node, at least, of a storage that is fit for checkpoints
_LEAST_MARGIN = 60.0  # seconds of a stop beside writing


@dataclass(frozen=True)
class JobSize:
    """Size of a job. Attributes:
    device: of the workers, cpu | cuda.
    workers: of a node; there is a GPU for each, if that is their device.
    nodes: of the plan; `spares`: nodes beside them; `least`: nodes with which the run starts and goes on.
    cpus, memory, shm: of a node; bytes. `memory` includes `shm`.
    state: bytes of a checkpoint.
    margin: seconds before its end at which the run begins to save its last checkpoint.
    """

    device: str
    workers: int
    nodes: int
    spares: int
    least: int
    cpus: int
    memory: int
    shm: int
    state: int
    margin: int

    @property
    def total_nodes(self) -> int:
        """Return the number of nodes of the whole job, with the spare ones."""
        return self.nodes + self.spares


def workers_per_node(options: JobOptions, world_size: int) -> int:
    """Return the workers on each node of a job: job.workers or, if 0, `world_size`, at most 8 (8 if it is 0)."""
    return options.workers or min(_PER_NODE, world_size or _PER_NODE)


def compute_job_size(config: Config, plan: Plan, options: JobOptions) -> JobSize:
    """Compute the size of a job: the nodes, GPUs and memory that the run of `config` under `plan` asks for. Where the
    configuration says nothing of fewer workers (elastic.min_workers), half of the nodes are enough to start with."""
    device = "cuda" if config.cluster.device == "cuda" else "cpu"
    workers = workers_per_node(options, plan.mesh.world_size)
    nodes = _ceil_divide(plan.mesh.world_size, workers)
    most = max(nodes + _ceil_divide(config.elastic.spares, workers), _ceil_divide(config.elastic.max_workers, workers))
    enough = nodes if config.cluster.check else _ceil_divide(nodes, 2)
    least = _ceil_divide(config.elastic.min_workers, workers) or enough
    worker_state = _worker_state_bytes(config, plan)
    state = checkpoint_bytes(plan, count_states_per_element(config))
    copies = _COPIES if config.elastic.snapshot_every else 0
    worker_bytes = _PROCESS[device] + (copies + _SAVED) * worker_state
    worker_bytes += predict_peak_bytes(config, plan) if device == "cpu" else predict_host_bytes(config, plan)
    shm = _round_to_gib(workers * _SHARED[device] + GIB)
    memory = options.memory * GIB or _round_to_gib(int(_ROOM * (workers * worker_bytes + _NODE[device])) + shm)
    cpus, margin = options.cpus or workers * _CPUS[device], _LEAST_MARGIN + 2 * state / nodes / _WRITTEN
    margin = 30 * _ceil_divide(int(margin), 30)
    return JobSize(device, workers, nodes, most - nodes, least, cpus, memory, shm, state, margin=margin)


def _worker_state_bytes(config: Config, plan: Plan) -> int:
    """Return the bytes of master copies and optimizer state on the worker of a job that has most of them."""
    first, kept, master = plan.mesh.rank_coordinates(0), count_states_per_element(config), plan.itemsize["master"]
    places = [{**first, "stage": stage} for stage in range(plan.num_stages)]
    return max(plan.count_masters_of_rank(c) * master + weight_bytes(plan, kept, c)["optimizer"] for c in places)


def _round_to_gib(nbytes: int) -> int:
    """Return a number of bytes of a job's node rounded up to whole GiB."""
    return _ceil_divide(nbytes, GIB) * GIB


def _ceil_divide(count: int, by: int) -> int:
    """Return `count` divided by `by`, rounded up: such as the nodes that a job's workers need."""
    return -(-count // by)


TEMPLATES = CONF.parent / "jobs" / "templates"
_PLACE = re.compile(r"@\{(\w+)\}")  # `${...}` is bash's
_START = 240  # seconds of a job beside its margin: 2 minutes of those before it, by Slurm's clock; its start
_CARRIED = 900_000  # bytes of a ConfigMap, which may have a mebibyte with all around it
_WAIT = 600  # seconds of cluster.wait: nodes come one by one


@dataclass(frozen=True)
class PlannedRun:
    """Run that a job is written for. `options`: job options, `name` set; `world`: the workers of its plan; `command`:
    the words typed for the manifest; `arguments`: arguments of `platform.launch`, as typed."""

    config: Config
    options: Any
    size: JobSize
    world: int
    command: str
    arguments: list[str]


def plan_job(
    kind: type[JobOptions], typed: Sequence[str], config_dir: str | None, run_dir: Callable[[Any], str]
) -> PlannedRun:
    """Compose and plan the run that the arguments `typed` describe, with options of the class `kind` among them; choose
    the values that a job must have and they leave open. `run_dir`: the run directory by the options.

    Raises ConfigError with one line per mistake.
    """
    register_url_secrets(list(typed))
    options, words, lines = split_and_check_job_options(kind, typed)
    secret_keys = [word.partition("=")[0] for word in words if redact_secrets(word) != word]
    why, legal = "a secret, which the file would show: refer to it", ["${oc.env:NAME}"]
    lines += [format_violation(key, REDACTED, why, legal) for key in secret_keys]
    try:
        config = compose_config(words, config_dir)
    except ConfigError as error:
        lines += error.violations
    refuse_all(lines)
    with open_composer(config_dir):  # which knows the groups
        typed_keys, experiment = parse_typed_values(words), find_experiment_name(words)
    if experiment is None:
        raise ConfigError("experiment", "", "must be given", ["+experiment=NAME"])
    refuse_missing_options(_list_needed_keys(config, options, typed_keys))
    options = replace(options, name=options.name or re.sub(r"[^a-z0-9]+", "-", experiment.lower()).strip("-"))
    plan, words = _settle_plan(config, options, words)
    size = compute_job_size(config, plan, options)
    memory = config.cluster.device_memory * 1e9 or nominal_memory(config.cluster.gpu)
    gpu = Device(memory, config.cluster.gpu) if memory else None
    node = Device(options.memory * GIB, f"job.memory={options.memory}")
    if size.device == "cuda" and gpu and (line := violation_of_memory(config, plan, gpu)):
        raise ConfigError(line)
    if size.device == "cuda" and node.memory and (line := violation_of_host_memory(config, plan, node, size.workers)):
        raise ConfigError(line)
    if options.time and parse_job_limit(options.time) < (least := size.margin + _START):
        rule = f"its end, {size.margin} s before which the run saves, and its start take {least} s"
        raise ConfigError("job.time", options.time, rule, [format_hms(least)])
    directory = run_dir(options)
    by_ray = getattr(options, "launcher", "ray") == "ray"
    # by the autoscaler: it must know for what
    grows = by_ray and hasattr(options, "claim") and size.least < size.total_nodes
    added = {
        "cluster": "ray" if by_ray else "",
        "cluster.wait": f"{_WAIT}" if by_ray else "",
        "cluster.autoscale": "true" if grows else "",
        "cluster.device": size.device if config.cluster.device == "auto" else "",
        "elastic.min_workers": f"{size.least * size.workers}" if size.least < size.nodes else "",
        "run.dir": directory,
        "run.time_margin": f"{size.margin}",
        "data.cache": f"{directory.rpartition('/')[0] or '.'}/cache",  # for all nodes, once
    }
    added_arguments = [f"{key}={value}" for key, value in added.items() if value and key not in typed_keys]
    flags = ["--config-dir", config_dir] if config_dir else []
    arguments = [*flags, *words, *added_arguments]
    return PlannedRun(config, options, size, plan.mesh.world_size, quote_typed_words([*flags, *typed]), arguments)


def _settle_plan(config: Config, options: JobOptions, words: list[str]) -> tuple[Plan, list[str]]:
    """Settle the open keys and the number of replicas of a job's run, in place, for its nodes; return its plan, and
    `words`, its arguments, with these values."""
    replicas, chooses = config.parallel.data == -1, bool(config.plan.search)
    world = options.nodes * workers_per_node(options, 0) if replicas or chooses else None
    if chooses and (search := choose_plan(config, world or 0)) and search.quickest_fitting_finalist:
        words = replace_overrides(words, search.space.format_overrides(search.quickest_fitting_finalist.choice))
        replicas = False
    plan = make_plan(config, world)
    config.parallel.data = plan.num_replicas
    return plan, [*words, *([f"parallel.data={plan.num_replicas}"] if replicas else [])]


def _list_needed_keys(config: Config, options: JobOptions, typed_keys: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys that any job of this run must have set, such as the data's path, with their values, "" if unset.
    The demonstration text counts as data if the user names it, or checks a cluster."""
    lacks_data = config.data.kind == "stdlib" and "data" not in typed_keys and not config.cluster.check
    path = "" if lacks_data else config.data.path or config.data.kind
    needed = {"data.path": path, "checkpoint.url": config.checkpoint.url}
    if config.parallel.data == -1 or config.plan.search:
        needed["job.nodes"] = str(options.nodes or "")
    if hasattr(options, "claim"):
        needed |= {f"job.{name}": getattr(options, name) for name in ("image", "claim")}
    return needed


def refuse_outside_paths(run: PlannedRun, mount: str) -> None:
    """Raise ConfigError unless all that a job reads and writes by a path lies below `mount`, the volume that its pods
    share: data, checkpoints, models, tables, tasks, and the directories of the run."""
    typed = {key: text.strip("'\"") for key, _, text in (word.partition("=") for word in run.arguments)}
    values = flatten_config(run.config) | {key: typed[key] for key in ("run.dir", "data.cache")}
    paths = {k: values[k] for k, legal in KEYS.items() if legal.path is not None and values[k] not in legal.path}
    refuse_all(
        format_violation(key, path, f"must lie below job.mount={mount}, where the claim is", [f"{mount}/..."])
        for key, path in (paths_by_key(run.config.data) | paths).items()
        if path and "://" not in path and not path.startswith(f"{mount}/")
    )


def read_own_files(run: PlannedRun, config_dir: str | None) -> dict[str, str]:
    """Read the files that a job's arguments name on this machine: return path below one folder -> text, of the YAML
    files of `config_dir` in conf/, and of the modules of `extend` that are not installed in modules/. Raises
    ConfigError."""
    paths = Path(config_dir).rglob("*.yaml") if config_dir else ()
    files = {f"conf/{path.relative_to(config_dir or '')}": path for path in paths}
    for name in {name.partition(".")[0] for name in run.config.extend} - sys.stdlib_module_names:
        files |= {f"modules/{place}": path for place, path in _list_module_files(name)}
    key, value = ("--config-dir", config_dir) if config_dir else ("extend", run.config.extend)
    with refuse_failures(key, value, OSError, UnicodeError, why="cannot be read ({})"):
        texts = {place: files[place].read_text() for place in sorted(files)}
    if (size := sum(len(text.encode()) for text in texts.values())) > _CARRIED:
        what = "with the modules of extend" if config_dir else "in its packages"
        raise ConfigError(key, value, f"has {size} bytes {what}; a manifest carries {_CARRIED}")
    return texts


def _list_module_files(name: str) -> Iterator[tuple[str, Path]]:
    """Yield, to go with a job, (path below its folder, path) of each file of a module that is not installed."""
    module = sys.modules[name]
    for folder in map(Path, getattr(module, "__path__", ())):  # a package without __init__ has several, maybe
        if "site-packages" not in folder.parts:
            yield from ((f"{name}/{path.relative_to(folder)}", path) for path in folder.rglob("*.py"))
    file = getattr(module, "__file__", None)
    if file and not hasattr(module, "__path__") and "site-packages" not in Path(file).parts:
        yield f"{name}.py", Path(file)


def fill_template(template: str, values: Mapping[str, str | None]) -> str:
    """Fill the places `@{NAME}` in the template of a job's manifest or script; a line with a place whose value is None
    is left out, and a value of several lines is indented as its place. Raises KeyError for a place without a value."""
    lines = []
    for line in template.splitlines():
        names = _PLACE.findall(line)
        if any(values[name] is None for name in names):
            continue
        indent = " " * (len(line) - len(line.lstrip()))
        lines.append(_PLACE.sub(lambda m: str(values[m[1]]).replace("\n", f"\n{indent}"), line))  # noqa: B023
    return "\n".join(lines) + "\n"


def quote_typed_words(typed: Sequence[str]) -> str:
    """Quote the words typed for a job, as lines of the comment at the top of its script or manifest."""
    return fold_words(typed, " \\\n#         ", 84)


def fold_words(words: Sequence[str], between: str = "\n", width: int = 100) -> str:
    """Quote the words of a job's command for a shell; fold them into lines of about `width`, joined by `between`."""
    lines: list[str] = []
    for word in map(shlex.quote, words):
        if lines and len(lines[-1]) + len(word) < width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return between.join(lines)

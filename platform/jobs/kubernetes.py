"""Manifest of a run for Kubernetes: a RayJob of KubeRay, or an Indexed Job for torchrun, with what protects it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import yaml

from platform.boundary.refusals import ConfigError, violation
from platform.config.durations import job_seconds
from platform.jobs.options import KubernetesOptions, take_options
from platform.jobs.planned_run import TEMPLATES, PlannedRun, as_typed, fill, folded, plan_job, within
from platform.jobs.sizing import GIB, JobSize
from platform.plan.language.numbers import count_of

_SUBMITTERS = 10  # pods that may follow the one that submits the run: what evicts it does not end the run
_HEAD = {"cuda": {"cpu": "8", "memory": "32Gi"}, "cpu": {"cpu": "1", "memory": "4Gi"}}
_DISK = {"cuda": "50Gi", "cpu": "5Gi"}  # of a node's own disk: logs, and what Ray spills
_TAINT = "nvidia.com/gpu"
_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"  # where Kueue places pods, it places by this
_SCRAPED = {"prometheus.io/scrape": "true", "prometheus.io/port": "8080", "prometheus.io/path": "/metrics"}


class _Kind(NamedTuple):
    """Kind of job that a launcher needs: its templates, how its title names it, and its API."""

    templates: tuple[str, ...]
    title: str
    api: str
    kind: str


_KINDS = {
    "ray": _Kind(
        ("rayjob.yaml", "protection.yaml"),
        "A RayJob for KubeRay 1.6 or newer, and Kubernetes 1.29",
        "ray.io/v1",
        "RayJob",
    ),
    "torchrun": _Kind(("indexed_job.yaml",), "An Indexed Job for Kubernetes 1.27 or newer", "batch/v1", "Job"),
}
_OF_RAY = ("head_select", "head_tolerate", "wait")  # options that an Indexed Job, which has no head, does not read


def kubernetes_job(typed: Sequence[str], config_dir: str | None = None) -> str:
    """Write the manifest of a run from arguments and options job.KEY=VALUE (KubernetesOptions). Raises ConfigError."""
    run = plan_job(KubernetesOptions, typed, config_dir, lambda o: f"{o.mount}/runs/{o.name}")
    within(run.config, run.options.mount)
    _check_launcher(run)
    parts = [(TEMPLATES / name).read_text() for name in _KINDS[run.options.launcher].templates]
    values = _values(run)
    return fill(_title(run), values) + "---\n".join(fill(part, values) for part in parts)


def kubernetes_claim(typed: Sequence[str], config_dir: str | None = None) -> tuple[str, str, str] | None:
    """Write the claim that the arguments `typed`, which `kubernetes_job` takes, ask for with job.storage; return the
    name of its file, its text and its size, None if they ask for none. It is no part of the job's own file: what
    deletes a job must not delete its checkpoints."""
    o, _, _ = take_options(KubernetesOptions, typed)
    if not o.storage:
        return None
    values = {"claim": o.claim, "storage": o.storage, "storage_class": o.storage_class or None}
    flowed = {name: None if value is None else _flow(value) for name, value in values.items()}
    command = as_typed([*(["--config-dir", config_dir] if config_dir else []), *typed])
    text = fill((TEMPLATES / "claim.yaml").read_text(), {**flowed, "command": command})
    return f"claim-{o.claim}.yaml", text, o.storage


def _check_launcher(run: PlannedRun) -> None:
    """Raise ConfigError if a job whose workers torchrun starts has options of Ray's head, workers beyond the plan's, or
    nodes with different numbers of workers."""
    o, elastic = run.options, run.config.elastic
    if o.launcher == "ray":
        return
    lines = [
        violation(f"job.{name}", value, "is for job.launcher=ray", [f"job.{name}={'' if name == 'wait' else '[]'}"])
        for name in _OF_RAY
        if (value := getattr(o, name))
    ]
    world, each = run.world, run.size.workers
    if elastic.spares:
        lines.append(
            violation("elastic.spares", elastic.spares, "torchrun starts the plan's workers and no others", [0])
        )
    if elastic.max_workers > world:
        lines.append(violation("elastic.max_workers", elastic.max_workers, "torchrun starts no more", [world, 0]))
    if world % each:
        legal = [n for n in range(each, 0, -1) if world % n == 0]
        lines.append(violation("job.workers", each, f"torchrun starts as many on each node, {world} in all", legal[:1]))
    if lines:
        raise ConfigError(lines)


def _title(run: PlannedRun) -> str:
    """Return the comment at the top of a job's file, with its kind, its nodes and their workers."""
    size = run.size
    what = count_of(size.workers, "GPU") if size.device == "cuda" else f"{count_of(size.workers, 'worker')} on CPUs"
    kind = _KINDS[run.options.launcher]
    less = size.least < size.most and kind.kind == "RayJob"
    nodes = f"{size.least} to {size.most} nodes" if less else count_of(size.most, "node")
    return (
        (TEMPLATES / "title.txt").read_text().replace("@{nodes}", f"{nodes} of {what}").replace("@{kind}", kind.title)
    )


def _values(run: PlannedRun) -> dict[str, str | None]:
    """Return what the places of the templates hold, each as YAML on one line; None for what this job does not have."""
    o, size, gpu = run.options, run.size, run.size.device == "cuda"
    by_ray = o.launcher == "ray"
    grace = max(120, size.margin + 60)
    seconds = job_seconds(o.time) if o.time else None
    waiting = job_seconds(o.wait) if o.wait else None
    found: dict[str, Any] = {
        "name": o.name,
        "image": o.image,
        "claim": o.claim,
        "mount": o.mount,
        "run_dir": _run_dir(run),
        "backoff": o.retries,
        "submitters": _SUBMITTERS,
        "deadline": None if seconds is None or waiting is None else seconds + waiting + grace,
        "waiting": waiting,
        "ray": _ray_version(),
        "user": o.user,
        "grace": grace,
        "drain": str(max(60, size.margin)),
        "interface": o.interface if gpu else None,
        "wandb": {"secretKeyRef": {"name": "wandb", "key": "api-key", "optional": True}}
        if run.config.monitor.kind == "wandb"
        else None,
        "head": {**_HEAD[size.device], "ephemeral-storage": _DISK[size.device]},
        "worker": _resources(size),
        "least": size.least,
        "most": size.most,
        "elastic": size.least < size.most,
        "idle": 1800,  # seconds: a spare node waits without work
        "shm": f"{size.shm // GIB}Gi",
        "priority": o.priority or None,
        "account": o.service_account or None,
        "pull": [{"name": name} for name in o.pull_secrets] or None,
        "owner": _owner(o),
        "affinity": _near(o),
        "marks": {**(_SCRAPED if by_ray else {}), **({_TOPOLOGY: o.topology} if o.topology else {})} or None,
        "pod_losses": (o.retries + 1) * size.most,
        "head_select": _labels(o.head_select),
        "head_tolerate": [_toleration(pair) for pair in o.head_tolerate] or None,
        "select": _labels(o.select),
        "tolerate": [_toleration(pair) for pair in ([_TAINT] if gpu else []) + o.tolerate] or None,
    }
    limit = [f"--time-limit={seconds}"] if seconds is not None else []
    told = [f"--retries={o.retries}", f"--notice={grace}", *limit]
    command = ["python", "-m", "platform.jobs", "supervise", *told, *run.arguments]
    plain = {"command": run.command, "entrypoint": folded(command), "secrets": _secrets(o.secrets)}
    plain["arguments"] = "\n".join(f"- {_flow(word)}" for word in _pod_arguments(run, limit))
    return {**{name: None if value is None else _flow(value) for name, value in found.items()}, **plain}


def _pod_arguments(run: PlannedRun, limit: list[str]) -> list[str]:
    """Return the arguments of `platform.jobs pod` in every pod, as Kubernetes reads them: $(NAME) is a variable, and $$
    a $."""
    o, size = run.options, run.size
    own = [
        f"{_dollars(_run_dir(run))}/pods/$(JOB_UID)",  # of this Job: one that is made again has another
        "--index=$(JOB_COMPLETION_INDEX)",
        *(f"--pods={size.most}", f"--workers={size.workers}"),
        *(f"--first={o.name}-0.{o.name}", "--address=$(POD_IP)", f"--drain={max(60, size.margin)}"),
        *(f"--retries={o.retries}", *limit, "--run"),
    ]
    return [*own, *map(_dollars, run.arguments)]


def _run_dir(run: PlannedRun) -> str:
    """Return the run directory, as the run's own arguments name it."""
    typed = next(word.partition("=")[2] for word in reversed(run.arguments) if word.startswith("run.dir="))
    return typed.strip("'\"")


def _dollars(word: str) -> str:
    return word.replace("$", "$$")


def _resources(size: JobSize) -> dict[str, str]:
    """Return a worker pod's requests, which are its limits too."""
    gpus = {"nvidia.com/gpu": str(size.workers)} if size.device == "cuda" else {}
    own = {"cpu": str(size.cpus), "memory": f"{size.memory // GIB}Gi", "ephemeral-storage": _DISK[size.device]}
    return {**own, **gpus}


def _secrets(given: Sequence[str]) -> str | None:
    """Return a line of YAML for each environment variable that comes from a Secret, NAME=SECRET/KEY; None for none."""
    found = []
    for text in given:
        name, _, place = text.partition("=")
        secret, _, key = place.partition("/")
        found.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return "\n".join(f"- {_flow(variable)}" for variable in found) or None


def _labels(pairs: Sequence[str]) -> dict[str, str] | None:
    """Return the labels KEY=VALUE as a mapping, None for none."""
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs)} or None


def _owner(o: KubernetesOptions) -> list[dict[str, str]] | None:
    """Return the reference by which Kubernetes deletes what protects a job with it; None while its uid is not given,
    which Kubernetes draws when the job is made."""
    kind = _KINDS[o.launcher]
    return [{"apiVersion": kind.api, "kind": kind.kind, "name": o.name, "uid": o.owner}] if o.owner else None


def _near(o: KubernetesOptions) -> dict[str, Any] | None:
    """Return the preference for worker pods near each other (a far spare node is better than none), None for none."""
    if not o.topology:
        return None
    workers = {"elastic-platform/job": o.name, "elastic-platform/role": "worker"}
    term = {"labelSelector": {"matchLabels": workers}, "topologyKey": o.topology}
    wish = {"weight": 100, "podAffinityTerm": term}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}}


def _toleration(taint: str) -> dict[str, str]:
    key, equals, value = taint.partition("=")
    return {"key": key, **({"operator": "Equal", "value": value} if equals else {"operator": "Exists"})}


def _ray_version() -> str:
    """Return the version of Ray that is installed here."""
    from importlib.metadata import version

    return version("ray")


def _flow(value: Any) -> str:
    """Return a plain value as YAML on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")

"""Manifest of a run for Kubernetes: a RayJob of KubeRay, with what protects it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from platform.config.durations import job_seconds
from platform.jobs.options import KubernetesOptions
from platform.jobs.planned_run import TEMPLATES, PlannedRun, fill, folded, plan_job, within
from platform.jobs.sizing import GIB, JobSize

_WAITING = 3600  # seconds for the first nodes to come
_HEAD = {"cuda": {"cpu": "8", "memory": "32Gi"}, "cpu": {"cpu": "1", "memory": "4Gi"}}
_DISK = {"cuda": "50Gi", "cpu": "5Gi"}  # of a node's own disk: logs, and what Ray spills
_TAINT = "nvidia.com/gpu"


def kubernetes_job(typed: Sequence[str], config_dir: str | None = None) -> str:
    """Write the manifest of the run that the arguments `typed` describe, with options `job.KEY=VALUE` among them
    (`KubernetesOptions`). Raises ConfigError."""
    run = plan_job(KubernetesOptions, typed, config_dir, lambda o: f"{o.mount}/runs/{o.name}")
    within(run.config, run.options.mount)
    names = ("claim.yaml", "rayjob.yaml", "protection.yaml")
    parts = [(TEMPLATES / name).read_text() for name in names if name != "claim.yaml" or run.options.storage]
    values = _values(run)
    return fill(_title(run), values) + "---\n".join(fill(part, values) for part in parts)


def _title(run: PlannedRun) -> str:
    size = run.size
    what = f"{size.workers} GPUs" if size.device == "cuda" else f"{size.workers} workers on CPUs"
    nodes = f"{size.least} to {size.most} nodes" if size.least < size.most else f"{size.most} node"
    return (TEMPLATES / "title.txt").read_text().replace("@{nodes}", f"{nodes} of {what}")


def _values(run: PlannedRun) -> dict[str, str | None]:
    """Return what the places of the templates hold, each as YAML on one line; None for what this job does not have."""
    o, size, gpu = run.options, run.size, run.size.device == "cuda"
    grace = max(120, size.margin + 60)
    seconds = job_seconds(o.time) if o.time else None
    found: dict[str, Any] = {
        "name": o.name,
        "image": o.image,
        "claim": o.claim,
        "mount": o.mount,
        "storage": o.storage or None,
        "storage_class": o.storage_class or None,
        "backoff": o.retries,
        "deadline": None if seconds is None else seconds + _WAITING + grace,
        "waiting": _WAITING,
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
        "select": dict(pair.split("=", 1) for pair in o.select) or None,
        "tolerate": [_toleration(pair) for pair in ([_TAINT] if gpu else []) + o.tolerate] or None,
    }
    limit = [f"--time-limit={seconds}"] if seconds is not None else []
    told = [f"--retries={o.retries}", f"--notice={grace}", *limit]
    command = ["python", "-m", "platform.jobs", "supervise", *told, *run.arguments]
    plain = {"command": run.command, "entrypoint": folded(command), "secrets": _secrets(o.secrets)}
    return {**{name: None if value is None else _flow(value) for name, value in found.items()}, **plain}


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


def _toleration(taint: str) -> dict[str, str]:
    key, equals, value = taint.partition("=")
    return {"key": key, **({"operator": "Equal", "value": value} if equals else {"operator": "Exists"})}


def _ray_version() -> str:
    from importlib.metadata import version

    return version("ray")


def _flow(value: Any) -> str:
    """Return a plain value as YAML on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")

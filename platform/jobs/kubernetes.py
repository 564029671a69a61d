"""Manifest of a run for Kubernetes: a RayJob of KubeRay, or an Indexed Job for torchrun, with what protects it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import yaml

from platform.boundary.refusals import format_violation, refuse_all
from platform.config.groups import Monitor
from platform.jobs import planned_run
from platform.jobs.job_options import KubernetesOptions, parse_job_limit, split_and_check_job_options
from platform.jobs.planned_run import GIB, TEMPLATES, JobSize, PlannedRun, fill_template, fold_words, plan_job
from platform.monitor.sinks.sink_process import secrets_of_sinks
from platform.plan.layout import format_count

_HEAD = {"cuda": {"cpu": "8", "memory": "32Gi"}, "cpu": {"cpu": "1", "memory": "4Gi"}}
_DISK = {"cuda": "50Gi", "cpu": "5Gi"}  # of a node's own disk: logs, and what Ray spills
_TAINT = "nvidia.com/gpu"
_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"  # where Kueue places pods, it places by this
_SCRAPED = {"prometheus.io/scrape": "true", "prometheus.io/port": "8080", "prometheus.io/path": "/metrics"}
_KINDS = {  # launcher -> how a job's title names its kind, and its templates
    "ray": ("A RayJob for KubeRay 1.6 or newer, and Kubernetes 1.29", ("rayjob.yaml", "protection.yaml")),
    "torchrun": ("An Indexed Job for Kubernetes 1.27 or newer", ("indexed_job.yaml",)),
}
# texts that Kubernetes' parser takes for a truth or a number, or that end within a list or a map on one line
_OTHERWISE = re.compile(r"[yYnN]|[-+]?\.?\d[\d_]*(\.[\d_]*)?([eE][-+]?\d+)?|0[oOxXbB]\w+|.*[][{},].*", re.DOTALL)
_OWN = "/etc/elastic-platform"  # where pods see the user's own files
_PARTS = ("workers", "head", "submitter", "own")  # what has a name of its own beside the job's
_OF_RAY = ("head_select", "head_tolerate", "wait")  # options that an Indexed Job, which has no head, does not read


class _Writer(yaml.SafeDumper):
    """Writer of a manifest's YAML: a text that Kubernetes' parser reads otherwise, alone or in a list, is quoted."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Return a text of a manifest as a node of YAML."""
        return self.represent_scalar("tag:yaml.org,2002:str", text, "'" if _OTHERWISE.fullmatch(text) else None)


_Writer.add_representer(str, _Writer.represent_text)


def render_kubernetes_job(typed: Sequence[str], config_dir: str | None = None) -> str:
    """Write the manifest of a run from arguments and options job.KEY=VALUE (KubernetesOptions). Raises ConfigError."""
    run = plan_job(KubernetesOptions, typed, config_dir, lambda o: f"{o.mount}/runs/{o.name}")
    planned_run.refuse_outside_paths(run, run.options.mount)
    _refuse_torchrun_options(run)
    files = planned_run.read_own_files(run, config_dir)
    if config_dir:
        run = replace(run, arguments=["--config-dir", f"{_OWN}/conf", *run.arguments[2:]])
    values = _template_values(run) | _own_file_values(files)
    names = [*_KINDS[run.options.launcher][1], *(["own_files.yaml"] if files else [])]
    parts = [fill_template((TEMPLATES / name).read_text(), values) for name in names]
    return fill_template((TEMPLATES / "title.txt").read_text(), values) + "---\n".join(parts)


def render_kubernetes_claim(typed: Sequence[str], config_dir: str | None = None) -> tuple[str, str, str] | None:
    """Write the claim that the arguments `typed`, which `render_kubernetes_job` takes, ask for with job.storage; return
    the name of its file, its text and its size, None if they ask for none. It is no part of the job's own file: what
    deletes a job must not delete its checkpoints."""
    o, _, _ = split_and_check_job_options(KubernetesOptions, typed)
    if not o.storage:
        return None
    command = planned_run.quote_typed_words([*(["--config-dir", config_dir] if config_dir else []), *typed])
    text = fill_template((TEMPLATES / "claim.yaml").read_text(), {**_format_values(vars(o)), "command": command})
    return f"claim-{o.claim}.yaml", text, o.storage


def _refuse_torchrun_options(run: PlannedRun) -> None:
    """Raise ConfigError if a job whose workers torchrun starts has options of Ray's head, workers beyond the plan's, or
    nodes with different numbers of workers."""
    o, elastic = run.options, run.config.elastic
    if o.launcher == "ray":
        return
    lines = []
    for name in _OF_RAY:
        if value := getattr(o, name):
            default = f"job.{name}={'' if name == 'wait' else '[]'}"
            lines.append(format_violation(f"job.{name}", value, "is for job.launcher=ray", [default]))
    world, node_workers = run.world, run.size.workers
    if elastic.spares:
        why = "torchrun starts the plan's workers and no others"
        lines.append(format_violation("elastic.spares", elastic.spares, why, [0]))
    if elastic.max_workers > world:
        why = "torchrun starts no more"
        lines.append(format_violation("elastic.max_workers", elastic.max_workers, why, [world, 0]))
    if world % node_workers:
        legal = [n for n in range(node_workers, 0, -1) if world % n == 0]
        why = f"torchrun starts as many on each node, {world} in all"
        lines.append(format_violation("job.workers", node_workers, why, legal[:1]))
    refuse_all(lines)


def _describe_nodes(run: PlannedRun) -> str:
    """Return in words how many nodes a Kubernetes job has, and how many GPUs or workers each of them."""
    size = run.size
    unit, suffix = ("GPU", "") if size.device == "cuda" else ("worker", " on CPUs")
    node_content = format_count(size.workers, unit) + suffix
    can_start_smaller = size.least < size.total_nodes and run.options.launcher == "ray"
    nodes = f"{size.least} to {size.total_nodes} nodes" if can_start_smaller else format_count(size.total_nodes, "node")
    return f"{nodes} of {node_content}"


def _template_values(run: PlannedRun) -> dict[str, str | None]:
    """Return template place -> YAML on one line for the manifest of a Kubernetes job; None for a place that this job
    does not have."""
    o, size, gpu = run.options, run.size, run.size.device == "cuda"
    grace = max(120, size.margin + 60)
    seconds, waiting = (parse_job_limit(text) if text else None for text in (o.time, o.wait))
    job_values: dict[str, Any] = {
        "run_dir": _find_run_dir(run),
        "deadline": None if seconds is None or waiting is None else seconds + waiting + grace,
        "waiting": waiting,
        "ray": version("ray"),
        "grace": grace,
        "drain": str(max(60, size.margin)),
        "interface": o.interface if gpu else None,
        "head": {**_HEAD[size.device], "ephemeral-storage": _DISK[size.device]},
        "worker": _worker_resources(size),
        **{f"name_{part}": f"{o.name}-{part}" for part in _PARTS},
        "least": size.least,
        "most": size.total_nodes,
        "elastic": size.least < size.total_nodes,
        "shm": f"{size.shm // GIB}Gi",
        "pull_secrets": [{"name": name} for name in o.pull_secrets],
        "marks": {**(_SCRAPED if o.launcher == "ray" else {}), **({_TOPOLOGY: o.topology} if o.topology else {})},
        "pod_losses": (o.retries + 1) * size.total_nodes,
        "head_select": _parse_labels(o.head_select),
        "head_tolerate": [_parse_toleration(pair) for pair in o.head_tolerate],
        "select": _parse_labels(o.select),
        "tolerate": [_parse_toleration(pair) for pair in ([_TAINT] if gpu else []) + o.tolerate],
    }
    limit = [f"--time-limit={seconds}"] if seconds is not None else []
    options = [f"--retries={o.retries}", f"--notice={grace}", *limit]
    command = ["python", "-m", "platform.jobs", "supervise", *options, *run.arguments]
    variables = [_secret_variable(text) for text in o.secrets]
    sink_variables = _service_variables(run.config.monitor, {variable["name"] for variable in variables})
    return {
        **_format_values({**vars(o), **job_values}),
        "kind": _KINDS[o.launcher][0],
        "nodes": _describe_nodes(run),
        "command": run.command,
        "entrypoint": fold_words(command),
        "secrets": _format_list(variables) if variables else None,
        "secrets_of_run": _format_list([*variables, *sink_variables]) if variables or sink_variables else None,
        "arguments": _format_list(_list_pod_arguments(run, limit)),
    }


def _own_file_values(files: Mapping[str, str]) -> dict[str, str | None]:
    """Return template place -> YAML for what pods of a Kubernetes job see of the user's own files, by their places."""
    texts = yaml.dump({str(number): text for number, text in enumerate(files.values())}, default_style="|")
    values = {
        "own_files": [{"key": str(number), "path": place} for number, place in enumerate(files)],
        "own_path": _OWN if files else None,
        "own_modules": f"{_OWN}/modules" if any(place.startswith("modules/") for place in files) else None,
    }
    return {**_format_values(values), "own_texts": texts.removesuffix("\n")}


def _list_pod_arguments(run: PlannedRun, limit: list[str]) -> list[str]:
    """Return the arguments of `platform.jobs pod` in every pod, as Kubernetes reads them: $(NAME) is a variable, and $$
    a $."""
    o, size = run.options, run.size
    pod_arguments = [
        f"{_double_dollars(_find_run_dir(run))}/pods/$(JOB_UID)",  # of this Job: one that is made again has another
        "--index=$(JOB_COMPLETION_INDEX)",
        *(f"--pods={size.total_nodes}", f"--workers={size.workers}"),
        *(f"--first={o.name}-0.{o.name}", "--address=$(POD_IP)", f"--drain={max(60, size.margin)}"),
        *(f"--retries={o.retries}", *limit, "--run"),
    ]
    return [*pod_arguments, *map(_double_dollars, run.arguments)]


def _find_run_dir(run: PlannedRun) -> str:
    """Return the run directory of a Kubernetes job, as the last argument run.dir=PATH of its run names it."""
    typed = next(word.partition("=")[2] for word in reversed(run.arguments) if word.startswith("run.dir="))
    return typed.strip("'\"")


def _double_dollars(word: str) -> str:
    """Return an argument of a pod with each $ doubled, so that Kubernetes expands no variable in it."""
    return word.replace("$", "$$")


def _worker_resources(size: JobSize) -> dict[str, str]:
    """Return a worker pod's requests, which are its limits too."""
    gpus = {"nvidia.com/gpu": str(size.workers)} if size.device == "cuda" else {}
    requests = {"cpu": str(size.cpus), "memory": f"{size.memory // GIB}Gi", "ephemeral-storage": _DISK[size.device]}
    return {**requests, **gpus}


def _secret_variable(text: str) -> dict[str, Any]:
    """Return the environment variable that comes from a Secret, typed as NAME=SECRET/KEY."""
    name, _, secret_place = text.partition("=")
    secret, _, key = secret_place.partition("/")
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _service_variables(monitor: Monitor, named: Collection[str]) -> list[dict[str, Any]]:
    """Return a manifest's variables with address and token of services, but for `named` ones, each from a Secret."""
    unnamed = [secret for secret in secrets_of_sinks(monitor) if secret[0] not in named]
    refs = {variable: {"name": service, "key": key, "optional": True} for variable, service, key in unnamed}
    return [{"name": variable, "valueFrom": {"secretKeyRef": ref}} for variable, ref in refs.items()]


def _parse_labels(pairs: Sequence[str]) -> dict[str, str]:
    """Return the node labels of a Kubernetes job, typed as KEY=VALUE, as a mapping."""
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs)}


def _parse_toleration(taint: str) -> dict[str, str]:
    """Return the Kubernetes toleration of a node's taint, typed as KEY or KEY=VALUE."""
    key, equals, value = taint.partition("=")
    return {"key": key, **({"operator": "Equal", "value": value} if equals else {"operator": "Exists"})}


def _format_values(values: Mapping[str, Any]) -> dict[str, str | None]:
    """Return values of a Kubernetes manifest by name as YAML on one line; None in place of an empty one."""
    return {name: None if value in (None, "", [], {}) else _format_value(value) for name, value in values.items()}


def _format_list(values: Sequence[Any]) -> str:
    """Format a list in a Kubernetes manifest as YAML, each value on a line of its own."""
    return "\n".join(f"- {_format_value(value)}" for value in values)


def _format_value(value: Any) -> str:
    """Format a plain value in a Kubernetes manifest as YAML on one line, which may be within a map or a list."""
    text: str = yaml.dump(value, Dumper=_Writer, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")

"""Options of a job, typed as `job.KEY=VALUE` beside a run's own arguments: what a plan does not say of its cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass, fields
from typing import Any, TypeVar, get_type_hints

from platform.boundary.refusals import closest_values, format_value, format_violation, refuse_all
from platform.config.fields import violations_of_value
from platform.config.key import WORKERS, describe_type, key

PREFIX = "job."
_NAMED = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
# Bounds of options.
_PAIRS: Any = {"pattern": r"[^\s=]+=[^\s=]*", "constraint": "must be KEY=VALUE"}
_TAINTS: Any = {"pattern": r"[^\s=]+(=[^\s=]*)?", "constraint": "must be KEY or KEY=VALUE"}
_CLAIM: Any = {"pattern": rf"({_NAMED})?", "constraint": "must be the name of a PersistentVolumeClaim"}
_SIZE: Any = {"pattern": r"([1-9]\d*[GTP]i)?", "constraint": "must be a size, such as 50Ti"}
_LABEL: Any = {"pattern": r"([\w.-]+/)?[\w.-]+|", "constraint": "must be the key of a label"}
_SECRET: Any = {"pattern": _NAMED, "constraint": "must be the name of a Secret"}
_ACCOUNT: Any = {"pattern": rf"({_NAMED})?", "constraint": "must be the name of a ServiceAccount"}
_OF_SECRETS: Any = {"pattern": r"[A-Za-z_]\w*=[a-z0-9][-a-z0-9.]*/[-\w.]+", "constraint": "must be NAME=SECRET/KEY"}
_OF_FILES: Any = {"pattern": r"[A-Za-z_]\w*=~?/[^\s\"$`\\]+", "constraint": "must be NAME=/FILE or NAME=~/FILE"}
_INTERFACE: Any = {"pattern": r"[^\s/]{0,15}", "constraint": "is no name"}
Options = TypeVar("Options", bound="JobOptions")


@dataclass(frozen=True)
class JobOptions:
    """Options of any job."""

    name: str = key(
        "",
        'name of job and run directory; "" = that of the experiment',
        pattern=r"([a-z]([-a-z0-9]{0,38}[a-z0-9])?)?",
        constraint="must be 1 to 40 of a-z, 0-9 and -, a letter first",
    )
    workers: int = key(0, "workers of a node, and its GPUs; 0 = 8, or as many as the plan has", ">= 0", most=1024)
    nodes: int = key(0, "nodes, where parallel.data=-1 leaves their number open", ">= 0", most=WORKERS)
    cpus: int = key(0, "CPUs of a node; 0 = 8 for each GPU, 1 for each worker without", ">= 0", most=4096)
    memory: int = key(0, "GiB of host memory of a node; 0 = what the plan needs there", ">= 0", most=10**5)
    time: str = key("", 'time limit, before which the run saves and stops; "" = none', constraint="must be H:MM:SS")
    retries: int = key(10, "lost drivers after which the job ends", ">= 0", most=10**4)


@dataclass(frozen=True)
class KubernetesOptions(JobOptions):
    """Options of a job on Kubernetes."""

    launcher: str = key(
        "ray",
        "what starts the workers: ray, in a RayJob of KubeRay, or torchrun, in an Indexed Job without Ray",
        ("ray", "torchrun"),
    )
    image: str = key("", "image of all containers; must be given")
    claim: str = key("", "ReadWriteMany claim that all pods mount; must be given", **_CLAIM)
    mount: str = key("/shared", "where the claim is mounted", pattern=r"(/[\w.-]+)+", constraint="must be /PATH")
    storage: str = key(
        "", 'write the claim too, of this size, to claim-NAME.yaml beside --output; "" = it is there', **_SIZE
    )
    storage_class: str = key("", 'storage class of a claim that is made; "" = the cluster\'s default')
    user: int = key(1000, "user and group id of all processes, and group of the claim's files", ">= 1", most=2**31 - 1)
    wait: str = key("", 'time to wait for the first nodes, a retry each; "" = for ever', constraint="must be H:MM:SS")
    interface: str = key("eth0", "network interface of NCCL and gloo", pattern=r"[^\s/]{1,15}", constraint="is no name")
    priority: str = key("", 'priority class; "" = none')
    select: list[str] = key([], "labels of the workers' nodes, KEY=VALUE", **_PAIRS)
    head_select: list[str] = key([], "labels of the head's node, KEY=VALUE; not a spot node's", **_PAIRS)
    topology: str = key(
        "", 'label of nodes, such as a rack\'s, of which workers prefer to have one value; "" = none', **_LABEL
    )
    pull_secrets: list[str] = key([], "Secrets by which the image is pulled", **_SECRET)
    service_account: str = key(
        "", 'service account of all pods; "" = the default one, and KubeRay\'s own for the autoscaler', **_ACCOUNT
    )
    owner: str = key(
        "",
        'uid of the job, once it is there: what protects it is deleted with it; "" = by kubectl delete -f',
        pattern=r"[0-9a-f-]{0,36}",
        constraint="must be what kubectl get rayjob (or job) NAME -o jsonpath={.metadata.uid} says",
    )
    secrets: list[str] = key([], "environment variables from Secrets, NAME=SECRET/KEY", **_OF_SECRETS)
    tolerate: list[str] = key([], "taints of the workers' nodes beside nvidia.com/gpu, KEY or KEY=VALUE", **_TAINTS)
    head_tolerate: list[str] = key([], "taints of the head's node, KEY or KEY=VALUE", **_TAINTS)


@dataclass(frozen=True)
class SlurmOptions(JobOptions):
    """Options of a job on Slurm."""

    partition: str = key("", 'partition; "" = the default one')
    account: str = key("", 'account; "" = the default one')
    gpu_type: str = key(
        "", 'type of GPU, as Slurm names it, such as h100; "" = any', pattern=r"[\w.-]*", constraint="is no name"
    )
    request: str = key("gpus-per-node", "option that asks for GPUs", ("gpus-per-node", "gres"))
    shared: bool = key(False, "nodes may run other jobs beside this one")
    setup: str = key("", "shell command that finds Python, such as source .venv/bin/activate")
    runtime: str = key("", 'containers; "" = none', ("", "pyxis", "apptainer"))
    image: str = key("", "image of the containers: a .sqsh file or URL for pyxis, a .sif file for apptainer")
    mounts: list[str] = key([], "paths that containers see, beside the working directory: PATH or PATH:PATH")
    interface: str = key(
        "", 'network interface of Ray, NCCL and gloo; "" = the one that leads to the other nodes', **_INTERFACE
    )
    ip: int = key(4, "version of IP", (4, 6))
    secrets: list[str] = key([], "environment variables from files that only you can read, NAME=FILE", **_OF_FILES)
    options: list[str] = key(
        [], "further options of sbatch, such as --qos=long", pattern=r"--\S+", constraint="must be --OPTION"
    )


def split_and_check_job_options(kind: type[Options], arguments: Sequence[str]) -> tuple[Options, list[str], list[str]]:
    """Take the options of a job out of the arguments of a command; return them, the other arguments, and one refusal
    line per mistake in the options."""
    known: dict[str, Field[Any]] = {f"{PREFIX}{f.name}": f for f in fields(kind)}
    hints = get_type_hints(kind)
    option_values: dict[str, Any] = {}
    lines, other_arguments = [], []
    for argument in arguments:
        name, equals, text = argument.lstrip("+").partition("=")
        if not name.startswith(PREFIX):
            other_arguments.append(argument)
        elif not equals or name not in known:
            near = closest_values(name.removeprefix(PREFIX), hints)[:3]
            lines.append(format_violation(name, text, "unknown key", [f"{PREFIX}{one}" for one in near]))
        else:
            field = known[name]
            try:
                option_values[field.name] = _parse_option(text, hints[field.name])
            except ValueError:
                constraint = f"must be {describe_type(hints[field.name])}"
                lines.append(format_violation(name, text, constraint, [field.default]))
    for name, value in option_values.items():
        lines += _violations_of_option(known[f"{PREFIX}{name}"], value)
    return kind(**(option_values if not lines else {})), other_arguments, lines


def _parse_option(text: str, kind: Any) -> Any:
    """Parse the typed value of a job's option, of type `kind`. Raises ValueError for an illegal one."""
    if kind is bool:
        return {"true": True, "false": False}[text] if text in ("true", "false") else int("")
    if kind is int:
        return int(text)
    if kind is str:
        return "" if text in ("''", '""') else text  # as a key of a run is written, and as hints name it
    inner = text[1:-1] if re.fullmatch(r"\[.*\]", text) else text
    return [part.strip() for part in inner.split(",") if part.strip()]


def _violations_of_option(field: Field[Any], value: Any) -> Iterator[str]:
    """Yield a refusal line per mistake in the value of one option of a job."""
    yield from violations_of_value(f"{PREFIX}{field.name}", value, field.metadata["key"])
    if field.name in ("time", "wait") and value:
        try:
            parse_job_limit(value)
        except ValueError:
            yield format_violation(f"{PREFIX}{field.name}", value, "must be H:MM:SS or D-HH:MM:SS", ["48:00:00"])


def refuse_missing_options(needed: dict[str, str]) -> None:
    """Raise ConfigError, with a line for each, if keys that must be given are not. `needed`: key -> its value, "" for
    none."""
    example = {
        "data.path": "data=text data.path=/shared/corpus",
        "checkpoint.url": "checkpoint.url=/shared/checkpoints/NAME",
        "job.image": "job.image=REGISTRY/NAME:TAG",
        "job.claim": "job.claim=NAME",
    }
    missing = [name for name, value in needed.items() if not value]
    refuse_all(format_violation(n, "", "must be given", [example.get(n, f"{n}=2")]) for n in missing)


def list_option_rows(kind: type[JobOptions]) -> Iterator[str]:
    """Yield the rows of a table of a job's own options for a page: key, default and meaning."""
    shared = {f.name for f in fields(JobOptions)}
    for f in fields(kind):
        if kind is JobOptions or f.name not in shared:
            default = f.default_factory() if callable(f.default_factory) else f.default
            legal = f.metadata["key"].choices
            one_of = f" ({', '.join(str(c) or chr(34) * 2 for c in legal)})" if legal else ""
            cell = f"`{format_value(default)}`" if default != "" else ""
            yield f"| `{PREFIX}{f.name}` | {cell} | {f.metadata['key'].guidance}{one_of} |"


def parse_job_limit(limit: str) -> int:
    """Parse the time limit of a job's options, as Slurm does, into seconds: MINUTES, M:SS, H:MM:SS, D-HH, D-HH:MM or
    D-HH:MM:SS. Raises ValueError for any other form."""
    if not re.fullmatch(r"([0-9]{1,6}-[0-9]{1,6}(:[0-9]{1,6}){0,2})|([0-9]{1,6}(:[0-9]{1,6}){0,2})", limit):
        raise ValueError(limit)
    days, dash, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(n * unit for n, unit in zip(parts, units, strict=False))

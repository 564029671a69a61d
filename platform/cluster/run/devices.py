"""Memory of a worker's device, as far as the driver can know it before any worker starts, and a plan for it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path

from platform.boundary.refusals import ConfigError
from platform.cluster.crew.base.job import gpu_count
from platform.cluster.run import resources
from platform.cluster.run.commands import Command
from platform.cluster.run.resources import Places, available_workers, crew_kind, device_there
from platform.config.fields import Config
from platform.config.groups.execution_group import AUTO
from platform.config.rules.left_open import OPEN
from platform.plan.core.plan import Plan
from platform.plan.language.numbers import count_of
from platform.plan.memory.hardware import memory_of
from platform.planning.memory_budget import device_kind
from platform.planning.search.remedies import Device, lack_of_memory

_QUERY = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
_SECONDS = 10.0  # for it to answer
_LIMIT = Path("/sys/fs/cgroup/memory.max")  # memory limit of the container, if this is one


def device_of(config: Config, kind: str, workers: int) -> Device | None:
    """Return the name and memory of the device that each of `workers` workers gets, as far as it is known before any
    starts: from cluster.device_memory, the GPUs of this machine or cluster, cluster.gpu, or the workers' share of host
    memory. None if unknown. `kind`: cpu | cuda."""
    c = config.cluster
    if c.device_memory:
        return Device(c.device_memory * 1e9, f"cluster.device_memory={c.device_memory:g}: it")
    if kind == "cuda":
        return _seen() or _labelled(config) or _named(c.gpu)
    if crew_kind(c) in ("inline", "local", "processes"):
        return Device(machine_memory() / workers, f"its share of this machine, 1/{workers},")
    return None


def _seen() -> Device | None:
    """Return the GPU of this machine that has the least memory, for the run's workers; None if there is no GPU. CUDA is
    not started in this process, which would keep a context on a GPU for the whole run."""
    if not gpu_count():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # by number or UUID, as the command takes them
    query = [*_QUERY, *([f"--id={visible}"] if visible else [])]
    try:
        shown = subprocess.run(query, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [line.rpartition(",") for line in shown.splitlines()]
    found = [Device(int(mebibytes) * 2**20, name.strip()) for name, _, mebibytes in rows if mebibytes.strip().isdigit()]
    return min(found, key=lambda device: device.memory, default=None)


def _labelled(config: Config) -> Device | None:
    """Return the accelerator model with the least memory among the labels of the Ray cluster's nodes; None if the
    workers are not started by Ray, or no label is known."""
    if crew_kind(config.cluster) != "ray":
        return None
    from platform.cluster.crew.launchers import ray_session

    ray_session.join_cluster(config.cluster)
    found = [device for name in ray_session.accelerators() if (device := _named(name))]
    return min(found, key=lambda device: device.memory, default=None)


def _named(gpu: str) -> Device | None:
    """Return the accelerator of this model name, e.g. "H100", as a worker's device; None for an unknown model."""
    memory = memory_of(gpu)
    return Device(memory, f"{gpu}") if memory else None


def machine_memory() -> int:
    """Return the bytes of memory that this machine's workers share, or its container's limit if that is lower."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        limit = min(limit, int(_LIMIT.read_text()))
    return limit


def settle_here(config: Config, say: Callable[[str], None]) -> None:
    """Choose the open keys of a run's configuration, in place, for the workers and the memory that are there; print the
    choice or, with plan.top, the best plans."""
    if not config.plan.search:
        return
    from platform.planning.search.chosen import choice_line, choose_plan, ranked_table
    from platform.planning.step_price import usual_hardware

    workers, kind = available_workers(config.cluster), device_there(config.cluster)
    device = device_of(config, kind, max(workers, 1))
    gpu = device.name if device and kind == "cuda" else ""
    found = choose_plan(config, workers, device.memory if device else 0.0, usual_hardware(config, gpu))
    assert found, "a key is open"
    for line in ranked_table(found, config.plan.top) if config.plan.top else [choice_line(found)]:
        say(line)


def settle_rhythms_here(config: Config, plan: Plan, say: Callable[[str], None]) -> None:
    """Settle elastic.snapshot_every=auto and checkpoint.every=auto of a run's configuration, in place, by what its
    directory shows of their costs, else by the plan; print the reasons."""
    if AUTO not in (config.elastic.snapshot_every, config.checkpoint.every):
        return
    from platform.planning.snapshot_price import NODE, Known, own_costs, settle_rhythms
    from platform.planning.step_price import hardware_of_device

    size, kind = plan.mesh.size, device_there(config.cluster)
    device = device_of(config, kind, size)
    hardware = hardware_of_device(config, kind, device.name if device and kind == "cuda" else config.cluster.gpu)
    known = Known(kind, hardware, own_costs(Path(config.run.dir), size))
    for line in settle_rhythms(config, plan, NODE if resources.spans_machines(config.cluster) else size, known):
        say(line)


def reserve_or_suggest(config: Config, command: Command, size: int, say: Callable[[str], None], **more: int) -> Places:
    """Find room as `reserve_workers` does; a refusal for want of GPUs ends with the best plan, as a `command`."""
    try:
        return resources.reserve_workers(config.cluster, size, say, **more)
    except resources.TooFewGpus as error:
        *lines, last = error.violations
        workers = available_workers(config.cluster)
        device = device_of(config, "cuda", workers) if workers > 0 else None
        raise ConfigError([*lines, last + (_best_plan(config, command, workers, device) if device else "")]) from None


def refuse_lack_of_memory(config: Config, plan: Plan, device: Device, command: Command) -> None:
    """Refuse a plan that a device has no memory for, with the `command` of the best plan for as many workers."""
    if line := lack_of_memory(config, plan, device):
        raise ConfigError(line + _best_plan(config, command, plan.mesh.size, device))


def _best_plan(config: Config, command: Command, workers: int, device: Device) -> str:
    """Return the end of a refusal: the command of the best plan for so many workers, "" if none fits."""
    from platform.planning.search.chosen import choose_plan
    from platform.planning.step_price import usual_hardware

    other = deepcopy(config)
    other.plan.search = [
        key for key in OPEN if key not in ("parallel.context", "tensor" if config.tensor.layout else "")
    ]
    with suppress(ConfigError):
        if (found := choose_plan(other, workers, device.memory, usual_hardware(config, device.name))) and found.best:
            typed = found.space.typed(found.best.choice)
            kind = "GPU" if device_kind(config) == "cuda" else "worker"
            return f"; the best plan for {count_of(workers, kind)}: {command.with_values(typed)}"
    return ""

"""Resources for a run's workers: on which device they run, how many of them there is room for, and a plan for the
memory of their devices, as far as the driver can know it before any worker starts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, NamedTuple

from platform.boundary.refusals import ConfigError, format_violation
from platform.boundary.terminal import Say, show_phase
from platform.cluster.crew import torchrun
from platform.cluster.crew.failures import NoPlaces, NotThere
from platform.cluster.crew.job import gpu_count, usable_cores
from platform.cluster.crew.switchboard import lack_of_files
from platform.cluster.run_directory import find_last_step
from platform.cluster.shown_commands import Command
from platform.config.fields import Config
from platform.config.groups import AUTO, Cluster
from platform.config.layout_rules import OPEN_KEYS
from platform.plan.accelerators import nominal_memory
from platform.plan.layout import format_count
from platform.plan.plan import Plan
from platform.predict.memory_budget import device_kind
from platform.predict.remedies import Device, violation_of_memory

if TYPE_CHECKING:
    from platform.cluster.crew.ray_process import RayProcess

_JOIN_SECONDS = 60.0  # for Ray to let this process join a cluster that answers, or to list its resources
_CROWDED = 4  # workers per core


class TooFewGpus(NotThere):
    """Refusal of a run that needs more GPUs than there are."""


@dataclass(frozen=True)
class Supply:
    """GPUs and CPUs that are free for workers, on this machine or in the Ray cluster (`where`, for messages). `cpus`
    limits the number of workers only if `shared` (Ray); elsewhere workers share the cores."""

    gpus: int
    cpus: int
    where: str
    shared: bool = False


class Places(NamedTuple):
    """Device and number of the workers that a run can have.

    Attributes:
        members: how many to start now, ranks and spares.
        limit: how many there can ever be; inf where the cluster may get more room.
    """

    device: str  # cpu | cuda
    members: int
    limit: float


def launcher_kind(cluster: Cluster) -> str:
    """Return by what a run's driver gets its workers: torchrun if it started this process, else `cluster.kind`."""
    return "torchrun" if torchrun.is_under_torchrun() else cluster.kind


def spans_machines(cluster: Cluster) -> bool:
    """Return True if a run's driver may get workers on other machines than its own."""
    kind = launcher_kind(cluster)
    return kind == "ray" or (kind == "torchrun" and os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"])


def count_available_workers(cluster: Cluster) -> int:
    """Return how many workers the cluster has room for, from which `parallel.data=-1` is settled: one per GPU if GPUs
    may be used, else one per core; under torchrun as many as it started."""
    kind = launcher_kind(cluster)
    if kind == "inline":
        return 1
    if kind == "torchrun":
        return int(os.environ["WORLD_SIZE"])
    supply = _measure_supply(kind, cluster)
    return supply.gpus if _uses_gpus(cluster, supply) else supply.cpus


def find_device_kind(cluster: Cluster) -> str:
    """Return the kind of device, cpu | cuda, that `count_available_workers` counts."""
    return "cuda" if _uses_gpus(cluster, _measure_supply(launcher_kind(cluster), cluster)) else "cpu"


def join_ray(cluster: Cluster, deadline: float | None = None) -> RayProcess:
    """Join, for a run's driver, the Ray cluster that is to have room for workers, in the process beside this one, and
    return that; wait for the cluster's head until `deadline`, by default for cluster.wait seconds. Raises ConfigError,
    as NotThere if there is no cluster and cluster.wait is 0; NoPlaces if there still is none after the wait."""
    from platform.cluster.crew.ray_process import close_ray_process, find_silence, share_ray_process
    from platform.cluster.crew.ray_session import cluster_refusal

    address = os.environ.get("RAY_ADDRESS", "auto")
    deadline = monotonic() + cluster.wait if deadline is None else deadline
    with show_phase(f"joining Ray at {address}"):
        while True:
            try:
                if not share_ray_process().joined:
                    if silence := find_silence(address):
                        raise cluster_refusal(address, silence)
                    try:
                        share_ray_process().ask("join", cluster, seconds=_JOIN_SECONDS)
                    except NoPlaces as error:
                        raise cluster_refusal(address, str(error)) from None
                    share_ray_process().joined = True
                return share_ray_process()
            except NotThere as error:
                close_ray_process(polite=False)
                if monotonic() >= deadline and cluster.wait:
                    raise NoPlaces(f"waited {cluster.wait:g} s: {error}") from None
                if monotonic() >= deadline:
                    raise
            sleep(1.0)


@contextmanager
def expect_cluster(config: Config) -> Iterator[None]:
    """Raise NoPlaces where the block raises NotThere, if a run in a Ray cluster has done steps before: the cluster was
    there, so that it is no mistake of the user's that it is not there now."""
    try:
        yield
    except NotThere as error:
        if config.cluster.kind == "ray" and find_last_step(Path(config.run.dir)):
            raise NoPlaces(str(error)) from None
        raise


def _uses_gpus(cluster: Cluster, supply: Supply) -> bool:
    """Return True if workers get a GPU each where as many start as there is room for."""
    return cluster.device == "cuda" or (cluster.device == "auto" and supply.gpus > 0)


def await_worker_places(cluster: Cluster, world_size: int, say: Say, spares: int = 0, least: int = 0) -> Places:
    """Find room in the cluster for a run's `world_size` workers, or at least for `least` of them if that is not 0, and
    for its `spares`; print the chosen device.

    Spares are started if there is room now, and never waited for. Raises ConfigError if there is too little room, and
    NoPlaces if there is still too little after waiting `cluster.wait` seconds.
    """
    kind = launcher_kind(cluster)
    _refuse_impossible(kind, world_size, spares)
    needed = int(os.environ["LOCAL_WORLD_SIZE"]) if kind == "torchrun" else world_size  # the supply is of one machine
    least = needed if kind == "torchrun" else min(least or needed, needed)
    with _hold_ray_demand(kind, cluster, needed + spares):
        supply, device, lack = _await_supply(kind, cluster, needed, least, say)
    reason = f" ({format_count(supply.gpus, 'GPU')} {supply.where})" if cluster.device == "auto" else ""
    room = supply.gpus if device == "cuda" else supply.cpus if supply.shared else inf
    members = world_size + spares if kind == "torchrun" else int(min(needed + spares, room))
    if lack:
        say(f"{lack}: starts with {members}, as elastic.min_workers={least} allows, and grows")
    elif members < world_size + spares:
        spares_text = f"{members - world_size} of {format_count(spares, 'spare')}"
        say(f"{spares_text} find a place now ({supply.where}){'; the others are called for' if supply.shared else ''}")
    say(f"device: {device}{reason}")
    if device == "cpu" and not supply.shared and members > _CROWDED * supply.cpus:
        say(f"warning: {members} workers share {format_count(supply.cpus, 'core')}: this will be slow")
    return Places(device, members, inf if supply.shared else room)


@contextmanager
def _hold_ray_demand(kind: str, cluster: Cluster, count: int) -> Iterator[None]:
    """Ask Ray's autoscaler for `count` workers during the block, if cluster.autoscale says so; the demand outlives the
    block, for the crew to take it up, unless that raises."""
    if kind != "ray" or not cluster.autoscale:
        yield
        return
    from platform.cluster.crew.ray_actors import worker_bundle
    from platform.cluster.crew.ray_process import share_ray_process

    join_ray(cluster).ask("hold_demand", worker_bundle(cluster.device, cluster.labels), count)
    came = False
    try:
        yield
        came = True
    finally:
        share_ray_process().order("drop_demand", not came)


def _refuse_impossible(kind: str, world_size: int, spares: int) -> None:
    """Raise ConfigError for a number of workers and spares that a launcher of this kind can never start, however long
    the run waited, and for too low a limit on open files."""
    if kind == "inline" and world_size != 1:
        constraint = f"trains a world of one, and this plan has {format_count(world_size, 'worker')}"
        raise ConfigError("cluster", kind, constraint, ["cluster=processes", "cluster=local"])
    if kind == "torchrun" and world_size != (started := int(os.environ["WORLD_SIZE"])):
        needed_text = format_count(world_size, "worker")
        raise ConfigError(f"torchrun: this plan has {needed_text}, and torchrun has started {started}")
    if kind == "torchrun":
        torchrun.read_environment_key()
    if reason := lack_of_files(world_size + spares):
        raise ConfigError("cluster", kind, reason)
    if kind == "torchrun" and spares:
        raise ConfigError("elastic.spares", spares, "torchrun starts a process per worker and no others", [0])


def _await_supply(kind: str, cluster: Cluster, needed: int, least: int, say: Say) -> tuple[Supply, str, str]:
    """Wait until the cluster has room for `needed` workers, at most `cluster.wait` seconds. Return the free supply, the
    device (cpu | cuda) and, if there is room only for `least` or more, a message on the lack, else "". Raises as
    `await_worker_places`."""
    deadline, said = monotonic() + cluster.wait, ""
    while True:
        supply = _measure_supply(kind, cluster, deadline)
        device = _choose_device(cluster.device, needed, least, supply)
        lack = _describe_lack(device, needed, supply)
        if not lack:
            return supply, device, ""
        unit, available = ("GPU", supply.gpus) if device == "cuda" else ("CPU", supply.cpus)
        waiting = f"{format_count(needed, unit)}, {available} of {needed} there ({supply.where})"
        if monotonic() >= deadline:
            if not _describe_lack(device, least, supply):
                return supply, device, lack
            if cluster.wait:
                raise NoPlaces(f"waited {cluster.wait:g} s for {waiting}")
            raise TooFewGpus(lack) if device == "cuda" else NotThere(lack)
        if waiting != said:
            say(f"waiting for {waiting}, up to {cluster.wait:g} s")
            said = waiting
        sleep(min(1.0, max(0.0, deadline - monotonic())))


def _measure_supply(kind: str, cluster: Cluster, deadline: float | None = None) -> Supply:
    """Return the GPUs and CPUs that a launcher of this kind could use for workers now: free ones of the Ray cluster for
    "ray", on nodes with cluster.labels, else all of this machine."""
    if kind != "ray":
        return Supply(gpu_count(), usable_cores(), "on this machine")
    free = join_ray(cluster, deadline).ask("free_resources", cluster.labels, seconds=_JOIN_SECONDS)
    where = "free in the Ray cluster" + (" on nodes with cluster.labels" if cluster.labels else "")
    return Supply(int(free.get("GPU", 0)), int(free.get("CPU", 0)), where, shared=True)


def _choose_device(device: str, needed: int, least: int, supply: Supply) -> str:
    """Choose the workers' device, cpu | cuda: cluster.device; for "auto" cuda if the fewest workers get a GPU each."""
    if device == "auto":
        return "cuda" if supply.gpus >= min(needed, least) else "cpu"
    return device


def _describe_lack(device: str, world_size: int, supply: Supply) -> str:
    """Return a message on the GPUs or CPUs that `supply` lacks for `world_size` workers on a device; "" if none."""
    if device == "cuda" and supply.gpus < world_size:
        constraint = f"needs {format_count(world_size, 'GPU')}, {supply.gpus} there ({supply.where})"
        return format_violation("cluster.device", device, constraint, ["cpu"])
    if supply.shared and supply.cpus < world_size:
        constraint = f"needs {format_count(world_size, 'CPU')}, {supply.cpus} there ({supply.where})"
        return format_violation("cluster", "ray", constraint)
    return ""


_QUERY = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
_SECONDS = 10.0  # for it to answer
_LIMIT = Path("/sys/fs/cgroup/memory.max")  # memory limit of the container, if this is one


def find_worker_device(config: Config, kind: str, workers: int) -> Device | None:
    """Return the name and memory of the device that each of `workers` workers gets, as far as it is known before any
    starts: from cluster.device_memory, the GPUs of this machine or cluster, cluster.gpu, or the workers' share of host
    memory. None if unknown. `kind`: cpu | cuda."""
    c = config.cluster
    if c.device_memory:
        return Device(c.device_memory * 1e9, f"cluster.device_memory={c.device_memory:g}: it")
    if kind == "cuda":
        return _find_smallest_gpu() or _find_smallest_accelerator(config) or _look_up_accelerator(c.gpu)
    if launcher_kind(c) in ("inline", "local", "processes"):
        return Device(machine_memory() / workers, f"its share of this machine, 1/{workers},")
    return None


def _find_smallest_gpu() -> Device | None:
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
    sizes = ((name.strip(), mebibytes) for name, _, mebibytes in rows if mebibytes.strip().isdigit())
    devices = [Device(int(mebibytes) * 2**20, name) for name, mebibytes in sizes]
    return min(devices, key=lambda device: device.memory, default=None)


def _find_smallest_accelerator(config: Config) -> Device | None:
    """Return the accelerator model with the least memory among the labels of the Ray cluster's nodes; None if the
    workers are not started by Ray, or no label is known."""
    if launcher_kind(config.cluster) != "ray":
        return None
    names = join_ray(config.cluster).ask("list_accelerators", seconds=_JOIN_SECONDS)
    devices = [device for name in names if (device := _look_up_accelerator(name))]
    return min(devices, key=lambda device: device.memory, default=None)


def _look_up_accelerator(gpu: str) -> Device | None:
    """Return the accelerator that a cluster's node has, as a worker's device, by its label, "H100"; else None."""
    memory = nominal_memory(gpu)
    return Device(memory, f"{gpu}") if memory else None


def machine_memory() -> int:
    """Return the bytes of memory that this machine's workers share, or its container's limit if that is lower."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        limit = min(limit, int(_LIMIT.read_text()))
    return limit


def choose_auto_keys(config: Config, say: Say) -> None:
    """Choose the open keys of a run's configuration, in place, for the workers and the memory that are there; print the
    choice or, with plan.top, the best plans."""
    if not config.plan.search:
        return
    from platform.predict.search import choose_plan, format_choice, format_ranking
    from platform.predict.step_price import choose_pricing_hardware

    workers, kind = count_available_workers(config.cluster), find_device_kind(config.cluster)
    device = find_worker_device(config, kind, max(workers, 1))
    gpu = device.name if device and kind == "cuda" else ""
    plan_choice = choose_plan(config, workers, device.memory if device else 0.0, choose_pricing_hardware(config, gpu))
    assert plan_choice, "a key is open"
    for line in format_ranking(plan_choice, config.plan.top) if config.plan.top else [format_choice(plan_choice)]:
        say(line)


def settle_auto_intervals(config: Config, plan: Plan, say: Say) -> None:
    """Settle elastic.snapshot_every=auto and checkpoint.every=auto of a run's configuration, in place, by what its
    directory shows of their costs, else by the plan; print the reasons."""
    if AUTO not in (config.elastic.snapshot_every, config.checkpoint.every):
        return
    from platform.predict.recovery_price import NODE, Known, read_measured_costs, settle_intervals
    from platform.predict.step_price import hardware_of_device

    size, kind = plan.mesh.world_size, find_device_kind(config.cluster)
    device = find_worker_device(config, kind, size)
    hardware = hardware_of_device(config, kind, device.name if device and kind == "cuda" else config.cluster.gpu)
    known = Known(kind, hardware, read_measured_costs(Path(config.run.dir), size))
    for line in settle_intervals(config, plan, NODE if spans_machines(config.cluster) else size, known):
        say(line)


def reserve_or_suggest(config: Config, command: Command, size: int, say: Say, **more: int) -> Places:
    """Find room as `await_worker_places` does; a refusal for want of GPUs ends with the best plan, as a `command`."""
    try:
        with expect_cluster(config):
            return await_worker_places(config.cluster, size, say, **more)
    except TooFewGpus as error:
        *lines, last = error.violations
        gpus = _measure_supply(launcher_kind(config.cluster), config.cluster).gpus
        workers = min(count_available_workers(config.cluster), gpus)
        device = find_worker_device(config, "cuda", workers) if workers > 0 else None
        hint = _suggest_best_plan(config, command, workers, device) if device else ""
        raise ConfigError([*lines, last + hint]) from None


def refuse_lack_of_memory(config: Config, plan: Plan, device: Device, command: Command) -> None:
    """Refuse a plan that a device has no memory for, with the `command` of the best plan for as many workers."""
    if line := violation_of_memory(config, plan, device):
        raise ConfigError(line + _suggest_best_plan(config, command, plan.mesh.world_size, device))


def _suggest_best_plan(config: Config, command: Command, workers: int, device: Device) -> str:
    """Return the end of a driver's refusal: the command of the best plan for so many workers, "" if none fits."""
    from platform.predict.search import choose_plan
    from platform.predict.step_price import choose_pricing_hardware

    other = deepcopy(config)
    fixed = ("parallel.context", "tensor" if config.tensor.layout else "")
    other.plan.search = [key for key in OPEN_KEYS if key not in fixed]
    with suppress(ConfigError):
        plan_choice = choose_plan(other, workers, device.memory, choose_pricing_hardware(config, device.name))
        if plan_choice and plan_choice.quickest_fitting_finalist:
            typed = plan_choice.space.format_overrides(plan_choice.quickest_fitting_finalist.choice)
            kind = "GPU" if device_kind(config) == "cuda" else "worker"
            return f"; the best plan for {format_count(workers, kind)}: {command.format_with_overrides(typed)}"
    return ""

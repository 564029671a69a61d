"""Resources for a run's workers: on which device they run, and how many of them there is room for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from time import monotonic, sleep
from typing import NamedTuple

from platform.boundary.refusals import ConfigError, violation
from platform.cluster.crew.base.failures import NoPlaces
from platform.cluster.crew.base.job import gpu_count, usable_cores
from platform.cluster.crew.launchers import torchrun
from platform.cluster.wire.descriptors import lack_of_files
from platform.config.groups.execution_group import Cluster
from platform.plan.language.numbers import count_of

_CROWDED = 4  # workers per core


class TooFewGpus(ConfigError):
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


def crew_kind(cluster: Cluster) -> str:
    """Return the kind of launcher of the workers: torchrun if it started this process, else `cluster.kind`."""
    return "torchrun" if torchrun.present() else cluster.kind


def spans_machines(cluster: Cluster) -> bool:
    """Return True if the run's workers may run on other machines than this one."""
    kind = crew_kind(cluster)
    return kind == "ray" or (kind == "torchrun" and os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"])


def available_workers(cluster: Cluster) -> int:
    """Return how many workers the cluster has room for, from which `parallel.data=-1` is settled: one per GPU if GPUs
    may be used, else one per core; under torchrun as many as it started."""
    kind = crew_kind(cluster)
    if kind == "inline":
        return 1
    if kind == "torchrun":
        return int(os.environ["WORLD_SIZE"])
    supply = _supply(kind, cluster)
    return supply.gpus if _uses_gpus(cluster, supply) else supply.cpus


def device_there(cluster: Cluster) -> str:
    """Return the kind of device, cpu | cuda, that `available_workers` counts."""
    return "cuda" if _uses_gpus(cluster, _supply(crew_kind(cluster), cluster)) else "cpu"


def _uses_gpus(cluster: Cluster, supply: Supply) -> bool:
    """Return True if workers get a GPU each where as many start as there is room for."""
    return cluster.device == "cuda" or (cluster.device == "auto" and supply.gpus > 0)


def reserve_workers(
    cluster: Cluster, world_size: int, say: Callable[[str], None], spares: int = 0, least: int = 0
) -> Places:
    """Find room in the cluster for a run's `world_size` workers, or at least for `least` of them if that is not 0, and
    for its `spares`; print the chosen device.

    Spares are started if there is room now, and never waited for. Raises ConfigError if there is too little room, and
    NoPlaces if there is still too little after waiting `cluster.wait` seconds.
    """
    kind = crew_kind(cluster)
    _refuse_impossible(kind, world_size, spares)
    needed = int(os.environ["LOCAL_WORLD_SIZE"]) if kind == "torchrun" else world_size  # the supply is of one machine
    least = needed if kind == "torchrun" else min(least or needed, needed)
    with _asked_for(kind, cluster, needed + spares):
        supply, device, lack = _wait(kind, cluster, needed, least, say)
    reason = f" ({count_of(supply.gpus, 'GPU')} {supply.where})" if cluster.device == "auto" else ""
    room = supply.gpus if device == "cuda" else supply.cpus if supply.shared else inf
    members = world_size + spares if kind == "torchrun" else int(min(needed + spares, room))
    if lack:
        say(f"{lack}: starts with {members}, as elastic.min_workers={least} allows, and grows")
    elif members < world_size + spares:
        found = f"{members - world_size} of {count_of(spares, 'spare')}"
        say(f"{found} find a place now ({supply.where}){'; the others are called for' if supply.shared else ''}")
    say(f"device: {device}{reason}")
    if device == "cpu" and not supply.shared and members > _CROWDED * supply.cpus:
        say(f"warning: {members} workers share {count_of(supply.cpus, 'core')}: this will be slow")
    return Places(device, members, inf if supply.shared else room)


@contextmanager
def _asked_for(kind: str, cluster: Cluster, count: int) -> Iterator[None]:
    """Ask Ray's autoscaler for `count` workers during the block, if cluster.autoscale says so; the demand outlives the
    block, for the crew to take it up, unless that raises."""
    if kind != "ray" or not cluster.autoscale:
        yield
        return
    from platform.cluster.crew.launchers import ray_session
    from platform.cluster.crew.launchers.ray_demand import Demand, bundle_of

    ray_session.join_cluster(cluster)
    demand, came = Demand(bundle_of(cluster.device, cluster.labels), lambda: count), False
    try:
        yield
        came = True
    finally:
        demand.close(withdraw=not came)


def _refuse_impossible(kind: str, world_size: int, spares: int) -> None:
    """Raise ConfigError for a number of workers and spares that a launcher of this kind can never start, however long
    the run waited, and for too low a limit on open files."""
    if kind == "inline" and world_size != 1:
        constraint = f"trains a world of one, and this plan has {count_of(world_size, 'worker')}"
        raise ConfigError(violation("cluster", kind, constraint, ["cluster=processes", "cluster=local"]))
    if kind == "torchrun" and world_size != (started := int(os.environ["WORLD_SIZE"])):
        raise ConfigError(
            f"torchrun: this plan has {count_of(world_size, 'worker')}, and torchrun has started {started}"
        )
    if kind == "torchrun":
        torchrun.given_key()
    if reason := lack_of_files(world_size + spares):
        raise ConfigError(violation("cluster", kind, reason))
    if kind == "torchrun" and spares:
        raise ConfigError(
            violation("elastic.spares", spares, "torchrun starts a process per worker and no others", [0])
        )


def _wait(kind: str, cluster: Cluster, needed: int, least: int, say: Callable[[str], None]) -> tuple[Supply, str, str]:
    """Wait until the cluster has room for `needed` workers, at most `cluster.wait` seconds. Return the free supply, the
    device (cpu | cuda) and, if there is room only for `least` or more, a message on the lack, else "". Raises as
    `reserve_workers`."""
    deadline, said = monotonic() + cluster.wait, ""
    while True:
        supply = _supply(kind, cluster)
        device = _choose(cluster.device, needed, least, supply)
        lack = _lack(device, needed, supply)
        if not lack:
            return supply, device, ""
        what, there = ("GPU", supply.gpus) if device == "cuda" else ("CPU", supply.cpus)
        waiting = f"{count_of(needed, what)}, {there} of {needed} there ({supply.where})"
        if monotonic() >= deadline:
            if not _lack(device, least, supply):
                return supply, device, lack
            if cluster.wait:
                raise NoPlaces(f"waited {cluster.wait:g} s for {waiting}")
            raise TooFewGpus(lack) if device == "cuda" else ConfigError(lack)
        if waiting != said:
            say(f"waiting for {waiting}, up to {cluster.wait:g} s")
            said = waiting
        sleep(min(1.0, max(0.0, deadline - monotonic())))


def _supply(kind: str, cluster: Cluster) -> Supply:
    """Return the GPUs and CPUs that a launcher of this kind could use for workers now: free ones of the Ray cluster for
    "ray", on nodes with cluster.labels, else all of this machine."""
    if kind != "ray":
        return Supply(gpu_count(), usable_cores(), "on this machine")
    from platform.cluster.crew.launchers import ray_session

    ray_session.join_cluster(cluster)
    free = ray_session.free_resources(cluster.labels)
    where = "free in the Ray cluster" + (" on nodes with cluster.labels" if cluster.labels else "")
    return Supply(int(free.get("GPU", 0)), int(free.get("CPU", 0)), where, shared=True)


def _choose(device: str, needed: int, least: int, supply: Supply) -> str:
    """Choose the workers' device, cpu | cuda: cluster.device; for "auto" cuda if the fewest workers get a GPU each."""
    if device == "auto":
        return "cuda" if supply.gpus >= min(needed, least) else "cpu"
    return device


def _lack(device: str, world_size: int, supply: Supply) -> str:
    """Return a message on the GPUs or CPUs that `supply` lacks for `world_size` workers on a device; "" if none."""
    if device == "cuda" and supply.gpus < world_size:
        constraint = f"needs {count_of(world_size, 'GPU')}, {supply.gpus} there ({supply.where})"
        return violation("cluster.device", device, constraint, ["cpu"])
    if supply.shared and supply.cpus < world_size:
        constraint = f"needs {count_of(world_size, 'CPU')}, {supply.cpus} there ({supply.where})"
        return violation("cluster", "ray", constraint)
    return ""

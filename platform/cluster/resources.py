"""Whether there is a place for every worker, and on which device they run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from platform.cluster import torchrun
from platform.cluster.files import lack_of_files
from platform.cluster.job import usable_cores
from platform.config import Cluster, ConfigError, violation

_CROWDED = 4  # workers per core


@dataclass(frozen=True)
class Supply:
    """What is free for workers. `cpus` limits them only where `shared`: elsewhere they share the machine's cores."""

    gpus: int
    cpus: int
    where: str
    shared: bool = False


def crew_kind(cluster: Cluster) -> str:
    """inline | processes | local | ray | torchrun, which decides wherever it has started this process."""
    return "torchrun" if torchrun.present() else cluster.kind


def available_workers(cluster: Cluster) -> int:
    """The workers that fit: one per GPU where GPUs may be used, else one per core; for `parallel.data=-1`."""
    kind = crew_kind(cluster)
    if kind == "inline":
        return 1
    if kind == "torchrun":
        return int(os.environ["WORLD_SIZE"])
    supply = _supply(kind)
    use_gpus = cluster.device == "cuda" or (cluster.device == "auto" and supply.gpus > 0)
    return supply.gpus if use_gpus else supply.cpus


def secure(cluster: Cluster, world_size: int, say: Callable[[str], None], spares: int = 0) -> str:
    """The device, cpu or cuda, on which `world_size` workers and the spares find a place; says what it chose.

    Raises ConfigError where there is too little, after waiting `cluster.wait` seconds for more.
    """
    kind = crew_kind(cluster)
    if kind == "inline" and world_size != 1:
        constraint = f"trains a world of one, and this plan has {world_size} workers"
        raise ConfigError(violation("cluster", kind, constraint, ["cluster=processes", "cluster=local"]))
    if kind == "torchrun" and world_size != (started := int(os.environ["WORLD_SIZE"])):
        raise ConfigError(f"torchrun: this plan has {world_size} workers, and torchrun has started {started} processes")
    if kind == "torchrun":
        torchrun.given_key()
    if reason := lack_of_files(world_size + spares):
        raise ConfigError(violation("cluster", kind, reason))
    if kind == "torchrun" and spares:
        raise ConfigError(
            violation("elastic.spares", spares, "torchrun starts a process per worker and no others", [0])
        )
    # workers that the supply is for
    here = int(os.environ["LOCAL_WORLD_SIZE"]) if kind == "torchrun" else world_size + spares
    deadline = monotonic() + cluster.wait
    waiting = False
    while True:
        supply = _supply(kind)
        device = _choose(cluster.device, here, supply)
        if not (lack := _lack(device, here, supply)):
            break
        if monotonic() >= deadline:
            raise ConfigError(lack)
        if not waiting:
            say(f"{lack}; waiting up to {cluster.wait:g} s")
            waiting = True
        sleep(min(1.0, max(0.0, deadline - monotonic())))
    reason = f" ({_count(supply.gpus, 'GPU')} {supply.where})" if cluster.device == "auto" else ""
    say(f"device: {device}{reason}")
    if device == "cpu" and not supply.shared and here > _CROWDED * supply.cpus:
        say(f"warning: {here} workers share {_count(supply.cpus, 'core')}: this will be slow")
    return device


def gpu_count() -> int:
    """GPUs that this process may use. Where there is no driver, answers without importing torch."""
    if not any(Path(sign).exists() for sign in ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")):
        return 0
    import torch

    return torch.cuda.device_count()


def _supply(kind: str) -> Supply:
    if kind != "ray":
        return Supply(gpu_count(), usable_cores(), "on this machine")
    from platform.cluster import ray_session

    ray_session.connect()
    free = ray_session.free_resources()
    return Supply(int(free.get("GPU", 0)), int(free.get("CPU", 0)), "free in the Ray cluster", shared=True)


def _choose(device: str, world_size: int, supply: Supply) -> str:
    if device == "auto":
        return "cuda" if supply.gpus >= world_size else "cpu"
    return device


def _lack(device: str, world_size: int, supply: Supply) -> str:
    """What is missing for `world_size` workers, "" if nothing."""
    if device == "cuda" and supply.gpus < world_size:
        constraint = f"needs {_count(world_size, 'GPU')}, {supply.gpus} there ({supply.where})"
        return violation("cluster.device", device, constraint, ["cpu"])
    if supply.shared and supply.cpus < world_size:
        constraint = f"needs {_count(world_size, 'CPU')}, {supply.cpus} there ({supply.where})"
        return violation("cluster", "ray", constraint)
    return ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")

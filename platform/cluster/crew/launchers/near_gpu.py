"""Binding of a worker to the CPU cores next to its GPU: memory that a GPU reads lies on the NUMA node of the core that
wrote it, and a read across nodes takes about twice as long."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_GPUS = Path("/proc/driver/nvidia/gpus")  # a folder per GPU, named by its place on the PCI bus
_DEVICES = Path("/sys/bus/pci/devices")


def cores_near(gpu: str, gpus: Path = _GPUS, devices: Path = _DEVICES) -> set[int]:
    """Return the CPU cores next to a worker's GPU, named as in CUDA_VISIBLE_DEVICES by number or UUID; empty if the
    machine does not report them. Read from the kernel's files, without CUDA. Numbers count along the PCI bus, as CUDA's
    do where all GPUs of a machine are alike."""
    try:
        places = sorted(gpus.iterdir())
        named = (place for place in places if gpu and gpu in (place / "information").read_text())
        place = places[int(gpu)] if gpu.isdigit() else next(named)
        return _listed((devices / place.name.lower() / "local_cpulist").read_text())
    except (OSError, IndexError, StopIteration, ValueError):
        return set()


def _listed(text: str) -> set[int]:
    """Parse the kernel's list of CPU cores next to a worker's GPU, such as 0-3,8, into the set of their numbers."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def keep_near_gpu(environment: Mapping[str, str] = os.environ) -> set[int]:
    """Bind the calling worker process to its CPU cores next to its GPU, the first of CUDA_VISIBLE_DEVICES; return these
    cores. Does nothing, and returns the empty set, where that would leave it none or all."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    usable = os.sched_getaffinity(0)
    near = cores_near(visible) & usable if visible else set()
    if not near or near == usable:
        return set()
    with suppress(OSError):
        os.sched_setaffinity(0, near)
    return near

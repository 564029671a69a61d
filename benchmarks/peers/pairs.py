"""Steps of two systems in the same processes, alternated A, B, B, A, and what they cost: time, CPU and memory."""

from __future__ import annotations

import ctypes
import gc
import importlib
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any

import torch

from benchmarks.peers import environment
from benchmarks.peers.gpt import Recurring, initial_weights
from platform.config.fields import Config
from platform.plan.plan import Plan
from platform.runtime.communicator import Communicator, SingleRank
from tests.harness.oracle import trainer_of

Step = Callable[[int], float]  # number of the training step, from 1 -> this rank's loss, NaN where it has none
OURS, PEER = "ours", "peer"
MAPPED = 1 << 16  # bytes from which malloc maps memory, so that what is freed leaves the process


@dataclass(frozen=True)
class Job:
    """What a launch does: `peer` is "module:function" of a builder, `pairs` are timed after `warmup` steps of each.
    `alone`: the system that is built and measured for memory, "" for both in turn."""

    config: Config
    peer: str
    compiled: bool
    warmup: int
    pairs: int
    alone: str = ""


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one system: its loss in every step, seconds and CPU seconds of every timed one."""

    losses: list[float]
    seconds: list[float]
    cpu: list[float]


def build(job: Job, name: str, plan: Plan, communicator: Communicator) -> Step:
    """Build one of the two systems on this rank."""
    if name == OURS:
        alone = SingleRank(plan.mesh) if plan.mesh.world_size == 1 else communicator
        trainer = trainer_of(job.config, plan, alone, Recurring(job.config))
        return lambda k: trainer.step(k).loss
    return builder(job)(job.config, initial_weights(job.config), communicator, job.compiled)


def builder(job: Job) -> Callable[[Config, Any, Communicator, bool], Step]:
    environment.use()
    module, _, function = job.peer.partition(":")
    return getattr(importlib.import_module(f"benchmarks.peers.{module}"), function)


def alternate(job: Job, plan: Plan, communicator: Communicator) -> dict[str, Seen]:
    """Build both systems on this rank and step them in turn."""
    torch.set_num_threads(1)
    systems = {name: build(job, name, plan, communicator) for name in (OURS, PEER)}
    return take_turns(systems, communicator.barrier, job.warmup, job.pairs)


def take_turns(systems: Mapping[str, Step], barrier: Callable[[], object], warmup: int, pairs: int) -> dict[str, Seen]:
    """Step two systems in turn, the one that begins last time second; `barrier` is called before every timed step."""
    seen = {name: Seen([], [], []) for name in systems}
    for k in range(1, warmup + 1):
        for name, step in systems.items():
            seen[name].losses.append(step(k))
    gc.collect()
    for pair in range(pairs):
        for name in systems if pair % 2 == 0 else reversed(systems):
            barrier()
            cpu, begin = time.process_time(), time.perf_counter()
            loss = systems[name](warmup + pair + 1)
            seen[name].seconds.append(time.perf_counter() - begin)
            seen[name].cpu.append(time.process_time() - cpu)
            seen[name].losses.append(loss)
    return seen


def peak_bytes(job: Job, plan: Plan, communicator: Communicator) -> int:
    """Return how much the resident set of this rank's process grew at most while the system `job.alone` was built and
    stepped; what its modules take is not in it. A fresh process is expected."""
    torch.set_num_threads(1)
    builder(job)
    return grown(lambda: build(job, job.alone, plan, communicator), job.warmup)


def grown(build: Callable[[], Callable[[int], object]], steps: int) -> int:
    """Return how much the resident set of this process, a fresh one, grows at most while `build` builds a system and
    steps it, from step 1, so many times."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, MAPPED)  # M_MMAP_THRESHOLD
    gc.collect()
    libc.malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # the high-water mark starts here
    before = resident("VmRSS")
    step = build()
    for k in range(1, steps + 1):
        step(k)
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith(field))


@dataclass(frozen=True)
class Comparison:
    """Two systems over the same steps. `seconds`, `cpu`: medians over the steps of the slowest rank's time, and of the
    CPU seconds of all ranks, ours and the peer's; `ratio` and `cpu_ratio`: medians of the paired ratios, with the
    bootstrap interval of 95 %; `apart`: the largest relative difference of their losses; `losses`: first and last."""

    seconds: tuple[float, float]
    cpu: tuple[float, float]
    ratio: float
    interval: tuple[float, float]
    cpu_ratio: float
    apart: float
    losses: tuple[float, float]


def compare(ranks: Sequence[dict[str, Seen]]) -> Comparison:
    """Put together what all ranks saw of two systems, the first of which is ours."""
    names = list(ranks[0])
    slowest = [[max(times) for times in zip(*(r[name].seconds for r in ranks), strict=True)] for name in names]
    spent = [[sum(times) for times in zip(*(r[name].cpu for r in ranks), strict=True)] for name in names]
    ours, theirs = ([mean(step) for step in zip(*(r[name].losses for r in ranks), strict=True)] for name in names)
    ratios = [a / b for a, b in zip(*slowest, strict=True)]
    return Comparison(
        seconds=(statistics.median(slowest[0]), statistics.median(slowest[1])),
        cpu=(statistics.median(spent[0]), statistics.median(spent[1])),
        ratio=statistics.median(ratios),
        interval=bootstrap(ratios),
        cpu_ratio=statistics.median(a / b for a, b in zip(*spent, strict=True)),
        apart=max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)),
        losses=(ours[0], ours[-1]),
    )


def mean(losses: Sequence[float]) -> float:
    """Return the mean over the ranks that have a loss."""
    present = [loss for loss in losses if not isnan(loss)]
    return statistics.fmean(present) if present else nan


def bootstrap(ratios: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Return the interval of 95 % of the median, by resampling the pairs."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]

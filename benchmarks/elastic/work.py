"""The work that all systems do, a replica per node: its model, and the record of each step that every rank writes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn

from benchmarks.peers.gpt import Batches, Gpt, Language, initial_weights
from platform.config.fields import Config
from tests.harness.oracle import configure

WORKERS = 4
SAVED = 10  # steps between two checkpoints
MODEL = {"layers": 4, "d_model": 128, "heads": 4, "length": 64, "vocab": 1024}
MICROBATCH = 2  # sequences of a replica


@dataclass(frozen=True)
class Step:
    """Record of a rank that has done a step. `formation`: differs between a rank's formations of the world."""

    time: float
    step: int
    world: int
    formation: str
    node: int
    pid: int


def config() -> Config:
    """Return the configuration that the peers read of."""
    batch = {"microbatch": MICROBATCH, "global_batch": MICROBATCH * WORKERS}
    return configure(data=WORKERS, precision="fp32", **batch, **MODEL)


def model_of(c: Config) -> nn.Module:
    """Return the model that the peers replicate, with the weights that ours starts with."""
    return Language(Gpt(c.model, initial_weights(c)))


def batches_of(c: Config, rank: int) -> Batches:
    return Batches(c, rank % WORKERS)


def recorder(folder: Path) -> Callable[[int, int, str], None]:
    """Return a function (step, world, formation) that records a step of this process in a file of its own."""
    node, pid = int(os.uname().nodename.removeprefix("node")), os.getpid()
    file = (folder / f"{node}-{pid}-{time.time_ns()}").open("a", buffering=1)

    def record(step: int, world: int, formation: str) -> None:
        file.write(json.dumps(asdict(Step(time.time(), step, world, formation, node, pid))) + "\n")

    return record


def recorded(folder: Path, node: int) -> list[Step]:
    """Return all records of a node's ranks so far, ordered by time; a line that is being written is left out."""
    lines = [line for path in folder.glob(f"{node}-*") for line in path.read_text().splitlines(keepends=True)]
    return sorted((Step(**json.loads(line)) for line in lines if line.endswith("\n")), key=lambda step: step.time)

"""Runs on nodes with a Ray of their own: the command, and the same in one process without any sharding."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from platform.monitor import MetricsLog
from tests.harness.chaos import differences
from tests.testbed.ray_nodes import ROOT, Launched

# The optimizer is a calm one: where it is not, differences of the last digit grow tenfold within fifty steps.
SMALL = (
    "+experiment=gpt_quick model.layers=2 model.d_model=32 model.heads=4 model.length=16 model.vocab=300 precision=fp64"
    " data=synthetic eval.every=0 monitor.sample=0 train.global_batch=8 train.microbatch=2 train.steps=100000"
    " optimizer.schedule=constant optimizer.lr=1e-3 optimizer.eps=1e-6"
).split()
CLUSTER = (  # nodes share this machine's cores, each of which would count all of them as its own
    "cluster=ray cluster.device=cpu cluster.threads=1 cluster.wait=200 elastic.wait=300 elastic.hang_seconds=8"
).split()
ALONE = "cluster=inline tensor=serial parallel.data=1 pipeline=none train.microbatch=8".split()


def stopped(run: Launched) -> list[dict[str, Any]]:
    """Stop a run as a user does, with a checkpoint; return its rows."""
    run.signal(signal.SIGTERM)
    assert run.ended() == 75
    return run.rows


def same_as_alone(rows: list[dict[str, Any]], folder: Path, *arguments: str) -> None:
    """Assert that these rows are those of the same steps in one process, which writes into `folder`."""
    run_dir = folder / "alone"
    last = [f"train.stop_at={len(rows)}", f"run.dir={run_dir}"]
    command = [sys.executable, "-m", "platform.launch", *SMALL, *ALONE, *arguments, *last]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert differences(rows, MetricsLog.read_rows(run_dir / "metrics.jsonl")) == []


def world(run: Launched, size: int, since: int = 0) -> list[dict[str, Any]]:
    """Wait until a step was done by so many workers after the first `since` rows; return the rows so far."""
    return run.until(lambda: any(row["world_size"] == size for row in run.rows[since:]) and run.rows)


def seats(event: dict[str, Any]) -> list[str]:
    """Return the node of each rank, from an event `formed`."""
    return [worker["node"] for worker in event["workers"]]


def lost_steps(run: Launched) -> int:
    """Return how many steps a run has done again after failures."""
    return sum(event["steps_lost"] for event in run.of("rolled_back"))

"""A supervised run in a real Ray cluster whose workers, machines, head and control store are killed, stopped, drained
and added at random: `make test-ray-chaos` strikes a hundred times."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from platform.monitor import JsonLines, MetricsLog
from tests.harness.chaos import differences
from tests.harness.commands import QUICK, SMALL, TIMEOUT, command
from tests.testbed.ray_machines import Chaos, RayMachines, until

pytestmark = [pytest.mark.ray, pytest.mark.full, pytest.mark.timeout(7200)]

FAULTS = int(os.environ.get("RAY_FAULTS", "11"))  # of each kind one
SEED = int(os.environ.get("RAY_SEED", "1"))
TOLERANCE = 1e-6  # of thousands of steps, in which rounding of other meshes grows; a step too many is far more
PATIENCE = 600  # seconds from a fault to further steps, for what takes ten on an idle machine
ROOT = Path(__file__).parents[2]
RUN = [
    *(QUICK, *SMALL, "data=synthetic", "precision=fp64", "optimizer.warmup_steps=2", "tensor=serial"),
    *("train.global_batch=8", "train.microbatch=2", "train.steps=100000", "cluster.device=cpu"),
    *("optimizer.lr=1e-4", "optimizer.schedule=constant"),  # a larger one lets rounding grow to 1e-5 in 231 steps
]
RAY = [
    *("cluster=ray", "cluster.wait=300", "parallel.data=2", "checkpoint.every=10", "elastic.min_workers=1"),
    *("elastic.wait=60", "elastic.attempts=20", "elastic.max_workers=3", "extend=[tests.doubles.slow_steps]"),
]
# a driver that is lost, or that loses its cluster with all workers at once, goes on from the newest checkpoint
MAY_LOSE = {"took_over", "not_whole", "cluster_lost"}


class Supervised:
    """A supervised run in a cluster, in `folder`."""

    def __init__(self, machines: RayMachines, folder: Path):
        self.path, self._log = folder / "run", folder / "run.log"
        command = [sys.executable, "-m", "platform.jobs", "supervise", "--retries", "1000", *RUN, *RAY]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, f"run.dir={self.path}"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=machines.environment, cwd=ROOT, start_new_session=True,
            )  # fmt: skip

    @property
    def rows(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        return MetricsLog.read_rows(path) if path.exists() else []

    @property
    def events(self) -> list[dict[str, Any]]:
        path = self.path / "journal.jsonl"
        return JsonLines.read_objects(path) if path.exists() else []

    @property
    def step(self) -> int:
        rows = self.rows
        return rows[-1]["step"] if rows else 0

    def workers(self) -> list[int]:
        """The processes of the newest mesh."""
        formed = [event for event in self.events if event["event"] == "formed"]
        return [worker["pid"] for worker in formed[-1]["workers"]] if formed else []

    def until_step(self, step: int, after: str) -> None:
        def goes_on() -> bool:
            assert self.process.poll() is None, f"{after}: ended\n{self.text()}"
            return self.step >= step

        until(goes_on, PATIENCE, lambda: f"{after}: no step\n{self.text()}")

    def text(self) -> str:
        return self._log.read_text()[-6000:]


def test_chaos(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.harness.chaos.TOLERANCE", TOLERANCE)
    with RayMachines(3, SEED) as machines:
        run = Supervised(machines, tmp_path)
        try:
            run.until_step(15, "start")
            chaos = Chaos(machines, run.workers, SEED)
            for number in range(FAULTS):
                step = run.step
                kind = chaos.strike()
                # a run whose cluster is away may not know it yet: what counts is that steps come after the fault
                run.until_step(max(step, run.step) + 3, f"fault {number}, {kind}, of seed {SEED}")
                print(f"{number} {kind}: step {step} -> {run.step}", flush=True)
            run.process.send_signal(signal.SIGTERM)
            assert run.process.wait(PATIENCE) == 143, run.text()
            until(machines.all_free, 120, "something of the run is left in the cluster")
        finally:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()
    rows, events = run.rows, run.events
    assert [row["step"] for row in rows] == [*range(1, len(rows) + 1)]
    alone = tmp_path / "alone"
    typed = ["cluster=inline", "parallel.data=1", f"train.stop_at={len(rows)}", f"run.dir={alone}"]
    done = command(*RUN, *typed, "checkpoint.best=false", cwd=ROOT, timeout=TIMEOUT + len(rows))
    assert not done.returncode, done.stderr
    assert differences(rows, MetricsLog.read_rows(alone / "metrics.jsonl")) == []
    for i, event in enumerate(events):
        if event["event"] != "goodput" and (event["event"] == "rolled_back" or event.get("steps_lost")):
            before = {e["event"] for e in events[max(0, i - 40) : i + 1]}
            assert before & MAY_LOSE, events[max(0, i - 10) : i + 1]
    costs = [event for event in events if event["event"] == "goodput"]
    print(f"struck {len(chaos.struck)} times, {len(rows)} steps, {len(costs)} drivers: {costs[-1]}")

"""Runs with Ray as jobs on two nodes of a real Slurm: what Slurm stops has saved, and goes on where it was."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from platform.jobs.slurm import render_slurm_job
from platform.monitor import JsonLines, MetricsLog
from tests.harness.commands import QUICK, SMALL, command
from tests.testbed.slurm_nodes import GRACE, TASKS, TREE, SlurmNodes, until, what_lacks

pytestmark = [
    pytest.mark.ray,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(what_lacks()), reason=what_lacks() or "-"),
]

RUN = [
    *(QUICK, *SMALL, "data=synthetic", "precision=fp64", "optimizer.warmup_steps=2", "tensor=serial"),
    *("train.steps=100000", "checkpoint.every=100000", "cluster.device=cpu", "elastic.wait=120"),
]
JOB = ["extend=[tests.doubles.slow_steps]", "job.workers=1", "job.interface=link0"]
KILL_WAIT = 30  # Slurm's default


@pytest.fixture(scope="module", params=[TREE, TASKS], ids=["tree", "tasks"])
def slurm(request):
    with SlurmNodes(2, request.param, KILL_WAIT) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def tree():
    with SlurmNodes(2, TREE, KILL_WAIT) as nodes:
        yield nodes


class Run:
    """A run that jobs of a Slurm do, in `slurm.work/name`. `seconds`: of a step, at least."""

    def __init__(self, slurm: SlurmNodes, name: str, seconds: float = 0.3, workers: int = 2):
        self.slurm, self.name, self.path = slurm, name, slurm.work / name
        setup = f"export PYTHONPATH={os.environ['PYTHONPATH']} OMP_NUM_THREADS=1 STEP_SECONDS={seconds}"
        own = [f"job.name={name}", f"run.dir={name}", f"checkpoint.url={name}/points", f"job.setup={setup}"]
        self._typed = [*RUN, *JOB, *own, f"parallel.data={workers}"]

    def submit(self, *typed: str, options: str = "") -> int:
        return self.slurm.submit(render_slurm_job([*self._typed, *typed]), options)

    def rows(self) -> list[dict]:
        path = self.path / "metrics.jsonl"
        return MetricsLog.read_rows(path) if path.exists() else []

    def until_step(self, step: int) -> None:
        until(lambda: (self.rows() or [{"step": 0}])[-1]["step"] >= step, self.slurm.log, 300)

    def saved(self) -> int:
        """Return the step of the newest checkpoint, 0 if there is none."""
        sealed = (self.path / "points").glob("step-*/manifest.json")
        return max((int(path.parent.name.split("-")[1]) for path in sealed), default=0)

    def statuses(self) -> list[int]:
        return [
            line["status"] for line in JsonLines.read_objects(self.path / "drivers.jsonl") if line["event"] == "ended"
        ]

    def out(self, job: int) -> str:
        return (self.slurm.work / f"{self.name}-{job}.out").read_text()

    def until_gone(self, job: int) -> None:
        """Wait until the job has left its nodes: 30 s after the last process of a step that has one Slurm gives up."""
        until(lambda: not self.slurm.typed("squeue --noheader"), self.slurm.log, 60)
        assert not self.slurm.left_in_tmp() and "TERMINATED" not in self.out(job)

    def goes_on(self, folder: Path) -> None:
        """Do one more job of a few steps; every step must be there once, with the numbers of a run alone."""
        last = self.saved() + 3
        job = self.submit(f"train.stop_at={last}")
        until(lambda: self.slurm.shown(job, "JobState") == "COMPLETED", self.slurm.log, 300)
        self.as_alone(folder)
        assert self.rows()[-1]["step"] == last

    def as_alone(self, folder: Path) -> None:
        rows = [(row["step"], row["samples"], row["loss"]) for row in self.rows()]
        alone = [*RUN, "parallel.data=1", "cluster=inline", "run.dir=alone", f"train.stop_at={rows[-1][0]}"]
        done = command(*alone, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        wanted = [
            (row["step"], row["samples"], row["loss"]) for row in MetricsLog.read_rows(folder / "alone/metrics.jsonl")
        ]
        assert [row[:2] for row in rows] == [row[:2] for row in wanted]
        assert [row[2] for row in rows] == pytest.approx([row[2] for row in wanted], rel=1e-9, abs=0)


def test_scancel_saves(slurm, tmp_path):
    """Also where Slurm signals every process below a task, as Ray's: without them there is nothing to save from."""
    run = Run(slurm, "a")
    job = run.submit()
    run.until_step(4)
    slurm.typed(f"scancel {job}")
    run.until_gone(job)
    out = run.out(job)
    assert "died" not in out and "task 0: Killed" not in out, out
    assert run.saved() == run.rows()[-1]["step"] and run.statuses() == [75]
    run.goes_on(tmp_path)


@pytest.mark.parametrize(
    "name, seconds", [("quick", 0.3), ("slow", GRACE + 10)], ids=["saved within the grace", "a step outlasts the grace"]
)
def test_a_preempted_run_comes_back_where_it_was(tree, tmp_path, name, seconds):
    """Slurm sends SIGTERM at once, and again at the end of the grace; then it waits for KillWait, and requeues. Who has
    ended before is requeued by its own script."""
    run = Run(tree, name, seconds)
    job = run.submit(options="--partition=grace")
    run.until_step(3 if seconds < 1 else 1)
    other = int(tree.typed("sbatch --parsable --partition=high --nodes=2 --exclusive --wrap 'sleep 3'"))
    began = time.monotonic()
    until(lambda: tree.shown(job, "Restarts") == "1", tree.log, 120)
    assert name == "quick" or time.monotonic() - began > GRACE  # it has got both
    until(run.statuses, tree.log, KILL_WAIT + 30)
    assert run.statuses() == [75], run.out(job)
    saved = run.saved()
    assert saved == run.rows()[-1]["step"] and "died" not in run.out(job)
    until(lambda: tree.shown(other, "JobState") == "COMPLETED", tree.log, 120)
    run.until_step(saved + 1)
    assert f"continues after step {saved}: " in run.out(job)
    tree.typed(f"scancel --batch --signal=USR2 {job}")
    run.until_gone(job)
    assert run.statuses() == [75, 75] and "were lost" not in run.out(job)
    run.as_alone(tmp_path)


def test_a_second_job_on_a_run_directory_is_refused(tree, tmp_path):
    """In one line, and before it counts the driver of the first as lost; the first goes on."""
    run = Run(tree, "shared", workers=1)
    first = run.submit(options="--nodelist=node1")
    run.until_step(2)
    second = run.submit(options="--nodelist=node2")
    until(lambda: tree.shown(second, "JobState") == "FAILED", tree.log, 120)
    assert tree.shown(second, "ExitCode") == "2:0"
    said = [line for line in run.out(second).splitlines() if line.startswith("config:")]
    assert len(said) == 1 and re.search(
        r"run.dir=shared: has a job already, supervised by process \d+ on node1", said[0]
    )
    run.until_step(run.rows()[-1]["step"] + 2)
    tree.typed(f"scancel {first}")
    run.until_gone(first)
    assert run.statuses() == [75] and "retries are spent" not in run.out(first)
    run.goes_on(tmp_path)

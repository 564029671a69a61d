"""Runs on Ray that lose workers, nodes and their driver, by command: the numbers are those of one that lost nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from platform.monitor import JsonLines, MetricsLog
from tests.harness.commands import QUICK, SMALL, TIMEOUT, command
from tests.harness.process_tree import descendants, gone
from tests.harness.ray_machines import drain, private_cluster

pytestmark = pytest.mark.ray

RUN = (
    "train.steps=100000 data=synthetic precision=fp64 model.dropout=0.1 optimizer.warmup_steps=2 run.dir=run "
    "checkpoint.every=4"
).split()
PARALLEL = "tensor=1d tensor.axes.t=2 parallel.data=2 extend=[tests.doubles.slow_steps]".split()
ALONE = "tensor=serial parallel.data=1 cluster=inline".split()


@dataclass
class Run:
    folder: Path
    process: subprocess.Popen[bytes]

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / "run" / "journal.jsonl"
        return [event for event in JsonLines.read_objects(path) if event["event"] == name] if path.exists() else []

    def await_(self, what: Callable[[], bool]) -> None:
        """Until `what` is so, while the run goes on."""
        deadline = time.monotonic() + TIMEOUT
        while not what():
            assert self.process.poll() is None, (self.folder / "out").read_text()
            assert time.monotonic() < deadline, self.events("forming")
            time.sleep(0.05)

    def steps_of(self, generation: int) -> None:
        """Until a generation has done its first step."""
        self.await_(lambda: any(e["generation"] == generation for e in self.events("first_step")))

    def numbers(self) -> list[tuple[Any, ...]]:
        rows = MetricsLog.read_rows(self.folder / "run" / "metrics.jsonl")
        return [(row["step"], row["samples"], row["loss"], row["grad_norm"]) for row in rows]


@contextmanager
def started(folder: Path, *arguments: str, **environment: str) -> Iterator[Run]:
    out = (folder / "out").open("ab")
    line = [sys.executable, "-m", "platform.launch", QUICK, *SMALL, *RUN, *PARALLEL, *arguments]
    variables = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "STEP_SECONDS": "0.2", **environment}
    with subprocess.Popen(line, cwd=folder, env=variables, stdout=out, stderr=out) as process:
        try:
            yield Run(folder, process)
        finally:
            process.kill()


def undisturbed(folder: Path, steps: int, *more: str) -> list[tuple[Any, ...]]:
    """What one worker computes that nobody disturbs."""
    folder.mkdir()
    done = command(QUICK, *SMALL, *RUN, *ALONE, *more, f"train.stop_at={steps}", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return Run(folder, None).numbers()  # type: ignore[arg-type]


def equal(actual: list[tuple[Any, ...]], wanted: list[tuple[Any, ...]]) -> bool:
    """Every step once and in order, the same samples, the same loss and gradient norm."""
    assert [row[:2] for row in actual] == [row[:2] for row in wanted]
    return all(have[2:] == pytest.approx(want[2:], rel=1e-9, abs=0) for have, want in zip(actual, wanted, strict=True))


@pytest.mark.full
def test_a_worker_and_the_driver_are_killed(tmp_path):
    """A killed worker: the mesh shrinks, and grows back with a hired one. A killed driver: nothing of it is left, and
    the same command goes on."""
    with started(tmp_path, "cluster=local", "elastic.faults=[3:kill:1:backward]") as run:
        run.steps_of(3)
        assert [e["world_size"] for e in run.events("forming")] == [4, 2, 4]
        [failure] = run.events("failure")
        assert (failure["step"], failure["rank"], failure["kind"]) == (3, 1, "died")
        assert run.events("restored")[0]["step"] == 2
        assert [e["source"] for e in run.events("restored")] == ["memory", "memory"] and not run.events("rolled_back")
        run.await_(lambda: len(run.events("checkpoint")) >= 1)
        inside = descendants(run.process.pid)
        assert len(inside) >= 4 + 3  # four workers, Ray's own, and who cleans up
        [stopped] = [w["pid"] for w in run.events("formed")[-1]["workers"] if w["rank"] == 3]
        os.kill(stopped, signal.SIGSTOP)
        run.process.kill()
        assert gone(inside, seconds=30)
    last = run.numbers()[-1][0] + 1
    with started(tmp_path, "cluster=local", f"train.stop_at={last}") as run:
        assert run.process.wait(TIMEOUT) == 0, (tmp_path / "out").read_text()
    assert equal(run.numbers(), undisturbed(tmp_path / "alone", last))


@pytest.mark.full
def test_machines_are_lost_and_added_and_told_to_go(tmp_path):
    """Four workers on two machines. One machine is lost: two workers go on. One is added: they are four again. One is
    about to go: first a checkpoint, then two go on on the other. That one too: the run ends, to be continued."""
    with private_cluster(head_cpus=0, STEP_SECONDS="0.2", PYTHONPATH=os.environ["PYTHONPATH"]) as cluster:
        first, second = [cluster.add_node(num_cpus=2) for _ in range(2)]
        with started(tmp_path, "cluster=ray") as run:
            run.steps_of(1)
            cluster.remove_node(second, allow_graceful=False)
            run.steps_of(2)
            third = cluster.add_node(num_cpus=2)
            run.steps_of(3)
            drain(cluster, first)
            run.steps_of(4)
            drain(cluster, third)
            assert run.process.wait(TIMEOUT) == 75, (tmp_path / "out").read_text()
    assert [e["world_size"] for e in run.events("forming")] == [4, 2, 4, 2]
    assert [e["source"] for e in run.events("restored")] == ["memory"] * 3 and not run.events("rolled_back")
    seats = [{w["number"] for w in e["workers"]} for e in run.events("formed")]
    assert [set(e["numbers"]) for e in run.events("notice")] == [seats[2] - seats[3], seats[3]]
    notice, last = (e["step"] for e in (run.events("reforming")[-1], run.events("drained")[0]))
    assert {notice, last} <= {e["step"] for e in run.events("checkpoint")}
    assert run.events("drained")[0]["signal"].startswith("a notice")
    assert run.numbers()[-1][0] == last
    assert equal(run.numbers(), undisturbed(tmp_path / "alone", last))


@pytest.mark.full
def test_two_runs_in_one_cluster_do_not_disturb_each_other(tmp_path):
    """Each loses a worker, recovers and grows back beside the other, and computes what it computes alone."""
    folders = [tmp_path / name for name in ("one", "other")]
    with private_cluster(head_cpus=0, STEP_SECONDS="0.2", PYTHONPATH=os.environ["PYTHONPATH"]) as cluster:
        for _ in range(2):
            cluster.add_node(num_cpus=2)
        with ExitStack() as both:
            runs = []
            for number, folder in enumerate(folders):
                folder.mkdir()
                fault = f"elastic.faults=[{3 + number}:kill:1:backward]"
                several = [
                    fault,
                    "train.stop_at=12",
                    "parallel.data=1",
                    f"seed={number}",
                    "cluster.wait=120",
                    "cluster.doctor=quick",
                ]
                runs.append(both.enter_context(started(folder, "cluster=ray", "cluster.device=cpu", *several)))
            assert [run.process.wait(TIMEOUT) for run in runs] == [0, 0], [(f / "out").read_text() for f in folders]
    for number, run in enumerate(runs):
        assert len(run.events("failure")) == 1 and not run.events("rolled_back")
        assert [e["world_size"] for e in run.events("forming")][:2] == [2, 1]
        assert equal(run.numbers(), undisturbed(tmp_path / f"alone{number}", 12, f"seed={number}"))
    overlap = min(run.events("done")[0]["time"] for run in runs) - max(run.events("formed")[0]["time"] for run in runs)
    assert overlap > 0, "they did not run at the same time"

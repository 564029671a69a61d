"""Drivers that are killed, and two of one run: by command."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from platform.monitor import JsonLines, MetricsLog
from tests.harness.commands import QUICK, SMALL, TIMEOUT
from tests.harness.process_tree import descendants, gone
from tests.harness.warm import Command

COMMAND = (
    "cluster=processes tensor=1d tensor.axes.t=1 parallel.data=2 parallel.zero=1 data=synthetic precision=fp64 "
    "optimizer.warmup_steps=2 optimizer.lr=1e-3 train.global_batch=4 train.microbatch=2 monitor.every=1000"
).split()
ORPHAN_SECONDS = 30  # the contract's


@pytest.fixture
def start(tmp_path):
    """Starts a run by command; what is left of it is killed after the test."""
    started = []

    def start(*arguments):
        started.append(Command("platform.launch", QUICK, *SMALL, *COMMAND, *arguments, cwd=tmp_path))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_for_step(process, run: Path, step: int) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not (run / "metrics.jsonl").exists() or not any(r["step"] >= step for r in rows(run)):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)


def rows(run: Path) -> list[dict]:
    return MetricsLog.read_rows(run / "metrics.jsonl")


def finish(process) -> str:
    out = process.communicate(timeout=TIMEOUT)[0]
    assert process.returncode == 0, out
    return out


def test_a_killed_driver_leaves_no_orphans_and_the_same_command_goes_on(start, tmp_path, monkeypatch):
    """At a random moment; one of its workers is stopped, and cannot notice anything."""
    monkeypatch.setenv("STEP_SECONDS", "0.2")  # it is not over by then
    slow = "extend=[tests.doubles.slow_steps]"
    run, arguments = tmp_path / "run", ["run.dir=run", "train.steps=20", "checkpoint.every=5", slow]
    process = start(*arguments)
    wait_for_step(process, run, 7)
    while not any(event["event"] == "checkpoint" for event in JsonLines.read_objects(run / "journal.jsonl")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    time.sleep(random.Random(0).uniform(0, 0.5))
    inside = descendants(process.pid)
    formed = [event for event in JsonLines.read_objects(run / "journal.jsonl") if event["event"] == "formed"][-1]
    workers = {worker["pid"] for worker in formed["workers"]}
    assert len(workers) == 2 and workers <= inside
    os.kill(min(workers), signal.SIGSTOP)
    process.kill()
    killed = time.monotonic()
    assert gone(inside, ORPHAN_SECONDS)
    print(f"orphans were gone {time.monotonic() - killed:.2f} s after their driver")
    process.wait()
    monkeypatch.setenv("STEP_SECONDS", "0")
    finish(start(*arguments))
    finish(start(*arguments[1:], "run.dir=alone", "cluster=processes"))
    actual, expected = rows(run), rows(tmp_path / "alone")
    assert [row["samples"] for row in actual] == [[4 * k, 4 * k + 4] for k in range(20)]
    for row, other in zip(actual, expected, strict=True):
        assert row["samples"] == other["samples"]
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-9)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-9)
    assert any(event["event"] == "restored" for event in JsonLines.read_objects(run / "journal.jsonl"))


@pytest.mark.full
def test_of_two_live_drivers_the_older_one_stops(start, tmp_path):
    """As where a job is requeued on another machine beside the live one: two run directories, one storage."""
    shared = ["checkpoint.url=shared", "checkpoint.every=2", "train.steps=2000", "train.stop_at=2000"]
    older = start("run.dir=older", *shared)
    wait_for_step(older, tmp_path / "older", 4)
    newer = start("run.dir=newer", *shared)
    out = older.communicate(timeout=TIMEOUT)[0]
    assert older.returncode == 1, out
    assert "held by process" in out and str(newer.pid) in out, out
    stopped = rows(tmp_path / "older")[-1]["step"]
    wait_for_step(newer, tmp_path / "newer", 1)
    newer.send_signal(signal.SIGTERM)
    out = newer.communicate(timeout=TIMEOUT)[0]
    assert newer.returncode == 75, out
    mine = [e for e in JsonLines.read_objects(tmp_path / "older" / "journal.jsonl") if e["event"] == "checkpoint"]
    theirs = JsonLines.read_objects(tmp_path / "newer" / "journal.jsonl")
    took_over = next(event["time"] for event in theirs if event["event"] == "starting")
    assert not [event for event in mine if event["time"] > took_over], "it committed after it was superseded"
    assert stopped < 2000 and any(event["event"] == "restored" for event in theirs), json.dumps(theirs[:6])

"""Stopping and going on, by command: train.stop_at, a signal, and what may not be resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from platform.checkpoint import connect, read_tensor, verify
from platform.monitor import MetricsLog
from tests.test_end_to_end import QUICK, SMALL, TIMEOUT, command, refused

FIXED = "optimizer.warmup_steps=2 parallel.data=1 data=synthetic precision=fp64 model.dropout=0.1".split()
STEPS = "train.steps=6"
SERIAL = ["tensor=serial", "cluster=inline"]


def numbers(run: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in MetricsLog.read(run / "metrics.jsonl")]


def events(run: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (run / "journal.jsonl").read_text().splitlines()]


def train(cwd: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = command(QUICK, *SMALL, *FIXED, *arguments, cwd=cwd)
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def through(tmp_path_factory) -> Path:
    """Six steps in one go, with checkpoints of the last three."""
    folder = tmp_path_factory.mktemp("through")
    train(folder, *SERIAL, STEPS, "checkpoint.every=1", "checkpoint.keep=3", "run.dir=run")
    return folder / "run"


def test_two_halves_under_two_plans_are_the_whole(tmp_path, through):
    train(tmp_path, "cluster=processes", "tensor=1d", "tensor.axes.t=2", STEPS, "train.stop_at=3", "run.dir=run")
    second = "cluster=processes tensor=serial parallel.data=2 parallel.zero=1".split()
    done = train(tmp_path, *second, STEPS, "run.dir=run")
    assert "continues after step 3" in done.stdout
    found, wanted = numbers(tmp_path / "run"), numbers(through)
    assert [row[0] for row in found] == [1, 2, 3, 4, 5, 6]
    for have, want in zip(found, wanted, strict=True):
        assert have == pytest.approx(want, rel=1e-10, abs=0)
    assert [e for e in events(tmp_path / "run") if e in ("checkpoint", "restored", "done")] == [
        "checkpoint", "done", "restored", "done",
    ]  # fmt: skip


@pytest.mark.parametrize("start", [pytest.param("ray", marks=pytest.mark.ray), "torchrun"])
def test_ray_and_torchrun_go_on_and_save_too(tmp_path, through, start):
    """From what one worker saved after step 4, two that are started so go on, and what they save after step 5 holds."""
    storage = connect(str(through / "checkpoints"))
    fourth, fifth, _ = sorted(storage.list(""))
    origin = f"checkpoint.resume={through}/checkpoints/{fourth}"
    here = ["tensor=1d", "tensor.axes.t=2", STEPS, "train.stop_at=5", origin, "run.dir=run"]
    if start == "ray":
        done = train(tmp_path, "cluster=local", *here)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        line = [*torchrun, "-m", "platform.launch", QUICK, *SMALL, *FIXED, *here]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "continues after step 4" in done.stdout
    assert numbers(tmp_path / "run") == [pytest.approx(numbers(through)[4], rel=1e-10, abs=0)]
    saved = connect(str(tmp_path / "run" / "checkpoints"))
    [mine] = saved.list("")
    found, wanted = verify(saved, mine), verify(storage, fifth)
    assert len(found.files) == 2 and found.tensors.keys() == wanted.tensors.keys()
    for name in wanted.tensors:
        have, want = read_tensor(saved, mine, found, name), read_tensor(storage, fifth, wanted, name)
        assert torch.allclose(have, want, rtol=1e-9, atol=1e-12), name


def test_a_named_checkpoint_and_the_same_plan_go_on_bit_by_bit(tmp_path, through):
    _, fifth, last = sorted((through / "checkpoints").iterdir())
    train(tmp_path, *SERIAL, STEPS, f"checkpoint.resume={fifth}", "run.dir=run")
    assert numbers(tmp_path / "run") == numbers(through)[5:]


def test_a_signal_saves_and_the_same_command_goes_on(tmp_path, through):
    arguments = [*SERIAL, "train.steps=100000", "optimizer.schedule=constant", "checkpoint.every=100000", "run.dir=run"]
    line = [sys.executable, "-m", "platform.launch", QUICK, *SMALL, *FIXED, *arguments]
    process = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    rows, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + TIMEOUT
    try:
        while not (rows.exists() and rows.read_text()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out = process.communicate(timeout=TIMEOUT)[0]
    finally:
        process.kill()
        process.wait()
    last = numbers(tmp_path / "run")[-1][0]
    assert process.returncode == 75, out
    assert f"stopped by SIGTERM after step {last}: the same command continues after step {last}" in out
    train(tmp_path, *arguments, f"train.stop_at={last + 2}")
    assert [row[0] for row in numbers(tmp_path / "run")] == list(range(1, last + 3))


def test_a_damaged_checkpoint_is_passed_over(tmp_path, through):
    url = tmp_path / "checkpoints"
    subprocess.run(["cp", "-r", through / "checkpoints", url], check=True)
    _, fifth, last = sorted(url.iterdir())
    blocks = next(last.glob("*.bin"))
    damaged = bytearray(blocks.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    blocks.write_bytes(damaged)
    done = train(tmp_path, *SERIAL, STEPS, f"checkpoint.url={url}", "run.dir=run")
    assert f"checkpoint {last.name} is passed over: " in done.stdout and "continues after step 5" in done.stdout
    assert (last / "BAD.txt").exists()
    assert numbers(tmp_path / "run") == numbers(through)[5:]


@pytest.mark.parametrize(
    ("arguments", "first", "others"),
    [
        ("checkpoint.url={}/checkpoints model.layers=2 seed=7", "config: checkpoint.url={}/checkpoints: step-00000006-",
         ["config: model.layers: 1 there, 2 here", "config: seed: 0 there, 7 here"]),
        ("checkpoint.resume=nowhere", "config: checkpoint.resume={}/nowhere: holds no checkpoint", []),
        ("checkpoint.resume=must", "config: checkpoint.url={}/run/checkpoints: holds no checkpoint", []),
    ],
)  # fmt: skip
def test_what_cannot_be_resumed_is_refused(tmp_path, through, arguments, first, others):
    here = through if "checkpoints " in arguments else tmp_path
    line, *rest = refused(*FIXED, STEPS, *arguments.format(through).split(), "run.dir=run", cwd=tmp_path)
    assert line.startswith(first.format(here)), line
    assert rest == others


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_a_storage_that_cannot_be_written_is_refused(tmp_path):
    done = train(tmp_path, *SERIAL, STEPS, "checkpoint.every=1", "checkpoint.url=/proc/run", "run.dir=run", status=2)
    assert done.stderr.startswith("config: checkpoint.url=/proc/run: cannot be written to: ")

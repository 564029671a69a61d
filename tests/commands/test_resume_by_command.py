"""Stopping and going on, by command: train.stop_at, a signal, and what may not be resumed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.boundary.storage import Storage, open_storage
from platform.checkpoint.catalogue import list_attempts, verify_checkpoint
from platform.checkpoint.moves import read_tensor
from platform.cluster.origin import describe_changed_schedule
from platform.launch import compose_config, main
from platform.monitor import JsonLines, MetricsLog
from platform.optimizer.learning_rate import learning_rate
from tests.harness.commands import QUICK, SMALL, TIMEOUT, in_this_process, refused, warm_command

FIXED = "optimizer.warmup_steps=2 parallel.data=1 data=synthetic precision=fp64 model.dropout=0.1".split()
STEPS = "train.steps=6"
SERIAL = ["tensor=serial", "cluster=inline"]


def numbers(run: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in MetricsLog.read_rows(run / "metrics.jsonl")]


def events(run: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (run / "journal.jsonl").read_text().splitlines()]


def train(cwd: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    launch = warm_command if "cluster=local" in arguments else in_this_process
    done = launch(QUICK, *SMALL, *FIXED, *arguments, cwd=cwd)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def checkpoints(storage: Storage) -> list[str]:
    """From the oldest on."""
    return sorted(attempt.directory_name for attempt in list_attempts(storage))


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
    actual, wanted = numbers(tmp_path / "run"), numbers(through)
    assert [row[0] for row in actual] == [1, 2, 3, 4, 5, 6]
    for have, want in zip(actual, wanted, strict=True):
        assert have == pytest.approx(want, rel=1e-10, abs=0)
    assert [e for e in events(tmp_path / "run") if e in ("checkpoint", "restored", "done")] == [
        "checkpoint", "done", "restored", "checkpoint", "done",
    ]  # fmt: skip


@pytest.mark.parametrize("start", [pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.full]), "torchrun"])
def test_ray_and_torchrun_go_on_and_save_too(tmp_path, through, start):
    """From what one worker saved after step 4, two that are started so go on, and what they save after step 5 holds."""
    storage = open_storage(str(through / "checkpoints"))
    fourth, fifth, _ = checkpoints(storage)
    origin = f"checkpoint.resume={through}/checkpoints/{fourth}"
    arguments = ["tensor=1d", "tensor.axes.t=2", STEPS, "train.stop_at=5", origin, "run.dir=run"]
    if start == "ray":
        done = train(tmp_path, "cluster=local", *arguments)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        line = [*torchrun, "-m", "platform.launch", QUICK, *SMALL, *FIXED, *arguments]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "continues after step 4" in done.stdout
    assert numbers(tmp_path / "run") == [pytest.approx(numbers(through)[4], rel=1e-10, abs=0)]
    saved = open_storage(str(tmp_path / "run" / "checkpoints"))
    [mine] = checkpoints(saved)
    actual, wanted = verify_checkpoint(saved, mine), verify_checkpoint(storage, fifth)
    assert len(actual.files) == 2 and actual.tensors.keys() == wanted.tensors.keys()
    for name in wanted.tensors:
        have, want = read_tensor(saved, mine, actual, name), read_tensor(storage, fifth, wanted, name)
        assert torch.allclose(have, want, rtol=1e-9, atol=1e-12), name


def test_a_named_checkpoint_and_the_same_plan_go_on_bit_by_bit(tmp_path, through):
    _, fifth, last = sorted((through / "checkpoints").glob("step-*"))
    train(tmp_path, *SERIAL, STEPS, f"checkpoint.resume={fifth}", "run.dir=run")
    assert numbers(tmp_path / "run") == numbers(through)[5:]


@pytest.mark.full
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
    again = warm_command(QUICK, *SMALL, *FIXED, *arguments, f"train.stop_at={last + 2}", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert [row[0] for row in numbers(tmp_path / "run")] == list(range(1, last + 3))


@pytest.mark.full
def test_under_torchrun_an_exception_costs_nothing_and_a_death_no_step(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    steps = "train.steps=100000 optimizer.schedule=constant checkpoint.every=100000".split()
    overrides = ["tensor=serial", "parallel.data=2", *steps, "run.dir=run"]  # wins over what FIXED has
    line = [*torchrun, "-m", "platform.launch", QUICK, *SMALL, *FIXED, *overrides]

    def life(*arguments: str) -> int:
        return subprocess.run([*line, *arguments], cwd=tmp_path, capture_output=True, timeout=TIMEOUT).returncode

    assert life("elastic.faults=[2:raise:1,4:kill:1]") == 1  # torchrun's status
    journal = JsonLines.read_objects(tmp_path / "run" / "journal.jsonl")
    failures = [(e["step"], e["kind"]) for e in journal if e["event"] == "failure"]
    assert failures == [(2, "failed"), (4, "died")]
    assert [(e["step"], e["source"]) for e in journal if e["event"] == "restored"] == [(1, "memory"), (3, "memory")]
    [drained] = [e for e in journal if e["event"] == "drained"]
    last = drained["step"]
    assert drained["signal"] == "SIGTERM" and last >= 3  # as soon as torchrun has noticed
    assert life(f"train.stop_at={last + 2}") == 0
    assert [row[0] for row in numbers(tmp_path / "run")] == list(range(1, last + 3))


def test_a_damaged_checkpoint_is_passed_over(tmp_path, through):
    url = tmp_path / "checkpoints"
    subprocess.run(["cp", "-r", through / "checkpoints", url], check=True)
    _, fifth, last = sorted(url.glob("step-*"))
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
         ["config: model.layers: 1 there, 2 here; fixed: the saved tensors are another model's",
          "config: seed: 0 there, 7 here; fixed: samples or their order would be others: some would come twice, some"
          " never"]),
        ("checkpoint.resume=nowhere", "config: checkpoint.resume={}/nowhere: holds no checkpoint", []),
        ("checkpoint.resume=must", "config: checkpoint.url={}/run/checkpoints: holds no checkpoint", []),
    ],
)  # fmt: skip
def test_what_cannot_be_resumed_is_refused(tmp_path, through, arguments, first, others):
    folder = through if "checkpoints " in arguments else tmp_path
    line, *rest = refused(*FIXED, STEPS, *arguments.format(through).split(), "run.dir=run", cwd=tmp_path)
    assert line.startswith(first.format(folder)), line
    assert rest == others


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_a_storage_that_cannot_be_written_is_refused(tmp_path):
    done = train(tmp_path, *SERIAL, STEPS, "checkpoint.every=1", "checkpoint.url=/proc/run", "run.dir=run", status=2)
    assert done.stderr.startswith("config: checkpoint.url=/proc/run: cannot be written to: ")


def test_what_a_longer_run_does_to_the_learning_rate_is_said_and_a_jump_is_to_be_allowed(tmp_path, through):
    shutil.copytree(through, tmp_path / "run")
    fixed = [*SERIAL, "checkpoint.every=1", "checkpoint.keep=3", "run.dir=run"]
    optimizer = compose_config([QUICK, *SMALL, *FIXED]).optimizer
    before, after = (learning_rate(optimizer, 7, steps) for steps in (6, 12))
    assert after > 2 * before
    (line,) = refused(*FIXED, *fixed, "train.steps=12", cwd=tmp_path)
    assert line == (
        f"config: train.steps=12: the learning rate of step 7 would be {after:.1e}, and was to be {before:.1e};"
        " nearest legal: 6, resume.allow=[train.steps]"
    )
    done = train(tmp_path, *fixed, "train.steps=12", "train.stop_at=7", "resume.allow=[train.steps]")
    said = done.stdout.splitlines()
    first = said.index("changed  train.steps: 6 there, 12 here")
    assert said[first + 1 : first + 4] == [
        "changed  train.stop_at: 0 there, 7 here",
        f"the learning rate of step 7 is {after:.1e}; by the schedule it began with it was to be {before:.1e}",
        "the run ends after step 12, and was to end after step 6; step 7 goes on with sample 96 in the same order of"
        " the data",
    ]
    again = train(tmp_path, *fixed, "train.steps=12", "train.stop_at=8").stdout  # it is the run's from then on
    assert "was to be" not in again and MetricsLog.read_rows(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 8


@pytest.mark.parametrize("schedule", ["constant", "inverse_sqrt", "cosine", "linear", "wsd"])
def test_a_learning_rate_that_barely_moves_needs_no_leave(schedule):
    old = compose_config([QUICK, "train.steps=1000", f"optimizer.schedule={schedule}"])
    for step, steps in product((0, 300, 950, 1000), (1001, 1010, 5000, 400)):
        new = compose_config([QUICK, f"train.steps={steps}", f"optimizer.schedule={schedule}"])
        meta = SimpleNamespace(step=step, samples=16 * step)
        was, now = (learning_rate(c.optimizer, step + 1, c.train.steps) for c in (old, new))
        try:
            lines = describe_changed_schedule(old.to_dict(), meta, new)
        except ConfigError:
            assert abs(now / was - 1) > 0.1
            new.resume.allow = ["train.steps"]
            lines = describe_changed_schedule(old.to_dict(), meta, new)
        else:
            assert abs(now / was - 1) <= 0.1
        assert len(lines) == 1 + (now != was)


def test_an_allowed_key_changes_and_is_the_runs_from_then_on(tmp_path, monkeypatch, capfd, through):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(through, tmp_path / "run")
    later = [*SERIAL, "train.steps=8", "checkpoint.every=1", "checkpoint.keep=3", "optimizer.lr=1e-4", "run.dir=run"]
    allow = "resume.allow=[optimizer.lr,train.steps]"
    assert main([QUICK, *SMALL, *FIXED, *later]) == 2
    first, *lines = capfd.readouterr().err.splitlines()
    assert first.startswith(
        f"config: run.dir={tmp_path}/run: holds another run; name another directory, or go on with "
    )
    assert "resume.allow=[optimizer.lr]" in first and len(lines) == 1
    done = train(tmp_path, *later, allow)
    starts = [e["code"] for e in JsonLines.read_objects(tmp_path / "run" / "journal.jsonl") if e["event"] == "starting"]
    assert len(starts) == 2 and starts[0] == starts[1] and starts[0]["platform"]
    old, new = (compose_config([QUICK, *SMALL, *FIXED, *a]).optimizer for a in ([], later))
    (changed,) = (e for e in JsonLines.read_objects(tmp_path / "run" / "journal.jsonl") if e["event"] == "changed")
    assert changed["keys"] == {"optimizer.lr": [old.lr, 1e-4], "train.steps": [6, 8]}
    said = [line for line in done.stdout.splitlines() if line.startswith("changed")]
    assert said == [f"changed  optimizer.lr: {old.lr} there, 0.0001 here", "changed  train.steps: 6 there, 8 here"]
    rows = MetricsLog.read_rows(tmp_path / "run" / "metrics.jsonl")
    assert numbers(tmp_path / "run")[:6] == numbers(through)
    assert [(row["step"], row["lr"]) for row in rows[6:]] == [(k, learning_rate(new, k, 8)) for k in (7, 8)]
    assert main([QUICK, *SMALL, *FIXED, *later]) == 0
    assert "already done: 8 steps" in capfd.readouterr().out


def newer(checkpoint: Path) -> None:
    """A manifest of the next format, sealed."""
    body = (checkpoint / "manifest.json").read_bytes().replace(b'"format": 2', b'"format": 3')
    body = body[: body.rindex(b'"sha256": ')]
    (checkpoint / "manifest.json").write_bytes(body + f'"sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode())


def half_written(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def cut(checkpoint: Path) -> None:
    os.truncate(next(checkpoint.glob("*.bin")), 10)


def whole(checkpoint: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("damage", "arguments", "line"),
    [
        (newer, "checkpoint.url={url}", "checkpoint.url={url}: holds no checkpoint to resume from; {last}: format 3 is "
         "newer than 2, the newest that this version reads; {fifth}: format 3 is newer than 2, the newest that this "
         "version reads; nearest legal: checkpoint.resume=never"),
        (newer, "checkpoint.resume={url}/{last}", "checkpoint.resume={url}/{last}: cannot be resumed from: format 3 is "
         "newer than 2, the newest that this version reads"),
        (half_written, "checkpoint.resume={url}/{last}", "checkpoint.resume={url}/{last}: cannot be resumed from: "
         "incomplete, or not a checkpoint: it has no manifest.json"),
        (half_written, "checkpoint.resume={url}", "checkpoint.resume={url}: holds no checkpoint to resume from; "
         "{last}: incomplete, or not a checkpoint: it has no manifest.json; {fifth}: incomplete, or not a checkpoint: "
         "it has no manifest.json; nearest legal: auto, never, must"),
        (cut, "checkpoint.resume={url}/{last}", "checkpoint.resume={url}/{last}: cannot be resumed from: "
         "blocks-00000.bin has 10 bytes instead of "),
        (whole, "checkpoint.resume=nosuch://x/y", "checkpoint.resume=nosuch://x/y: cannot be used: no storage is "
         "known by nosuch; nearest legal: a path"),
        (whole, "checkpoint.resume=http://127.0.0.1:9/{last}", "checkpoint.resume=http://127.0.0.1:9: cannot be "
         "reached: "),
        (whole, "checkpoint.url={url} resume.allow=[seed]", "resume.allow=seed: samples or their order would be "),
        (whole, "resume.allow=[optimizer.lr]", "resume.allow=optimizer.lr: needs the run to go on from; its default "
         "directory has other values in its name; nearest legal: run.dir=DIRECTORY"),
    ],
)  # fmt: skip
def test_bad_checkpoints_are_refused_in_one_line(tmp_path, monkeypatch, capfd, through, damage, arguments, line):
    """In this process: torch takes seconds."""
    url = tmp_path / "checkpoints"
    for saved in sorted((through / "checkpoints").glob("step-*"))[-2:]:
        shutil.copytree(saved, url / saved.name)
    fifth, last = sorted(url.iterdir())
    damage(fifth), damage(last)
    before = {p: p.read_bytes() if p.is_file() else None for p in tmp_path.rglob("*")}
    monkeypatch.chdir(tmp_path)
    names = {"url": url, "fifth": fifth.name, "last": last.name}
    directory = [] if arguments.startswith("resume.allow") else ["run.dir=run"]
    assert main([QUICK, *SMALL, *FIXED, *SERIAL, STEPS, *directory, *arguments.format(**names).split()]) == (
        69 if "http://127.0.0.1:9" in arguments else 2
    )
    out, err = capfd.readouterr()
    (said,) = err.splitlines()
    assert said.startswith("config: " + line.format(**names)) and not out
    assert {p: p.read_bytes() if p.is_file() else None for p in tmp_path.rglob("*")} == before


KEPT = ("config.yaml", "plan.json", "metrics.jsonl")
PLAIN_USER = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []  # root reads all


@pytest.mark.skipif(
    bool(PLAIN_USER) and not shutil.which("setpriv"), reason="root, and no setpriv to read as others do"
)
@pytest.mark.parametrize("what", ["manifest.json", "*.bin"])
def test_an_unreadable_checkpoint_is_refused(tmp_path, through, what):
    shutil.copytree(through, tmp_path / "run")
    kept = [*(tmp_path / "run").glob("checkpoints/*/*"), *(tmp_path / "run" / f for f in KEPT)]
    before = {path: path.read_bytes() for path in kept}
    for path in (tmp_path / "run" / "checkpoints").glob(f"*/{what}"):
        path.chmod(0)
    arguments = [*FIXED, *SERIAL, "train.steps=8", "checkpoint.every=1", "run.dir=run"]
    line = [*PLAIN_USER, sys.executable, "-m", "platform.launch", QUICK, *SMALL, *arguments]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT)
    (said,) = done.stderr.splitlines()
    assert done.returncode == 2 and "Permission denied" in said and said.startswith("config: checkpoint.")
    for path in before:
        path.chmod(0o644)
    assert {path: path.read_bytes() for path in kept} == before
    assert set((tmp_path / "run").glob("checkpoints/*/*")) == {path for path in kept if "checkpoints" in path.parts}


FULL = '''
"""A storage full://PATH that is full from step 4 on, while $FULL is set."""
import errno, os
import fsspec
from fsspec.implementations.local import LocalFileSystem

class Full(LocalFileSystem):
    protocol = "full"

    def __init__(self, **options):
        super().__init__(**{**options, "auto_mkdir": True})

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("full://"))

    def open(self, path, mode="rb", **more):
        if "w" in mode and "/step-00000004-" in path and os.environ.get("FULL"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().open(path, mode, **more)

fsspec.register_implementation("full", Full, clobber=True)
'''


def test_an_end_that_cannot_be_saved_is_no_success(tmp_path, monkeypatch, through):
    (tmp_path / "full.py").write_text(FULL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FULL", "1")
    storage = ["extend=[full]", f"checkpoint.url=full://{tmp_path}/checkpoints", "checkpoint.every=3"]
    arguments = [*SERIAL, STEPS, "train.stop_at=4", "run.dir=run", *storage]
    done = train(tmp_path, *arguments, status=69)
    *_, last, command = done.stdout.splitlines()
    assert last == "step 4 could not be saved: the same command continues after step 3:"
    assert command.startswith("  python -m platform.launch +experiment=gpt_quick ")
    assert "No space left on device; it is tried again" in done.stdout and "run directory" not in done.stdout
    journal = JsonLines.read_objects(tmp_path / "run" / "journal.jsonl")
    assert [e["event"] for e in journal if "checkpoint" in e["event"]] == ["checkpoint"] + ["checkpoint_failed"] * 3
    assert [(e["step"], e["saved"]) for e in journal if e["event"] == "unsaved"] == [(4, 3)]
    assert "done" not in events(tmp_path / "run")
    monkeypatch.delenv("FULL")
    assert "continues after step 3" in train(tmp_path, *arguments).stdout
    assert numbers(tmp_path / "run") == numbers(through)[:4]

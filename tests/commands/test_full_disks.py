"""Disks that are full: a line that names the key, and no half a file left on them."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from platform.checkpoint.__main__ import main as checkpoint
from platform.cluster.run_directory import read_journal
from platform.data.__main__ import main as data
from platform.launch import main as launch
from platform.weights.__main__ import main as weights
from tests.harness.disks import small_disk

TINY = ["+experiment=gpt_quick", "cluster=inline", "tensor=serial", "parallel.data=1", "model.layers=1",
        "model.d_model=32", "model.heads=2", "model.length=32", "model.vocab=300", "train.steps=1",
        "train.global_batch=2", "train.microbatch=2", "eval.every=0", "monitor.sample=0",
        "optimizer.warmup_steps=0"]  # fmt: skip


@pytest.fixture
def disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with small_disk(tmp_path / "small", "64k") as small:
        yield small


@pytest.fixture
def text(tmp_path):
    r = random.Random(0)
    words = "".join("".join(r.choices("abcdefgh ", k=80)) + "\n" for _ in range(3000))
    (tmp_path / "d.txt").write_text(words)
    return [*TINY, "data=text", f"data.path={tmp_path}/d.txt"]


def test_a_full_cache(disk, text, tmp_path, capsys):
    line = f"config: data.cache={disk.path}: cannot be written: No space left on device; nearest legal: another place"
    for command in (lambda: launch([*text, f"data.cache={disk.path}", "run.dir=run"]),
                    lambda: data(["prepare", *text, f"data.cache={disk.path}"])):  # fmt: skip
        assert command() == 69
        assert capsys.readouterr().err.splitlines()[-1] == line
        assert os.listdir(disk.path) == []
    assert not (tmp_path / "run").exists()


def test_tokens_that_do_not_fit_are_not_there_at_all(disk, text, capsys):
    for kind in ("megatron", "nanogpt"):
        assert data(["convert", kind, f"{disk.path}/out", *text, "data.cache=cache"]) == 69
        assert capsys.readouterr().err.startswith(f"config: PREFIX={disk.path}/out: cannot be written: No space left")
        assert os.listdir(disk.path) == []


def test_a_model_that_does_not_fit_leaves_no_folder(disk, text, capsys):
    assert launch([*text, "data.cache=cache", "run.dir=run", "checkpoint.every=1"]) == 0
    capsys.readouterr()
    starting, *_ = read_journal(Path("run"))
    assert starting.command.startswith("python -m ") and starting.command.endswith(" run.dir=run checkpoint.every=1")
    assert weights(["export", "run/checkpoints", f"{disk.path}/a/model"]) == 69
    assert capsys.readouterr().err.startswith(f"weights: folder={disk.path}/a/model: cannot be written: No space left")
    assert os.listdir(disk.path) == []
    for form in ("safetensors", "dcp"):
        assert checkpoint(["export", "run/checkpoints", f"{disk.path}/w", "--format", form]) == 69
        full = f"checkpoint: target={disk.path}/w: cannot be written: No space left on device; nearest legal: another"
        assert capsys.readouterr().err.startswith(full)
        assert os.listdir(disk.path) == []


def test_a_checkpoint_that_does_not_fit_leaves_none(disk, text, capsys):
    assert launch([*text, "data.cache=cache", "run.dir=run", "checkpoint.every=1"]) == 0
    assert weights(["export", "run/checkpoints", "model"]) == 0
    assert checkpoint(["export", "run/checkpoints", "w.safetensors"]) == 0
    capsys.readouterr()
    for name, command, source in (("weights", weights, "model"), ("checkpoint", checkpoint, "w.safetensors")):
        assert command(["import", source, f"{disk.path}/made"]) == 69
        assert capsys.readouterr().err.startswith(f"{name}: url={disk.path}/made: cannot be written: No space left")
        assert [*Path(disk.path).rglob("*.*")] == []

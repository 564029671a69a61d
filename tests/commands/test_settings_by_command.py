"""The page's own optimizer, schedule and loss with settings, by command: trained, shown, kept, resumed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from platform.monitor import MetricsLog
from tests.docs.pages import files
from tests.harness.commands import QUICK, SMALL, command, in_this_process, refused
from tests.harness.registries import as_before

FIXED = (
    "extend=[tuned] data=synthetic precision=fp64 checkpoint.every=100 train.steps=4 optimizer.warmup_steps=0"
    " train.global_batch=8 train.microbatch=2 optimizer.kind=tuned_rms optimizer.schedule=staircase"
    " optimizer.schedule_settings.at=[1] train.loss=tuned_focal optimizer.lr=0.01"
).split()
ONE = "cluster=inline tensor=serial parallel.data=1".split()
TWO = "cluster=processes tensor=1d tensor.axes.t=2 parallel.data=1".split()
SETTINGS = "optimizer.settings.decay=0.5 train.loss_settings.power=1 optimizer.schedule_settings.factor=0.5".split()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "tuned.py").write_text(files()["tuned.py"])
    monkeypatch.syspath_prepend(str(tmp_path))  # as `python -m` does
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with as_before("tuned"):
        yield tmp_path


def train(cwd: Path, run: str, *arguments: str) -> tuple[list[dict], str]:
    launch = in_this_process if "cluster=inline" in arguments else command
    done = launch(QUICK, *SMALL, *FIXED, f"run.dir={run}", *arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return MetricsLog.read_rows(cwd / run / "metrics.jsonl"), done.stdout


def losses(rows: list[dict]) -> list[float]:
    return [row["loss"] for row in rows]


def test_a_run_has_them(folder):
    rows, said = train(folder, "run", *ONE, *SETTINGS)
    assert [row["lr"] for row in rows] == pytest.approx([0.01, 0.005, 0.005, 0.005])
    assert "settings  train.loss_settings.power=1.0, train.loss_settings.reduced=no, optimizer.settings.deca" in said
    kept = yaml.safe_load((folder / "run" / "config.yaml").read_text())
    assert kept["optimizer"]["settings"] == {"decay": 0.5, "centered": False}
    assert kept["train"]["loss_settings"] == {"power": 1.0, "reduced": "no"}
    [manifest] = (folder / "run" / "checkpoints").glob("*/manifest.json")
    assert '"decay":0.5' in manifest.read_text().replace(" ", "")
    goes_on_with_the_same(folder, losses(rows))


@pytest.mark.full
def test_each_of_them_counts(folder):
    one = losses(train(folder, "run", *ONE, *SETTINGS)[0])
    for i, other in enumerate((*SETTINGS, "train.loss_settings.reduced=half", "optimizer.settings.centered=true")):
        others = [s for s in SETTINGS if s != other]
        changed = losses(train(folder, f"other-{i}", *ONE, *others, *([] if other in SETTINGS else [other]))[0])
        assert changed[-1] != pytest.approx(one[-1], rel=1e-9), other


@pytest.mark.full
def test_workers_have_what_the_driver_has(folder):
    one, two = (losses(train(folder, run, *where, *SETTINGS)[0]) for run, where in (("one", ONE), ("two", TWO)))
    assert two == pytest.approx(one, rel=1e-9)


def goes_on_with_the_same(folder: Path, first: list[float]) -> None:
    more = [*ONE, *SETTINGS, "train.steps=6"]
    lines = refused(QUICK, *FIXED, *more, "optimizer.settings.decay=0.6", "run.dir=run", cwd=folder)
    assert "resume.allow=[optimizer.settings]" in lines[0]
    assert any(line.endswith("optimizer.settings.decay: 0.5 there, 0.6 here") for line in lines)
    allowed = ["optimizer.settings.decay=0.6", "resume.allow=[optimizer.settings]"]
    rows, _ = train(folder, "run", *more, *allowed)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and losses(rows)[:4] == first


def test_wrong_ones_are_refused_together_before_anything_starts(folder):
    typed = ["optimizer.settings.decy=0.5", "train.loss_settings.reduced=3", "optimizer.settings.centered=maybe"]
    lines = refused(*FIXED, *ONE, *typed, "train.steps=0", "run.dir=run", cwd=folder)
    assert [line.removeprefix("config: ").partition(":")[0] for line in lines] == [
        "train.steps=0",
        "train.loss_settings.reduced=3",
        "optimizer.settings.centered=maybe",
        "optimizer.settings.decy=0.5",
    ]

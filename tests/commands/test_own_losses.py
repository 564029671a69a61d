"""The page's own loss and weights of labels, by command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from platform.monitor import MetricsLog
from tests.docs.pages import files
from tests.harness.commands import QUICK, SMALL, command, in_this_process, refused
from tests.harness.registries import as_before

FIXED = (
    "extend=[careful] data=synthetic precision=fp64 checkpoint.every=100 eval.every=2 eval.batches=1 train.steps=4"
    " optimizer.warmup_steps=2 train.global_batch=8 train.microbatch=2 model.layers=2 model.vocab=300"
).split()
ONE = "cluster=inline tensor=serial parallel.data=1".split()
STAGES = "cluster=processes tensor=1d tensor.axes.t=2 parallel.data=1 pipeline=1f1b pipeline.stages=2".split()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "careful.py").write_text(files()["careful.py"])
    monkeypatch.syspath_prepend(str(tmp_path))  # as `python -m` does
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with as_before("careful"):
        yield tmp_path


def train(cwd: Path, *arguments: str) -> list[dict]:
    launch = in_this_process if "cluster=inline" in arguments else command
    done = launch(QUICK, *SMALL, *FIXED, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = [a.removeprefix("run.dir=") for a in arguments if a.startswith("run.dir=")]
    return MetricsLog.read_rows(cwd / run / "metrics.jsonl")


def numbers(rows: list[dict]) -> list[float]:
    return [row[key] for row in rows for key in ("loss", "grad_norm", "val_loss") if row.get(key) is not None]


@pytest.mark.full
def test_two_plans_learn_the_same_by_it(folder):
    whole = train(folder, *ONE, "data.objective=weighed", "run.dir=whole")
    split = train(folder, *STAGES, "data.objective=weighed", "run.dir=split")
    assert numbers(split) == pytest.approx(numbers(whole), rel=1e-9) and len(numbers(whole)) == 10
    plain = train(folder, *ONE, "run.dir=plain")
    assert whole[0]["loss"] < plain[0]["loss"] - 0.01  # focal
    assert whole[1]["val_loss"] == pytest.approx(plain[1]["val_loss"], rel=0.02)
    lines = refused(*FIXED, *ONE, "run.dir=plain", "train.loss=focal", "train.steps=6", cwd=folder)
    assert "train.loss" in "\n".join(lines) and "resume.allow" in lines[0]
    again = train(folder, *ONE, "run.dir=plain", "train.loss=focal", "train.steps=6", "resume.allow=[train.loss]")
    assert [row["step"] for row in again] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("train.loss=focl", "train.loss=focl: unknown; nearest legal: focal"),
        ("data.objective=spoiled", "makes 'label_weights' with a weight that is no finite number"),
        ("data.objective=short", "makes 'label_weights' as float32 of shape [1, 3] for one sample; the model reads"),
        ("data.objective=none", "makes no data tensor 'label_weights', which the model reads"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(folder, typed, reason):
    with (folder / "careful.py").open("a") as module:
        module.write(BAD)
    line, *_ = refused(*FIXED, *ONE, typed, "run.dir=run", cwd=folder)
    assert reason in line


BAD = """
class Bad(Weighed):
    made = None
    def batch(self, stream, index, keys):
        found = super().batch(stream, index, keys)
        del found["label_weights"]
        return {**found, **self.made}

def bad(name, **made):
    kind = type(name, (Bad,), {"made": made})
    register_objective(name, lambda s: kind(s.length), weighted=True)

bad("spoiled", label_weights=np.full((1, 16), np.nan))
bad("short", label_weights=np.ones((1, 3), np.float32))
bad("none")
"""

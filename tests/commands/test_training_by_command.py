"""Runs whose batch and sequences grow, with frozen and averaged weights: under other plans, after failures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from platform.boundary.storage import open_storage
from platform.checkpoint import catalogue
from platform.checkpoint.moves import read_tensor
from platform.monitor import JsonLines, MetricsLog
from platform.weights.importing import swap_in_averages
from tests.harness.commands import QUICK, SMALL, in_this_process, refused, warm_command

FIXED = (
    "data=synthetic precision=fp64 checkpoint.every=100 eval.every=2 eval.batches=1 train.steps=8"
    " optimizer.warmup_steps=2 train.global_batch=8 train.microbatch=2 train.ramp_from=2 train.ramp_by=2"
    " train.ramp_samples=12 train.length_ramp=[0:4,4:8,6:16]"
    " train.ema=0.5 eval.averaged=true train.freeze=[embedding,layers.0.*] monitor.layers=3"
).split()
ONE = "cluster=inline tensor=serial parallel.data=1".split()
STAGES = "cluster=processes tensor=1d tensor.axes.t=2 parallel.data=1 pipeline=1f1b pipeline.stages=2".split()
SHARDS = "cluster=processes tensor=serial parallel.data=2 parallel.zero=3 elastic.faults=[6:kill:1:backward]".split()


def train(cwd: Path, *arguments: str) -> list[dict]:
    done = in_this_process(QUICK, *SMALL, "model.layers=2", *FIXED, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = [a.removeprefix("run.dir=") for a in arguments if a.startswith("run.dir=")]
    return MetricsLog.read_rows(cwd / run / "metrics.jsonl")


def tensors(run: Path, averaged: bool = False) -> dict[str, np.ndarray]:
    """The weights in a run's newest checkpoint."""
    storage = open_storage(str(run / "checkpoints"))
    newest = catalogue.find_newest_checkpoint(storage, verifies_bytes=False, quarantines=False)
    manifest = swap_in_averages(newest.manifest) if averaged else newest.manifest
    names = [name for name in manifest.tensors if name.startswith("model.")]
    return {name: read_tensor(storage, newest.directory, manifest, name).numpy() for name in names}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """A folder with the run of one process, in one go."""
    folder = tmp_path_factory.mktemp("training")
    train(folder, *ONE, "run.dir=whole")
    return folder


def test_two_plans_and_a_failure_give_the_same_run(alone):
    train(alone, *STAGES, "train.stop_at=4", "run.dir=halves")
    actual, wanted = train(alone, *SHARDS, "run.dir=halves"), MetricsLog.read_rows(alone / "whole" / "metrics.jsonl")
    assert [row["samples"] for row in actual] == [row["samples"] for row in wanted]
    assert [end - first for first, end in (row["samples"] for row in actual)] == [2, 2, 4, 6, 8, 8, 8, 8]
    assert [row["length"] for row in actual] == [4, 4, 4, 4, 8, 8, 16, 16]  # resumed and failed at ends of lengths
    events = [event["event"] for event in JsonLines.read_objects(alone / "halves" / "journal.jsonl")]
    assert "failure" in events
    for have, want in zip(actual, wanted, strict=True):
        for key in want.keys() & {"loss", "grad_norm", "val_loss", "tokens"}:
            assert have[key] == pytest.approx(want[key], rel=1e-9), (have["step"], key)
        for key in ("layer_grad_norms", "layer_rms"):
            assert (key in have) == (have["step"] % 3 == 0)
            assert have.get(key, {}) == {layer: pytest.approx(x, rel=1e-9) for layer, x in want.get(key, {}).items()}
    for averaged in (False, True):
        ours, theirs = (tensors(alone / run, averaged) for run in ("halves", "whole"))
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-8, atol=1e-11)


def test_frozen_weights_are_those_of_the_start_and_averages_lag(alone):
    train(alone, *ONE, "train.stop_at=1", "run.dir=begun")
    first, last, averages = tensors(alone / "begun"), tensors(alone / "whole"), tensors(alone / "whole", averaged=True)
    same = {name for name in first if np.array_equal(first[name], last[name])}
    assert same == {n for n in first if n == "model.embedding" or n.startswith("model.layers.0.")}
    assert {name for name in first if np.array_equal(averages[name], last[name])} == same


def test_averages_are_what_another_run_starts_from(alone):
    start = "train.init=whole/checkpoints train.stop_at=1 optimizer.lr=0 train.ema=0".split()
    kept = [a for a in FIXED if "averaged" not in a and "ema" not in a]
    for name, averaged in (("from_averages", True), ("from_weights", False)):
        more = ["train.init_averaged=true"] if averaged else []
        done = in_this_process(
            QUICK, *SMALL, "model.layers=2", *kept, *ONE, *start, *more, f"run.dir={name}", cwd=alone
        )
        assert done.returncode == 0, done.stdout + done.stderr
        ours, theirs = tensors(alone / name), tensors(alone / "whole", averaged)
        assert all(np.array_equal(ours[tensor], value) for tensor, value in theirs.items())
    lines = refused(QUICK, *SMALL, *ONE, *start, "train.init=from_weights/checkpoints", "train.init_averaged=true",
                    "model.layers=2", cwd=alone)  # fmt: skip
    assert "holds no averaged weights" in lines[0]


def test_a_run_that_learns_no_more_ends_and_stays_ended(tmp_path):
    early = "eval.every=1 eval.patience=2 optimizer.lr=0 train.steps=50 run.dir=early".split()
    for said in (
        "ends early after step 3: its lowest val loss",
        "already done: 3 steps, after which it learned no more",
    ):
        done = in_this_process(QUICK, *SMALL, "data=synthetic", *ONE, *early, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = MetricsLog.read_rows(tmp_path / "early" / "metrics.jsonl")
        assert len(rows) == 3, "one evaluation to be lower than, and two that are not"
        assert said in done.stdout
    [event] = [e for e in JsonLines.read_objects(tmp_path / "early" / "journal.jsonl") if e["event"] == "learned_out"]
    assert event["step"] == 3 and event["best_step"] == 1
    assert json.dumps(event["best_loss"]) == json.dumps(rows[0]["val_loss"])


@pytest.mark.full
def test_prompts_of_ones_own_are_continued_at_each_evaluation(tmp_path):
    texts = ["eval.every=2", "eval.prompts=[ab,'a wolf, and']", "eval.prompt_tokens=3", "train.steps=4", "run.dir=r"]
    for how in (ONE, "cluster=processes tensor=1d tensor.axes.t=2 parallel.data=1".split()):
        more = ["data=synthetic", "precision=fp64", *texts, *how, f"run.dir={how[1]}"]
        done = warm_command(QUICK, *SMALL, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    samples = [
        [e for e in JsonLines.read_objects(p) if e["event"] == "sampled"] for p in tmp_path.glob("*/journal.jsonl")
    ]
    told = [[(e["step"], e["prompt"], e["text"]) for e in events] for events in samples]
    assert told[0] == told[1] and len(told[0]) == 4 and len({text for _, _, text in told[0]}) > 1
    assert [(step, prompt) for step, prompt, _ in told[0]] == [
        (step, prompt) for step in (2, 4) for prompt in ("ab", "a wolf, and")
    ]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("train.ramp_from=16", "train.ramp_from=16: must be < train.global_batch=8; nearest legal: 0"),
        ("train.ramp_from=2 train.ramp_by=4", "train.ramp_by=4: must divide train.global_batch - train.ramp_from = 6"),
        ("train.ramp_from=2 train.ramp_by=2", "train.ramp_samples=0: train.ramp_from needs the samples over which"),
        ("train.length_ramp=[0:16,9:24]", "train.length_ramp=9:24: must divide model.length=16, so that pieces of"),
        ("train.ramp_samples=5", "train.ramp_samples=5: train.ramp_from=0: the batch does not grow; nearest legal: 0"),
        ("train.freeze=[layer.*]", "train.freeze=layer.*: matches no parameter of the model; nearest legal: layers.0"),
        ("train.freeze=['*']", "train.freeze=*: leaves no parameter to train"),
        ("eval.patience=2", "eval.patience=2: eval.every=0: there are no evaluations; nearest legal: 0"),
        ("eval.tasks=[x]", "eval.tasks=x: eval.every=0: there are no evaluations; nearest legal: []"),
        ("eval.task_samples=4", "eval.task_samples=4: only eval.tasks reads it; nearest legal: 0"),
        ("eval.tasks=[x] eval.every=1 model.kind=encoder", "eval.tasks=x: model.kind=encoder answers no texts"),
        ("eval.averaged=true", "eval.averaged=true: train.ema=0: no averages are kept; nearest legal: false"),
        ("train.init_averaged=true", "train.init_averaged=true: train.init names no run"),
        ("train.ema=1", "train.ema=1.0: must be >= 0 and < 1"),
    ],
)
def test_mistakes_are_refused(tmp_path, arguments, line):
    lines = refused(QUICK, *SMALL, "data=synthetic", "train.global_batch=8", *ONE, *arguments.split(), cwd=tmp_path)
    assert any(line in printed for printed in lines), lines

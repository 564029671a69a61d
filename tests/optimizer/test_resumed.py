"""Optimizer state that differs by parameter, saved under one plan and restored under another."""

from __future__ import annotations

import pytest
import torch

from platform.boundary.storage import open_storage
from platform.checkpoint import catalogue
from platform.checkpoint.moves import read_tensor
from platform.monitor import MetricsLog
from platform.plan.model_types import Parameter
from tests.harness.commands import QUICK, SMALL, command, in_this_process

FIXED = "data=synthetic precision=fp64 model.layers=2 model.bias=false eval.every=0 train.steps=6 checkpoint.every=100"
ONE = "cluster=inline tensor=serial parallel.data=1".split()
SPLIT = "cluster=processes tensor=1d tensor.axes.t=2 parallel.data=2 parallel.zero=1".split()
STAGES = "cluster=processes tensor=serial parallel.data=1 pipeline=1f1b pipeline.stages=2".split()


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["muon", "sgd", "adafactor"])
def test_halves_under_two_plans_are_one_run(optimizer, tmp_path):
    for where, more in (
        (ONE, ["run.dir=whole"]),
        (SPLIT, ["run.dir=halves", "train.stop_at=3"]),
        (STAGES, ["run.dir=halves"]),
    ):
        launch = in_this_process if where is ONE else command
        done = launch(QUICK, *SMALL, *FIXED.split(), f"optimizer={optimizer}", *where, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = (MetricsLog.read_rows(tmp_path / run / "metrics.jsonl") for run in ("halves", "whole"))
    for have, want in zip(ours, theirs, strict=True):
        assert have["loss"] == pytest.approx(want["loss"], rel=1e-9)
    storages = {run: open_storage(str(tmp_path / run / "checkpoints")) for run in ("halves", "whole")}
    saved = {
        run: (storage, catalogue.find_newest_checkpoint(storage, verifies_bytes=False, quarantines=False))
        for run, storage in storages.items()
    }
    names = {run: set(at.manifest.tensors) for run, (_, at) in saved.items()}
    assert names["halves"] == names["whole"]
    if optimizer == "muon":
        assert "exp_avg.layers.0.mlp.up" in names["whole"] and "exp_avg_sq.layers.0.mlp.up" not in names["whole"]
    if optimizer == "adafactor":
        assert "row_var.layers.0.mlp.up" in names["whole"] and "variance.layers.0.mlp.up" not in names["whole"]
    for name in names["whole"]:
        have, want = (read_tensor(storage, at.directory, at.manifest, name) for storage, at in saved.values())
        torch.testing.assert_close(have, want, rtol=1e-8, atol=1e-11)


def test_whole_moments_of_an_older_version_are_refused_with_a_cure(tmp_path, monkeypatch):
    """To it a router was a row for each expert; Muon's momentum has one form, and is read."""
    fixed = [*SMALL, *FIXED.split(), *ONE, "model.experts=4", "model.experts_per_token=2"]
    for optimizer in ("adafactor", "muon"):
        run = [QUICK, *fixed, f"optimizer={optimizer}", f"run.dir={optimizer}"]
        with monkeypatch.context() as older:
            older.setattr(Parameter, "num_stack_dims", property(lambda p: int(p.dims[:1] == ("experts",))))
            done = in_this_process(*run, "train.stop_at=3", cwd=tmp_path)
            assert done.returncode == 0, done.stdout + done.stderr
        done = in_this_process(*run, cwd=tmp_path)
        if optimizer == "muon":
            assert done.returncode == 0, done.stdout + done.stderr
            continue
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stdout + done.stderr
        assert "keeps whole second moments of layers.0.mlp.router" in done.stderr
        cure = done.stderr.rpartition("train.init=")[2].strip()
        done = in_this_process(*run[:-1], "run.dir=own", f"train.init={cure}", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr

"""An Indexed Job whose pods are processes here: torchrun in each, one killed and started again, to the run's end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from platform.jobs.kubernetes import render_kubernetes_job
from platform.monitor import JsonLines
from tests.harness.commands import QUICK, SMALL, command
from tests.harness.indexed_job import IndexedJob
from tests.harness.watched import Watched

LIMIT = 200  # seconds for any one thing: only bounds a failing test, on a machine that may be busy
RUN = [
    *(QUICK, *SMALL, "data=synthetic", "precision=fp64", "model.dropout=0.1", "optimizer.warmup_steps=2"),
    *("tensor=serial", "parallel.data=2", "job.workers=1", "cluster.device=cpu"),
]


def indexed_job(folder: Path, *typed: str, **environment: str) -> IndexedJob:
    mount = folder / "shared"
    mount.mkdir()
    own = [f"checkpoint.url={mount}/checkpoints", f"job.mount={mount}", "job.image=i", "job.claim=c"]
    text = render_kubernetes_job([*RUN, *own, "job.launcher=torchrun", *typed])
    [job] = [document for document in yaml.safe_load_all(text) if document["kind"] == "Job"]
    return IndexedJob(job, folder, PYTHONPATH=os.environ["PYTHONPATH"], **environment)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_pod_that_is_killed_comes_back_and_the_run_ends_with_all_its_steps(tmp_path, monkeypatch):
    """Two pods. The second is killed: the run goes on without it, and with it again once the Job has started it."""
    doubles = str(Path(__file__).parents[1] / "doubles")  # a module alone: a manifest carries packages whole
    monkeypatch.syspath_prepend(doubles)
    monkeypatch.setenv("PYTHONPATH", doubles, prepend=os.pathsep)
    slow = "extend=[slow_steps]"
    job = indexed_job(tmp_path, "train.steps=40", "checkpoint.every=1000", slow, STEP_SECONDS="0.5")
    run = Watched(tmp_path / "shared" / "runs" / "gpt-quick")
    try:
        job.until(lambda: run.step >= 3, LIMIT)
        assert {row["world_size"] for row in run.rows()} == {2}
        job.lose(1)
        job.until(lambda: run.rows()[-1]["world_size"] == 1, LIMIT, keep=False)
        job.until(lambda: run.rows()[-1]["world_size"] == 2, LIMIT)
        job.until(job.look, LIMIT)
    finally:
        job.end()
    assert job.statuses == {0: [0], 1: [137, 0]} and not job.failed, job.said()
    assert run.step == 40 and [row["step"] for row in run.rows()] == list(range(1, 41))
    ends = [line["status"] for line in JsonLines.read_objects(run.path / "drivers.jsonl") if line["event"] == "ended"]
    assert ends == [75, 0]
    assert "pod 1 is there again: the run saves, and goes on with all pods" in job.said()
    alone = [word for word in RUN if not word.startswith(("job.", "parallel."))]
    done = command(*alone, "parallel.data=1", "train.steps=40", "cluster=inline", "run.dir=alone", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for have, want in zip(run.rows(), Watched(tmp_path / "alone").rows(), strict=True):
        assert have["loss"] == pytest.approx(want["loss"], rel=1e-9, abs=0)

"""The commands that both jobs compose: stopped they save, with the status that brings the job back, and then go on."""
# ruff: noqa: F811

import json
import shlex
import signal
from math import inf
from pathlib import Path

import pytest

from platform.cluster import driver
from platform.cluster.crew.base.signals import StopSignals
from platform.cluster.run.resources import Places
from platform.launch import compose
from platform.planning.make_plan import make_plan
from tests.doubles.fake_crew import FakeCrew
from tests.jobs.test_rayjob import JOB
from tests.jobs.test_sbatch import job, run  # noqa: F401

SHRUNK = (
    "model.layers=2 model.d_model=64 model.heads=4 model.length=32 model.vocab=512 tensor.axes.t=2 elastic.spares=0"
)
SHRUNK += " pipeline.stages=1 pipeline=none train.steps=6 train.global_batch=8 data=synthetic cluster.device=cpu"
SHRUNK += " optimizer.warmup_steps=0 monitor=console"


def kubernetes(job):
    return shlex.split(JOB["spec"]["entrypoint"])[3:]


def slurm(job):
    [launch] = [call for call in run(job)[1] if call.startswith("python")]
    return shlex.split(launch)[3:]


@pytest.mark.parametrize("command", [kubernetes, slurm])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_stop_requeue_resume(job, monkeypatch, tmp_path, command, number):
    found: list[StopSignals] = []
    enter = StopSignals.__enter__
    monkeypatch.setattr(StopSignals, "__enter__", lambda self: found.append(self) or enter(self))
    monkeypatch.setattr("platform.checkpoint.storage.catalogue._check", lambda storage, directory, manifest: None)
    monkeypatch.setattr(driver.resources, "reserve_workers", lambda *_, **__: Places("cpu", 2, inf))
    composed = [word for word in command(job) if not word.startswith(("pipeline.", "elastic.spares", "monitor="))]
    config = compose([*composed, *SHRUNK.split(), f"run.dir={tmp_path}/run"])
    assert config.checkpoint.every == "30m" and config.checkpoint.on_stop and config.checkpoint.resume == "auto"
    script = {"step(3)": [lambda crew: found[-1]._handle(number, None)]}
    monkeypatch.setattr(driver, "open_crew", lambda kind, job, spares: FakeCrew(job, spares, script))
    assert driver.run(config, make_plan(config), experiment="gpt175b") == 75
    script.clear()
    assert driver.run(config, make_plan(config), experiment="gpt175b") == 0
    rows = [json.loads(line)["step"] for line in Path(config.run.dir, "metrics.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3, 4, 5, 6]

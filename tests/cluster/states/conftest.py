"""Runs of the real controller, plans, checkpoints and journal, with a crew that plays a script."""

import signal

import pytest

from platform.cluster import driver
from platform.cluster.control import recruiter
from platform.cluster.control.checkpoints import Checkpoints
from platform.cluster.crew.signals import StopSignals
from platform.predict.make_plan import make_plan
from tests.doubles.fake_crew import FakeCrew
from tests.harness.oracle import configure
from tests.harness.scripted_run import TYPED


@pytest.fixture
def config(tmp_path):
    """Four replicas, which lose nothing."""
    config = configure(tensor="serial", data=4, global_batch=8, microbatch=1, layers=1)
    config.run.dir, config.data.kind, config.cluster.kind = str(tmp_path / "run"), "synthetic", "processes"
    config.train.steps, config.checkpoint.every = 6, 0
    config.elastic.wait = 0.02
    return config


@pytest.fixture
def drive(config, monkeypatch, capsys):
    """Runs it with this script; afterwards `drive.out` is what was said, `drive.crew` who did it."""
    monkeypatch.setattr(recruiter, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr("platform.cluster.control.checkpoints.POLL_SECONDS", 0.001)
    monkeypatch.setattr("platform.checkpoint.catalogue._check_files", lambda storage, directory, manifest: None)

    def drive(script=None, prepare=lambda crew: None, nodes=1):
        def open_crew(kind, job, spares):
            drive.crew = FakeCrew(job, spares, script or {}, nodes)
            prepare(drive.crew)
            return drive.crew

        monkeypatch.setattr(driver, "open_crew", open_crew)
        status = driver.drive_run(config, make_plan(config), command=TYPED)
        drive.out, drive.err = capsys.readouterr()
        return status

    return drive


@pytest.fixture
def at_once(monkeypatch):
    """Checkpoints are on storage before the next step, which here takes no time."""
    save = Checkpoints.begin_save

    def save_and_finish(self, crew, *args):
        save(self, crew, *args)
        self.finish_save(crew)

    monkeypatch.setattr(Checkpoints, "begin_save", save_and_finish)


@pytest.fixture
def signals(monkeypatch):
    """Those of the drivers so far."""
    entered = []
    enter = StopSignals.__enter__
    monkeypatch.setattr(StopSignals, "__enter__", lambda self: entered.append(self) or enter(self))
    return entered


@pytest.fixture
def stop(signals):
    """A crew's action: a signal comes."""
    return lambda crew: signals[-1]._receive_signal(signal.SIGUSR1, None)

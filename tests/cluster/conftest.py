from copy import deepcopy

import pytest

from platform.cluster.crew.base.job import Job
from platform.config.fields import Config
from tests.harness import warm


@pytest.fixture(scope="session")
def warm_server():
    """Runs before what runs on this machine is listed."""
    warm.shared()


@pytest.fixture
def warm_workers(warm_server, monkeypatch):
    """Crews of processes share a fork server; in tests/cluster/crew/test_crew.py, and by command, each starts its own,
    as a user's does."""
    monkeypatch.setattr("platform.cluster.crew.launchers.processes.ForkServer", lambda place: warm.shared())


@pytest.fixture
def config(tmp_path):
    config = Config()
    config.run.dir = str(tmp_path / "run")
    config.data.kind = "synthetic"
    config.cluster.kind = "processes"
    config.train.steps = 5
    config.elastic.snapshot_every = 0  # fake workers have no state
    return config


@pytest.fixture
def job(config, tmp_path):
    def make(size, worker="tests.doubles.fake_worker:FakeWorker"):
        coordinates = [{"stage": 0, "data": rank} for rank in range(size)]
        return Job(deepcopy(config), coordinates, "cpu", tmp_path, worker)

    return make

from copy import deepcopy

import pytest

from platform.cluster.crew.job import Job
from platform.config.fields import Config


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

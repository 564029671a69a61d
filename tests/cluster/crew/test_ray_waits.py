"""A start on Ray that takes its time, with a Ray that plays a script: no process is started."""

import logging

import pytest

from platform.cluster.crew import ray_actors
from platform.cluster.crew.failures import NoPlaces


@pytest.fixture
def pass_time(monkeypatch):
    """Every turn lasts 10 s of a clock that nothing else moves."""
    now = [0.0]
    monkeypatch.setattr(ray_actors, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_a_slow_start_is_waited_for_and_said(job, pass_time, caplog):
    caplog.set_level(logging.INFO, "platform.cluster")
    there = iter([0, 0, 0, 0, 0, 0, 0, 3, 4])  # after 80 s

    def ready(seconds):
        pass_time(seconds)
        return next(there)

    ray_actors._await_workers(job(4), ready, 4)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 8 and said[-1] == "waiting for Ray to start 4 times {'CPU': 1.0}, 3 of 4 there, up to 520 s"


def test_a_start_that_never_comes_is_no_mistake_of_the_configuration(job, pass_time):
    with pytest.raises(NoPlaces, match=r"waited 600 s for Ray to start 4 times {'CPU': 1.0}, 2 of 4 there"):
        ray_actors._await_workers(job(4), lambda seconds: pass_time(seconds) or 2, 4)

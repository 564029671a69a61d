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
    counts = iter([0, 0, 0, 0, 0, 0, 0, 3, 4])  # after 80 s

    def ready(seconds):
        pass_time(seconds)
        return next(counts)

    ray_actors._await_workers(job(4), ready, 4)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 8 and said[-1] == "waiting for Ray to start 4 times {'CPU': 1.0}, 3 of 4 there, up to 520 s"


def test_a_start_that_never_comes_is_no_mistake_of_the_configuration(job, pass_time):
    with pytest.raises(NoPlaces, match=r"waited 600 s for Ray to start 4 times {'CPU': 1.0}, 2 of 4 there"):
        ray_actors._await_workers(job(4), lambda seconds: pass_time(seconds) or 2, 4)


def test_who_lost_a_race_for_places_holds_none_of_them(job, pass_time, monkeypatch):
    """Ray grants the same places to two runs that ask at once, and starts some actors of each: both kill theirs and
    choose anew, longer from try to try, until all of one start."""
    import ray

    host = ray_actors.ActorHost(lambda *news: None)
    started, killed, patience = iter([1, 2, 3]), [], []

    class Actor:
        locate = type("Locate", (), {"remote": staticmethod(lambda: "where")})

    def wait(refs, num_returns, timeout):
        patience.append(timeout)
        pass_time(timeout)
        return refs[: next(started)], []

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: killed.append(actor))
    monkeypatch.setattr(ray_actors, "_choose_nodes", lambda job, size: ["a"] * size)
    monkeypatch.setattr(ray_actors, "_create_actor", lambda job, node: Actor())
    assert host._create_initial_actors(job(3), range(3)) == ["where"] * 3
    assert len(killed) == 6 and not set(killed) & set(host._actors.values())
    assert all(20 * 2**i <= seconds <= 40 * 2**i for i, seconds in enumerate(patience))
    started = iter([1] * 100)
    with pytest.raises(NoPlaces, match="waited 600 s for Ray to start 3 workers"):
        host._create_initial_actors(job(3), range(3))
    assert not host._actors

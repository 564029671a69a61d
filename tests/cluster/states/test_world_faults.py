"""A fault of the world before and while a run trains: it is waited for, and no run with a checkpoint ends by it."""

from __future__ import annotations

import errno

import pytest

from platform.boundary.refusals import ConfigError
from platform.boundary.world_faults import UNAVAILABLE
from platform.cluster import driver, origin
from platform.cluster.control import controller
from platform.cluster.crew.failures import Failure, WorkerFailed
from tests.harness.scripted_run import events, once_each


@pytest.fixture
def down(monkeypatch):
    """Lets the storage's first so many answers be an error of the system; the pauses that were made."""
    pauses, find = [], origin.find_resume_checkpoint

    def broken(count, number=errno.EIO):
        def find_or_fail(config, *of, **how):
            if len(pauses) < count:
                try:
                    raise OSError(number, "what")
                except OSError as error:
                    raise ConfigError("checkpoint.url", "u", f"cannot be reached: {error}") from None
            return find(config, *of, **how)

        monkeypatch.setattr(origin, "find_resume_checkpoint", find_or_fail)
        return pauses

    monkeypatch.setattr(driver, "sleep", pauses.append)
    return broken


def test_a_run_that_has_steps_waits_for_its_storage(config, drive, stop, down):
    assert drive({"step(3)": [stop]}) == 75
    config.elastic.wait = 600.0
    pauses = down(4)
    assert drive() == 0 and once_each(config)
    assert pauses == [1, 2, 4, 8] and drive.out.count("cannot be reached: [Errno 5] what: tries again in") == 4


def test_a_limit_of_the_user_ends_the_waiting(config, drive, stop, down):
    assert drive({"step(3)": [stop]}) == 75
    config.elastic.wait = 5.0
    pauses = down(100)
    with pytest.raises(ConfigError, match="cannot be reached"):
        drive()
    assert sum(pauses) == pytest.approx(5.0)


def test_a_mistake_is_not_waited_for(config, drive, stop, down):
    assert drive({"step(3)": [stop]}) == 75
    config.elastic.wait = 600.0
    pauses = down(1, errno.EACCES)
    with pytest.raises(ConfigError, match="cannot be reached"):
        drive()
    assert pauses == []


def test_a_new_run_is_told_at_once_unless_it_shall_wait(config, drive, down):
    config.elastic.wait, pauses = 600.0, down(2)
    with pytest.raises(ConfigError, match="cannot be reached"):
        drive()
    config.cluster.wait = 60.0
    assert drive() == 0 and pauses == [1, 2]


@pytest.mark.parametrize("times", [1, 5])
def test_a_fault_in_a_worker_costs_pauses_and_no_attempt(config, drive, monkeypatch, times):
    """Five such failures of one step; elastic.attempts is 3."""
    pauses, left = [], [times]
    monkeypatch.setattr(controller, "sleep", lambda seconds: None)
    monkeypatch.setattr(controller, "growing_pauses", lambda limit: iter(pauses_made()))

    def pauses_made():
        while True:
            pauses.append(0.0)
            yield 0.001

    def fail(crew):
        if left[0]:
            left[0] -= 1
            member = next(iter(crew.ready_members_by_number.values()))
            raise WorkerFailed([Failure(member, "failed", "step(4)", "OSError: [Errno 5]", 0, of_world=True)])

    assert drive({"step(4)": [fail] * (times + 1)}) == 0 and once_each(config)
    assert len(pauses) == times and len(events(config, "failure")) == times


def test_one_that_lasts_ends_with_a_status_of_its_own(config, drive):
    config.elastic.wait, config.elastic.attempts = 0.0, 2

    def fail(crew):
        member = next(iter(crew.ready_members_by_number.values()))
        raise WorkerFailed([Failure(member, "failed", "step(4)", "OSError: [Errno 5]", 0, of_world=True)])

    assert drive({"step(4)": [fail] * 3}) == UNAVAILABLE
    assert events(config, "gave_up")

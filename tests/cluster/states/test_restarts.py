"""A driver that dies is told from a worker that fails: its successor says so, and what it cost."""

import pytest

from tests.doubles.fake_crew import Dead
from tests.harness.scripted_run import events, names, steps


class Killed(BaseException):
    """The driver dies where it is: no handler of it ends the run."""


def killed(crew):
    raise Killed


def test_a_driver_that_dies_is_told_from_a_worker_that_fails(config, drive, at_once):
    config.checkpoint.every = 2
    with pytest.raises(Killed):
        drive({"step(3)": [{1: Dead}], "step(6)": [killed]})
    assert names(config)[-1] != "gave_up" and steps(config)[-1][0] == 5
    assert drive() == 0
    [took_over] = events(config, "took_over")
    assert (took_over["step"], took_over["steps_lost"]) == (5, 1)
    assert names(config).index("took_over") > [i for i, name in enumerate(names(config)) if name == "starting"][1]
    cost = events(config, "goodput")[-1]
    assert (cost["restarts"], cost["failures"], cost["steps_lost"], len(cost["recoveries"])) == (1, 1, 1, 1)
    assert cost["restart_seconds"] > 0
    assert "the driver before died after step 5: this one goes on in its place after 4" in drive.out
    assert "1 failure survived, 1 restart of the driver (" in drive.out


def test_one_that_died_before_any_step_lost_nothing(config, drive):
    with pytest.raises(Killed):
        drive({"build": [killed]})
    assert drive() == 0
    [took_over] = events(config, "took_over")
    assert (took_over["step"], took_over["steps_lost"]) == (0, 0)
    assert events(config, "goodput")[-1]["restarts"] == 1


def test_one_that_ended_is_not_taken_over_from(config, drive, stop, at_once):
    config.checkpoint.every = 2
    assert drive({"step(3)": [stop]}) == 75
    assert drive() == 0 and not events(config, "took_over")
    assert events(config, "goodput")[-1]["restarts"] == 0

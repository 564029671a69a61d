"""Signals, the time limit and notices end a run with a checkpoint."""

import pytest

from platform.cluster import driver
from tests.doubles.fake_crew import Dead
from tests.harness.scripted_run import events, names, once_each, seats, steps


def test_a_signal_saves_once_and_stops(config, drive, stop):
    config.checkpoint.every = 2
    assert drive({"step(4)": [stop]}) == 75
    assert [e["step"] for e in events(config, "checkpoint")] == [2, 4]
    [end] = events(config, "drained")
    assert (end["signal"], end["step"], end["saved"], end["steps_lost"]) == ("SIGUSR1", 4, 4, 0)


@pytest.mark.parametrize("call", ["form", "step(4)", "snapshot"])
def test_a_failure_and_a_signal_together(config, drive, call, stop):
    """It forms once more, saves, and does not train on."""
    config.checkpoint.every = 100
    script = {
        "form": {"form": [{}, stop], "step(4)": [{1: Dead}]},
        "step(4)": {"step(4)": [lambda crew: stop(crew) or {1: Dead}]},
        "snapshot": {"step(3)": [stop], "snapshot": [{1: Dead}]},
    }[call]
    assert drive(script) == 75
    assert [step for step, _ in steps(config)] == [1, 2, 3]
    assert [e["step"] for e in events(config, "checkpoint")] == [3]
    assert names(config)[-2] == "drained" and len(seats(config)) == 2


def test_a_signal_and_too_few_workers_save_with_those_that_there_are(config, drive, stop):
    config.checkpoint.every, config.elastic.min_workers, config.elastic.replace = 100, 4, False
    assert drive({"step(4)": [lambda crew: stop(crew) or {1: Dead}]}) == 75
    assert seats(config) == [[0, 1, 2, 3], [0, 3, 2]]
    assert [e["step"] for e in events(config, "checkpoint")] == [3]


def test_a_signal_with_nothing_to_save_forms_nobody_again(config, drive, stop):
    config.checkpoint.on_stop = False
    assert drive({"step(4)": [lambda crew: stop(crew) or {1: Dead}]}) == 1
    assert len(seats(config)) == 1 and names(config)[-2] == "stopped"


def test_the_time_limit_and_a_signal_are_no_second_signal(config, drive, signals, stop):
    config.checkpoint.every = 100

    def both(crew):
        signals[-1].request_stop("run.time_limit")
        stop(crew)

    assert drive({"step(4)": [both]}) == 75
    assert events(config, "drained")[0]["signal"] == "run.time_limit"


def test_the_time_limit_saves_and_stops(config, drive, monkeypatch):
    config.run.time_limit, config.run.time_margin, config.checkpoint.every = "1:00", 20.0, 100
    timers = []

    class Timer:
        def __init__(self, seconds, function, args):
            self.up = lambda: function(*args)
            timers.append((seconds, self))

        def start(self):
            self.started = True

        def cancel(self):
            self.started = False

    monkeypatch.setattr(driver.threading, "Timer", Timer)
    assert drive({"step(4)": [lambda crew: timers[0][1].started and timers[0][1].up()]}) == 75
    [(seconds, timer)] = timers
    assert seconds == 40.0 and timer.started is False
    [end] = events(config, "drained")
    assert (end["signal"], end["step"], end["saved"]) == ("run.time_limit", 4, 4)


def test_a_notice_saves_first_and_goes_on_without(config, drive):
    config.checkpoint.every, config.elastic.replace = 100, False
    assert drive({"step(3)": [lambda crew: crew.give_notice(1)]}) == 0 and once_each(config)
    assert seats(config) == [[0, 1, 2, 3], [0, 3, 2]]
    assert [e["step"] for e in events(config, "checkpoint")] == [3, 6]
    assert events(config, "notice")[0]["numbers"] == [1] and len(events(config, "reforming")) == 1
    calls = [name for name, _ in drive.crew.calls if name.startswith(("step", "dismiss"))]
    assert calls[3:6] == ["step(4)", "dismiss(1)", "step(5)"]  # not before others hold what it held


def test_a_notice_for_all_saves_and_stops(config, drive):
    config.checkpoint.every = 100
    assert drive({"step(3)": [lambda crew: crew.give_notice(0, 1, 2, 3)]}) == 75
    [end] = events(config, "drained")
    assert (end["step"], end["saved"]) == (3, 3) and len(seats(config)) == 1

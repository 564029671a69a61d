"""A failure while a run saves costs that save alone."""

from pathlib import Path

import pytest

from tests.doubles.fake_crew import Dead
from tests.harness.scripted_run import events, names, once_each


@pytest.mark.parametrize("call", ["snapshot", "write", "written"])
def test_a_failure_in_a_save_costs_that_save_alone(config, drive, call):
    config.checkpoint.every = 2
    assert drive({call: [{1: Dead}]}) == 0 and once_each(config)
    assert [e["step"] for e in events(config, "checkpoint")][-1] == 6
    assert len(events(config, "failure")) == 1


@pytest.mark.parametrize("call", ["snapshot", "write", "written"])
def test_a_failure_in_the_last_save_does_not_lose_it(config, drive, call):
    config.checkpoint.every = 100
    assert drive({call: [{1: Dead}]}) == 0 and once_each(config)
    assert [e["step"] for e in events(config, "checkpoint")] == [6] and names(config)[-2] == "done"


def test_a_storage_that_never_answers_ends_the_run_in_time(config, drive, at_once):
    """What is written is waited for without a limit no more: `written` used to be called until it was over."""
    config.checkpoint.every, config.checkpoint.timeout = 2, 1.0
    assert drive({"step(5)": [lambda crew: setattr(crew, "stuck", True)]}) == 69
    [end] = events(config, "gave_up")
    assert end["saved"] == 4 and "a save has taken longer than checkpoint.timeout=1 s" in end["cause"]
    assert "the same command continues after step 4" in drive.out


def test_a_save_under_way_is_given_up_when_the_workers_re_form(config, drive):
    config.checkpoint.every = 2

    def busy(crew):
        crew.writing = True

    def again(crew):
        crew.writing = False
        return {1: Dead}

    assert drive({"step(2)": [busy], "step(4)": [again]}) == 0 and once_each(config)
    [failed] = events(config, "checkpoint_failed")
    assert failed["step"] == 2 and "re-formed" in failed["reason"] and failed["again"] is False
    assert [e["step"] for e in events(config, "checkpoint")] == [4, 6]


def test_a_directory_that_is_asked_for_after_the_end_of_its_workers_is_not_written(config, drive):
    """The saver's thread may find it when the workers that had the snapshot are gone."""
    config.checkpoint.every, config.elastic.snapshot_every = 2, 1
    assert drive({"step(3)": [{1: Dead}], "step(5)": [{2: Dead}]}) == 0
    steps_written = [int(name.split("-")[1]) for name in drive.crew.writes]
    assert steps_written[-1] == 6


def test_an_older_driver_stops(config, drive):
    config.checkpoint.every = 2

    def other(crew):
        (Path(config.run.dir) / "checkpoints" / "lease-000009-abcdef01").write_text("process 7 on afar\n")

    assert drive({"step(4)": [other]}) == 1
    assert [e["event"] for e in events(config, "superseded")] == ["superseded"]


def test_checkpoints_tell_the_plan_that_made_them(config, drive, at_once):
    config.checkpoint.every, config.elastic.replace = 3, False
    assert drive({"step(5)": [{0: Dead}]}) == 0
    manifests = sorted(Path(config.run.dir, "checkpoints").glob("step-*/manifest.json"))
    texts = [path.read_text().replace(" ", "") for path in manifests]
    assert ['"data":4' in texts[0], '"data":3' in texts[1]] == [True, True]


def test_a_finished_run_has_its_weights_unless_told_otherwise(config, drive):
    """By default `checkpoint.every` is 0, and a run used to end with nothing."""
    assert drive() == 0 and [e["step"] for e in events(config, "checkpoint")] == [6]
    config.checkpoint.last, config.run.dir, config.checkpoint.every = False, config.run.dir + "-2", 4
    assert drive() == 0 and [e["step"] for e in events(config, "checkpoint")] == [4]


def test_a_run_whose_storage_fails_at_the_end_says_that_its_weights_are_lost(config, drive, at_once, tmp_path):
    config.checkpoint.url = str(tmp_path / "checkpoints")

    def lose_storage(crew):
        (tmp_path / "checkpoints").rename(tmp_path / "gone")
        (tmp_path / "checkpoints").touch()

    assert drive({"step(5)": [lose_storage]}) == 69
    assert "step 6 could not be saved: nothing was saved" in drive.out


def test_a_run_that_ended_without_weights_before_is_done_and_may_say_so(config, drive):
    """As of an earlier version, whose configuration lacks the key: nothing is trained or saved anew."""
    config.checkpoint.last = False
    assert drive() == 0
    file = Path(config.run.dir, "config.yaml")
    file.write_text("".join(line for line in file.read_text().splitlines(True) if line.strip() != "last: false"))
    config.checkpoint.last = True
    assert drive() == 0 and "already done: 6 steps" in drive.out and not events(config, "checkpoint")

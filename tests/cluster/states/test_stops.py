"""A stop at any moment of a run: what is saved, how the run ends, and where the same command goes on."""

import os
import signal
import time
from pathlib import Path

import pytest

from platform.checkpoint.saver import CheckpointSaver
from platform.cluster.crew.signals import REASON, Stopped, StopSignals
from tests.doubles.fake_crew import Dead
from tests.harness.scripted_run import events, names, once_each, steps

# by what somebody ends a process: a person, a terminal that closes, a batch system whose limit is near
STOPPING = [signal.Signals[f"SIG{name}"] for name in "HUP INT IO PWR QUIT STKFLT TERM USR1 USR2 XCPU".split()]


def goes_on(config, drive, step, last=6):
    """The same command, with nothing in its way, starts after `step` and does the rest."""
    before = len(steps(config)) if Path(config.run.dir, "metrics.jsonl").exists() else 0
    assert drive() == 0
    assert [row[0] for row in steps(config)[before:]] == [*range(step + 1, last + 1)]


@pytest.mark.parametrize("number", STOPPING)
def test_every_signal_saves_without_checkpoint_every(config, drive, signals, number):
    assert drive({"step(4)": [lambda crew: signals[-1]._receive_signal(number, None)]}) == 75
    [end] = events(config, "drained")
    assert (end["signal"], end["step"], end["saved"], end["steps_lost"]) == (number.name, 4, 4, 0)
    assert "the same command continues after step 4" in drive.out
    goes_on(config, drive, 4)


@pytest.mark.parametrize(
    ("told", "said"),
    [("SIGTERM to its job", "SIGTERM to its job"), ("", "SIGUSR1"), (None, "SIGUSR1"), ("x" * 201, "SIGUSR1")],
)
def test_a_run_says_what_its_supervisor_was_told(config, drive, signals, monkeypatch, tmp_path, told, said):
    monkeypatch.setenv(REASON, str(tmp_path / "reason"))
    if told is not None:
        (tmp_path / "reason").write_text(told)
    assert drive({"step(4)": [lambda crew: signals[-1]._receive_signal(signal.SIGUSR1, None)]}) == 75
    assert events(config, "drained")[0]["signal"] == said and f"stopped by {said} after step 4" in drive.out


@pytest.mark.parametrize("reason", ["run.time_limit", "the end of the allocation"])
def test_a_wish_to_end_saves_without_checkpoint_every(config, drive, signals, reason):
    assert drive({"step(4)": [lambda crew: signals[-1].request_stop(reason)]}) == 75
    assert events(config, "drained")[0]["saved"] == 4
    goes_on(config, drive, 4)


def test_a_notice_for_all_saves_without_checkpoint_every(config, drive):
    assert drive({"step(3)": [lambda crew: crew.give_notice(0, 1, 2, 3)]}) == 75
    assert events(config, "drained")[0]["saved"] == 3
    goes_on(config, drive, 3)


def test_where_a_stop_shall_not_save_the_work_is_lost_and_that_is_said(config, drive, stop):
    config.checkpoint.on_stop = config.checkpoint.last = False
    assert drive({"step(4)": [stop]}) == 1
    [end] = events(config, "stopped")
    assert (end["step"], end["saved"], end["steps_lost"]) == (4, 0, 4)
    assert "checkpoint.on_stop=false" in drive.out and "starts again from step 1" in drive.out
    assert not Path(config.run.dir, "checkpoints").exists()


def test_where_a_stop_shall_not_save_it_goes_on_from_the_last_one(config, drive, stop, at_once):
    config.checkpoint.on_stop, config.checkpoint.every = False, 2
    assert drive({"step(3)": [stop]}) == 75
    [end] = events(config, "drained")
    assert (end["step"], end["saved"], end["steps_lost"]) == (3, 2, 1)
    assert "checkpoint.on_stop=false" in drive.out and "continues after step 2" in drive.out
    goes_on(config, drive, 2)


@pytest.mark.parametrize("call", ["prove", "form", "build"])
def test_before_the_first_step_nothing_is_lost(config, drive, stop, call):
    assert drive({call: [stop]}) == 75
    assert names(config)[-2] == "drained" and events(config, "drained")[0]["steps_lost"] == 0
    assert "nothing was done" in drive.out
    goes_on(config, drive, 0)


def test_while_the_data_is_made(config, drive, signals, monkeypatch):
    from platform.cluster import driver

    corpus_of = driver.open_run_corpus
    monkeypatch.setattr(driver, "open_run_corpus", lambda c, **_: signals[-1]._receive_signal(signal.SIGTERM, None))
    assert drive() == 75 and "nothing was done" in drive.out
    monkeypatch.setattr(driver, "open_run_corpus", corpus_of)
    goes_on(config, drive, 0)


@pytest.mark.parametrize(
    "place", ["resources.await_worker_places", "violations_of_sources", "RunDirectory.check_identity"]
)
def test_before_the_run_has_a_journal(config, drive, signals, monkeypatch, place):
    def stopped(*args, **keywords):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "it would end this process"
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    with monkeypatch.context() as patched:
        patched.setattr(f"platform.cluster.driver.{place}", stopped)
        assert drive() == 75 and "stopped by SIGTERM: nothing was done" in drive.out
    goes_on(config, drive, 0)


def test_in_the_middle_of_anything_while_there_is_nothing_to_lose():
    """A time limit that is over before the first step ends what the driver waits for."""
    import threading

    with StopSignals() as signals:
        begin = time.monotonic()
        threading.Timer(0.05, signals.request_stop, ["run.time_limit"]).start()
        with pytest.raises(Stopped, match="run.time_limit"):
            time.sleep(12)
            signals.raise_if_requested()
        assert time.monotonic() - begin < 9


def test_in_an_evaluation(config, drive, stop):
    config.eval.every = 2
    assert drive({"evaluate": [stop]}) == 75
    assert events(config, "drained")[0]["saved"] == 2
    goes_on(config, drive, 2)


@pytest.mark.parametrize("call", ["snapshot", "write", "written"])
def test_while_a_save_is_under_way(config, drive, stop, call):
    config.checkpoint.every = 2
    assert drive({call: [stop]}) == 75
    [end] = events(config, "drained")
    assert end["saved"] == end["step"] and end["steps_lost"] == 0
    goes_on(config, drive, end["step"])


@pytest.mark.parametrize("call", ["form", "build", "recover"])
def test_while_it_forms_again_after_a_failure(config, drive, stop, call):
    first = [] if call == "recover" else [{}]
    assert drive({"step(4)": [{1: Dead}], call: [*first, stop]}) == 75
    [end] = events(config, "drained")
    assert (end["step"], end["saved"], end["steps_lost"]) == (3, 3, 0)
    goes_on(config, drive, 3)


def test_before_the_first_step_of_a_run_that_goes_on(config, drive, stop):
    assert drive({"step(4)": [stop]}) == 75
    assert drive({"build": [stop]}) == 75
    assert events(config, "drained")[-1]["saved"] == 4
    goes_on(config, drive, 4)


def again_at_once(signals):
    """A second signal, some time after the first."""
    signals[-1]._first -= 10
    signals[-1]._receive_signal(signal.SIGINT, None)


@pytest.mark.parametrize(("every", "saved", "status"), [(0, 0, 1), (2, 2, 75)])
def test_a_second_signal_ends_at_once(config, drive, signals, stop, at_once, every, saved, status):
    """What is on storage decides whether the same command can go on."""
    config.checkpoint.every = every
    script = {"step(3)": [stop], "snapshot": [*[{}] * bool(every), lambda crew: again_at_once(signals)]}
    assert drive(script) == status
    [end] = events(config, "drained" if saved else "stopped")
    assert (end["step"], end["saved"], end["steps_lost"]) == (3, saved, 3 - saved)
    if not saved:
        assert "nothing was saved; the same command with checkpoint.resume=never starts again from step 1" in drive.out
        config.checkpoint.resume = "never"
    goes_on(config, drive, saved)


def test_a_second_signal_before_the_first_step(config, drive, signals, stop):
    def twice(crew):
        try:
            stop(crew)
        finally:
            again_at_once(signals)

    assert drive({"form": [twice]}) == 75
    goes_on(config, drive, 0)


def test_a_stop_in_the_last_step_is_the_end_of_the_run(config, drive, stop):
    assert drive({"step(6)": [stop]}) == 0 and once_each(config)
    assert names(config)[-2] == "done"


def test_a_stop_that_cannot_be_saved(config, drive, stop, monkeypatch):
    from platform.boundary.local_files import LocalStorage

    def full(self, path, chunks):
        raise OSError(28, "No space left on device")

    def fill(crew):
        monkeypatch.setattr(LocalStorage, "write", full)
        stop(crew)

    monkeypatch.setitem(CheckpointSaver.__init__.__kwdefaults__, "pause", 0.0)
    assert drive({"step(3)": [fill]}) == 1
    [end] = events(config, "stopped")
    assert (end["step"], end["saved"], end["steps_lost"]) == (3, 0, 3)
    assert "No space left on device" in drive.out and "starts again from step 1" in drive.out


# how often


def test_a_duration_between_checkpoints(config, drive, monkeypatch, at_once):
    """By the clock since the one before, whatever the steps take."""
    now = [1000.0]
    monkeypatch.setattr("platform.cluster.control.checkpoints.monotonic", lambda: now[0])
    config.checkpoint.every, config.train.steps = "1h30m", 8

    def later(minutes):
        return lambda crew: now.__setitem__(0, now[0] + 60 * minutes)

    script = {f"step({k})": [later(minutes)] for k, minutes in {1: 60, 2: 29, 3: 2, 4: 89, 5: 1, 7: 1000}.items()}
    assert drive(script) == 0
    assert [e["step"] for e in events(config, "checkpoint")] == [3, 5, 7, 8]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45s", 45), ("30m", 1800), ("1h30m", 5400), ("2h", 7200), ("1.5h", 5400), ("1d", 86400), ("1h 30m", 5400)]
    + [("90", None), ("0", None)],
)
def test_what_a_duration_is(text, seconds):
    from platform.cluster.control.checkpoints import CheckpointCadence

    cadence = CheckpointCadence(text)
    assert cadence.seconds == seconds
    assert cadence.steps == (int(text) if seconds is None else 0)


def test_a_run_without_a_terminal_line_still_stops(config, drive, stop, monkeypatch):
    """Standard error is closed when the signal comes."""
    write = os.write

    def closed(file, data):
        if file == 2:
            raise BrokenPipeError(32, "Broken pipe")
        return write(file, data)

    monkeypatch.setattr(os, "write", closed)
    assert drive({"step(4)": [stop]}) == 75 and "drained" in names(config)


def lose_cluster(dead=(), ready=False):
    """A crew's action: its cluster is lost, with these workers."""

    def lose(crew):
        crew.lost, crew.ready = "Ray is silent", ready
        return dict.fromkeys(dead, Dead)

    return lose


@pytest.mark.parametrize("dead", [(), (2,), (0, 1, 3)])
def test_a_lost_cluster_ends_with_what_those_who_live_hold(config, drive, dead):
    config.elastic.wait, config.elastic.snapshot_every, config.elastic.redundancy = 600, 1, "all"
    assert drive({"step(4)": [lose_cluster(dead)]}) == 75
    [end] = events(config, "cluster_lost")
    assert (end["cause"], end["saved"], end["steps_lost"]) == ("Ray is silent", end["step"], 0)
    assert end["step"] >= 3 and f"Ray is silent; the same command continues after step {end['step']}" in drive.out
    goes_on(config, drive, end["step"])


@pytest.mark.parametrize("every", [0, 2])
def test_a_cluster_that_is_lost_with_all_workers_is_not_waited_for(config, drive, at_once, every):
    config.elastic.wait, config.checkpoint.every = 600, every
    assert drive({"step(4)": [lose_cluster((0, 1, 2, 3))]}) == 75
    [end] = events(config, "cluster_lost")
    assert (end["step"], end["saved"], end["steps_lost"]) == (3, every, 3 - every)
    config.checkpoint.resume = "auto" if every else "never"  # which a supervisor sees to
    assert drive() == 0


def test_a_cluster_that_is_lost_hires_nobody(config, drive):
    assert drive({"step(4)": [lose_cluster((1,), ready=True)]}) == 75
    assert not events(config, "hiring")

"""The driver's states, with the real controller, plans, checkpoints and journal, and a crew that plays a script."""

import json
import signal
from pathlib import Path

import pytest
from fake_crew import Dead, FakeCrew, Hung

from platform.cluster import driver
from platform.cluster.control.forming import muster
from platform.cluster.control.saving.checkpoints import Checkpoints
from platform.cluster.crew.base.failures import NoPlaces
from platform.cluster.crew.base.signals import StopSignals
from platform.cluster.run.commands import Command
from platform.config.fields import ConfigError
from platform.monitor import Journal, MetricsLog
from platform.planning.make_plan import make_plan
from platform.train.protocol.answers import Damage, Differences, Dispute
from tests.oracle import configure

BOOM = ValueError("boom")
TYPED = Command(["+experiment=x", "a='b c'", "checkpoint.resume=never"])


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
    monkeypatch.setattr(muster, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr("platform.cluster.control.saving.checkpoints.POLL_SECONDS", 0.001)
    monkeypatch.setattr("platform.checkpoint.storage.catalogue._check", lambda storage, directory, manifest: None)

    def drive(script=None, prepare=lambda crew: None, nodes=1):
        def open_crew(kind, job, spares):
            drive.crew = FakeCrew(job, spares, script or {}, nodes)
            prepare(drive.crew)
            return drive.crew

        monkeypatch.setattr(driver, "open_crew", open_crew)
        status = driver.run(config, make_plan(config), command=TYPED)
        drive.out, drive.err = capsys.readouterr()
        return status

    return drive


@pytest.fixture
def at_once(monkeypatch):
    """Checkpoints are on storage before the next step, which here takes no time."""
    save = Checkpoints.save

    def save_and_finish(self, crew, *args):
        save(self, crew, *args)
        self.finish(crew)

    monkeypatch.setattr(Checkpoints, "save", save_and_finish)


def events(config, *names):
    """All, or those of these names."""
    found = Journal.read(Path(config.run.dir, "journal.jsonl"))
    return [e for e in found if not names or e["event"] in names]


def names(config):
    return [event["event"] for event in events(config)]


def seats(config):
    """Of each generation that formed."""
    return [[worker["number"] for worker in event["workers"]] for event in events(config, "formed")]


def steps(config):
    """All that were committed, with the world size, also those that were done again."""
    rows = Path(config.run.dir, "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["world_size"]) for row in map(json.loads, rows)]


def once_each(config):
    return [step for step, _ in steps(config)] == [1, 2, 3, 4, 5, 6]


RUN = ["forming", "formed", "running"]


def test_an_undisturbed_run(config, drive):
    assert drive() == 0 and once_each(config)
    assert names(config) == ["starting", *RUN, "first_step", "released", "done", "goodput"]
    assert all(event.keys() >= {"time", "generation", "event"} for event in events(config))
    assert drive.crew.released == 0 and "survived" not in drive.out


def test_it_shrinks_to_fewer_replicas_and_loses_nothing(config, drive):
    config.elastic.replace = False
    assert drive({"step(3)": [{2: Dead}]}) == 0
    assert seats(config) == [[0, 1, 2, 3], [0, 1, 3]]
    assert steps(config) == [(1, 4), (2, 4), (3, 3), (4, 3), (5, 3), (6, 3)]
    again = ["failure", "released", *RUN[:2], "restored", "running", "first_step"]
    assert names(config) == ["starting", *RUN, "first_step", *again, "released", "done", "goodput"]
    [failure] = events(config, "failure")
    assert (failure["number"], failure["kind"], failure["step"], failure["method"]) == (2, "died", 3, "step(3)")
    assert failure["coordinates"]["data"] == 2 and failure["generation"] == 1
    assert events(config, "released")[0]["lost"] == [2]
    [restored] = events(config, "restored")
    assert (restored["step"], restored["source"], restored["generation"]) == (2, "memory", 2)
    assert events(config, "forming")[1]["reason"].startswith("3 workers: data 4 -> 3")
    [cost] = events(config, "goodput")
    assert (cost["failures"], cost["steps_lost"], len(cost["recoveries"])) == (1, 0, 1)
    rows = MetricsLog.read(Path(config.run.dir, "metrics.jsonl"))
    assert [(row["step"], row["generation"]) for row in rows if "recovery_seconds" in row] == [(3, 2)]
    assert rows[2]["recovery_seconds"] == pytest.approx(cost["recoveries"][0], rel=0.5)
    assert "1 failure survived, 0 steps lost" in drive.out
    assert json.loads(Path(config.run.dir, "plan.json").read_text())["mesh"]["data"] == 3  # the newest one


def test_it_shrinks_to_another_plan_of_the_scheme(config, drive):
    config.tensor, config.parallel.data = configure(tensor="1d", axes={"t": 4}).tensor, 1
    config.elastic.replace = False
    assert drive({"step(3)": [{0: Hung}]}) == 0 and once_each(config)
    mesh = events(config, "forming")[1]["mesh"]
    assert (mesh["t"], mesh["data"]) == (1, 3) and sorted(seats(config)[1]) == [1, 2, 3]


def test_a_spare_takes_the_place_and_the_others_keep_theirs(config, drive):
    config.elastic.spares = 1
    assert drive({"step(3)": [{1: Dead}]}) == 0
    assert seats(config) == [[0, 1, 2, 3], [0, 4, 2, 3]] and once_each(config)
    assert events(config, "hiring")[0]["count"] == 1  # another spare, once the run goes on
    assert names(config).index("hiring") > [i for i, n in enumerate(names(config)) if n == "first_step"][1]


def test_it_grows_back_between_two_steps_when_a_new_worker_is_ready(config, drive):
    def late(crew):
        crew.ready = True

    script = {"step(2)": [lambda crew: setattr(crew, "ready", False) or {3: Dead}], "step(5)": [late]}
    assert drive(script) == 0
    assert seats(config) == [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 4]]
    assert steps(config) == [(1, 4), (2, 3), (3, 3), (4, 3), (5, 3), (6, 4)]
    [reforming] = events(config, "reforming")
    assert reforming["step"] == 5 and "grows from 3 to 4" in reforming["reason"]
    assert json.loads(Path(config.run.dir, "plan.json").read_text())["mesh"]["data"] == 4
    assert "4 workers: as configured" in drive.out


def test_max_workers_lets_it_grow_beyond_its_start(config, drive):
    config.parallel.data, config.elastic.max_workers = 2, 6
    assert drive(prepare=lambda crew: None) == 0 and once_each(config)
    assert [len(members) for members in seats(config)] == [2, 6]
    assert events(config, "hiring")[0]["count"] == 4


@pytest.mark.parametrize(
    ("snapshot_every", "checkpoint_every", "generations", "restored"),
    [(1, 0, 2, 2), (2, 0, 2, 2), (4, 0, 2, 4), (0, 4, 2, 1), (0, 0, 1, None)],
)
def test_growth_waits_for_a_step_after_which_nothing_is_lost(
    config, drive, snapshot_every, checkpoint_every, generations, restored
):
    config.parallel.data, config.elastic.max_workers = 2, 3
    config.elastic.snapshot_every, config.checkpoint.every = snapshot_every, checkpoint_every
    late = {"step(2)": [lambda crew: setattr(crew, "ready", snapshot_every > 0)]} if snapshot_every else {}

    def prepare(crew):
        crew.ready = not snapshot_every

    assert drive(late, prepare) == 0 and once_each(config)
    assert len(seats(config)) == generations
    assert [event["step"] for event in events(config, "restored")] == ([restored] if restored else [])


def test_too_few_workers_are_waited_for_and_come(config, drive):
    config.elastic.min_workers, config.elastic.wait = 4, 10.0

    def slowly(crew):
        crew.ready, looks = False, iter(range(5))
        crew_starting = type(crew).starting.fget

        class Slowly(type(crew)):
            @property
            def starting(self):
                if next(looks, None) is None:
                    self.ready = True
                return crew_starting(self)

        crew.__class__ = Slowly
        return {1: Dead}

    assert drive({"step(3)": [slowly]}) == 0 and once_each(config)
    [waiting] = events(config, "waiting")  # once
    assert waiting["alive"] == 3 and waiting["reason"] == "3 workers are there, and elastic.min_workers=4"
    assert drive.out.count("waiting up to 10 s for more") == 1


def test_too_few_workers_for_too_long_end_the_run(config, drive, at_once):
    config.elastic.min_workers, config.checkpoint.every = 4, 2
    assert drive({"step(4)": [lambda crew: setattr(crew, "ready", False) or {1: Dead}]}) == 1
    assert names(config)[-4:] == ["waiting", "released", "gave_up", "goodput"]
    [end] = events(config, "gave_up")
    assert end["cause"].startswith("3 workers are there, and elastic.min_workers=4; waited ")
    assert (end["step"], end["saved"], end["steps_lost"]) == (3, 2, 1)
    command = "python -m platform.launch +experiment=x 'a='\"'\"'b c'\"'\"'' checkpoint.resume="
    assert f"stopped after step 3: the same command continues after step 2:\n  {command}never" in drive.out


def test_nobody_is_waited_for_who_cannot_come(config, drive):
    config.elastic.min_workers, config.elastic.replace, config.elastic.wait = 4, False, 1000.0
    assert drive({"step(3)": [{1: Dead}]}) == 1


@pytest.mark.parametrize("call", ["prove", "form", "build", "recover", "step(3)"])
@pytest.mark.parametrize("second", [Dead, BOOM])
def test_a_second_failure_at_any_time_until_the_next_step(config, drive, call, second):
    config.elastic.spares = 2
    first = call not in ("step(3)", "recover")  # calls of the first generation too
    script = {"step(3)": [{1: Dead}], call: [*([{}] if first else []), {2: second}]}
    if call == "step(3)":
        script = {call: [{1: Dead}, {2: second}]}
    assert drive(script) == 0 and once_each(config)
    assert len(events(config, "failure")) == 2
    [cost] = events(config, "goodput")
    assert cost["failures"] == 2 == len(cost["recoveries"]) and cost["steps_lost"] == 0


@pytest.mark.parametrize("second", [None, Dead, BOOM])
def test_survivors_without_a_seat_hand_over_first_and_may_fail_in_that(config, drive, second):
    """Eight become four, which do not have everything together."""
    sizes = {"layers": 1, "d_model": 32, "heads": 8, "d_ff": 64, "global_batch": 1, "microbatch": 1, "data": 1}
    other = configure(tensor="1d", axes={"t": 8}, **sizes)
    config.model, config.train, config.parallel, config.tensor = other.model, other.train, other.parallel, other.tensor
    config.train.steps, config.elastic.replace = 6, False
    assert drive({"step(3)": [{3: Dead}], "gather": [{0: second} if second else {}]}) == 0 and once_each(config)
    assert [name for name, _ in drive.crew.calls].count("gather") == (2 if second else 1)
    assert len(events(config, "failure")) == (2 if second else 1) and len(seats(config)) == 2
    assert len(seats(config)[1]) == 4 and not events(config, "rolled_back")


def test_the_same_step_too_often_ends_the_run_with_what_to_do(config, drive, at_once):
    config.checkpoint.every = 2
    assert drive({"step(4)": [{1: BOOM}] * 3}) == 1
    assert [e["step"] for e in events(config, "failure")] == [4, 4, 4] and once_each(config) is False
    [end] = events(config, "gave_up")
    assert (end["step"], end["saved"]) == (3, 2)
    assert "boom') (failure 3 before step 4 was done)" in end["cause"]
    said = drive.out[drive.out.rindex("rank1[data1] failed in step(4)") :].splitlines()
    assert said[1] == "stopped after step 3: the same command continues after step 2:"
    assert said[2].startswith("  python -m platform.launch +experiment=x ")
    assert "0 of 3 failures survived, 1 step lost" in drive.out


def test_attempts(config, drive):
    config.elastic.attempts = 1
    assert drive({"step(4)": [{1: BOOM}]}) == 1
    assert len(events(config, "failure")) == 1


def test_failures_of_different_steps_do_not_add_up(config, drive):
    config.elastic.attempts, config.elastic.snapshot_every = 2, 0  # each goes back to the start
    assert drive({f"step({k})": [{0: BOOM}] for k in (2, 3, 4, 5)}) == 0
    assert len(events(config, "rolled_back")) == 4


@pytest.mark.parametrize("call", ["build", "step(1)"])
def test_what_raises_before_the_first_step_is_not_tried_again(config, drive, call):
    assert drive({call: [{1: BOOM}]}) == 1
    assert names(config)[-4:] == ["failure", "released", "gave_up", "goodput"]
    assert "nothing was saved; the same command starts again from step 1" in drive.out


def test_who_dies_before_the_first_step_is_replaced(config, drive):
    assert drive({"build": [{1: Dead}]}) == 0 and once_each(config)


def test_new_workers_that_run_something_else_get_no_seat_and_the_run_goes_on(config, drive):
    def stranger(crew):
        crew.strangers.add(4)
        return {3: Dead}

    config.elastic.spares = 1
    assert drive({"step(2)": [stranger]}) == 0 and once_each(config)
    [barred] = events(config, "barred")
    assert barred["numbers"] == [4] and barred["reasons"][0].startswith("cluster: code of platform: of yesterday on")
    assert seats(config)[:2] == [[0, 1, 2, 3], [0, 1, 2]]  # then whoever was hired for the dead one
    assert all(4 not in members for members in seats(config)) and len(events(config, "hiring")) == 1


def test_the_first_workers_that_run_something_else_are_refused(config, drive):
    with pytest.raises(ConfigError, match="code of platform: of yesterday on node afar"):
        drive(prepare=lambda crew: crew.strangers.add(1))
    assert not Path(config.run.dir).exists()  # refused late, it leaves nothing either


# memory and storage


def all_of_node_1(crew):
    return dict.fromkeys((1, 3), Dead)


def test_a_node_is_lost_and_its_peers_have_its_state(config, drive):
    config.parallel.zero = 3
    assert drive({"step(4)": [all_of_node_1]}, nodes=2) == 0 and once_each(config)


def test_copies_lost_with_their_owners_leave_storage(config, drive, at_once):
    config.parallel.zero, config.checkpoint.every = 3, 2
    assert drive({"step(4)": [dict.fromkeys((0, 1, 2), Dead)]}) == 0
    assert [step for step, _ in steps(config)] == [1, 2, 3, 3, 4, 5, 6]
    assert "not all is left of" in events(config, "not_whole")[0]["reason"]
    [back] = events(config, "rolled_back")
    assert (back["step"], back["steps_lost"]) == (2, 1) and back["lost_seconds"] > 0
    rows = list(map(json.loads, Path(config.run.dir, "metrics.jsonl").read_text().splitlines()))
    assert back["lost_seconds"] == pytest.approx(rows[2]["step_seconds"])
    [cost] = events(config, "goodput")
    assert cost["steps_lost"] == 1
    kept = sum(row["step_seconds"] for row in MetricsLog.read(Path(config.run.dir, "metrics.jsonl")))
    assert cost["useful_seconds"] == pytest.approx(kept)


def test_with_nothing_in_storage_it_begins_again(config, drive):
    config.parallel.zero = 3
    assert drive({"step(4)": [dict.fromkeys((0, 1, 2), Dead)]}) == 0
    assert [step for step, _ in steps(config)] == [1, 2, 3, 1, 2, 3, 4, 5, 6]
    assert events(config, "rolled_back")[0]["steps_lost"] == 3


@pytest.mark.parametrize(("every", "lost"), [(1, 0), (2, 0), (3, 1), (4, 0), (5, 4)])
def test_it_goes_back_to_the_last_step_held(config, drive, every, lost):
    config.elastic.snapshot_every = every
    assert drive({"step(5)": [{0: BOOM}]}) == 0
    assert [e["steps_lost"] for e in events(config, "rolled_back")] == ([lost] if lost else [])


def test_lost_seconds_count_once(config, drive):
    """Twice back to the same step."""
    config.elastic.snapshot_every = 4
    assert drive({"step(4)": [{0: BOOM}], "step(3)": [{}, {0: BOOM}]}) == 0
    assert [e["steps_lost"] for e in events(config, "rolled_back")] == [3, 2]
    rows = MetricsLog.read(Path(config.run.dir, "metrics.jsonl"))
    [cost] = events(config, "goodput")
    assert cost["useful_seconds"] == pytest.approx(sum(row["step_seconds"] for row in rows))


def test_a_checkpoint_that_is_newer_than_memory_is_better(config, drive, at_once):
    config.elastic.snapshot_every, config.checkpoint.every = 2, 3
    assert drive({"step(4)": [{0: BOOM}]}) == 0 and once_each(config)
    [restored] = events(config, "restored")
    assert restored["step"] == 3 and "directory" in restored


@pytest.mark.parametrize("resume", ["never", "PATH"])
def test_the_last_resort_is_the_run_s_own_checkpoint(config, drive, at_once, resume, tmp_path):
    """Not one that lay there, and not where it began."""
    config.elastic.snapshot_every, config.checkpoint.every, config.checkpoint.url = 0, 5, str(tmp_path / "there")
    assert drive() == 0  # leaves steps 5 and 6
    found = sorted(path for path in (tmp_path / "there").glob("step-*"))
    config.run.dir, config.checkpoint.every = str(tmp_path / "second"), 2
    config.checkpoint.resume = resume if resume == "never" else str(found[0])
    first = 1 if resume == "never" else 6
    if resume == "never":
        assert drive({"step(4)": [{1: BOOM}], "step(2)": [{0: Dead}]}) == 0
        done = [step for step, _ in steps(config)]
        assert done == [1, 1, 2, 3, 3, 4, 5, 6]  # from nothing, then from its own
    else:
        config.train.steps = 8
        assert drive({"step(8)": [{0: BOOM}]}) == 0
        assert [step for step, _ in steps(config)] == [6, 7, 7, 8]
        assert [e["step"] for e in events(config, "restored")] == [5, 6]
    assert steps(config)[0][0] == first


def test_the_command_that_resumes_goes_on_from_the_newest(config, drive, at_once):
    config.checkpoint.resume, config.checkpoint.every = "never", 2
    assert drive({"step(4)": [{1: BOOM}] * 3}) == 1
    assert "the same command with checkpoint.resume=auto continues after step 2:\n" in drive.out
    command = drive.out.splitlines()[[i for i, x in enumerate(drive.out.splitlines()) if "stopped after" in x][0] + 1]
    assert command.endswith(" checkpoint.resume=auto") and "never" not in command


def test_storage_that_fails_in_the_last_resort_ends_the_run_with_its_name(config, drive, at_once, monkeypatch):
    config.elastic.snapshot_every, config.checkpoint.every = 0, 2

    def fail(crew):
        def no(*args, **keywords):
            raise OSError("the disk is gone")

        monkeypatch.setattr("platform.cluster.run.origin.find", no)
        return {0: Dead}

    assert drive({"step(4)": [fail]}) == 1
    assert Path(config.run.dir, "config.yaml").exists()


# saving


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
    config.checkpoint.every, config.checkpoint.timeout = 2, 0.3
    assert drive({"step(5)": [lambda crew: setattr(crew, "stuck", True)]}) == 1
    [end] = events(config, "gave_up")
    assert end["saved"] == 4 and "a save has taken longer than checkpoint.timeout=0.3 s" in end["cause"]
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


# the end


@pytest.fixture
def signals(monkeypatch):
    """Those of the drivers so far."""
    found = []
    enter = StopSignals.__enter__
    monkeypatch.setattr(StopSignals, "__enter__", lambda self: found.append(self) or enter(self))
    return found


@pytest.fixture
def stop(signals):
    """A crew's action: a signal comes."""
    return lambda crew: signals[-1]._handle(signal.SIGUSR1, None)


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
        signals[-1].request("run.time_limit")
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


def test_a_notice_for_all_saves_and_stops(config, drive):
    config.checkpoint.every = 100
    assert drive({"step(3)": [lambda crew: crew.give_notice(0, 1, 2, 3)]}) == 75
    [end] = events(config, "drained")
    assert (end["step"], end["saved"]) == (3, 3) and len(seats(config)) == 1


# losses


def spikes(crew):
    crew.losses[4] = [9.0]


@pytest.mark.parametrize(("policy", "status"), [("rollback", 0), ("skip", 0), ("stop", 1)])
def test_spikes(config, drive, policy, status):
    config.train.spike, config.train.on_spike, config.train.steps = 3.0, policy, 12
    assert drive(prepare=lambda crew: crew.losses.update({10: [9.0]})) == status
    [spike] = events(config, "spike")
    assert (spike["step"], spike["loss"], spike["limit"], spike["policy"]) == (10, 9.0, 3.0, policy)
    rows = MetricsLog.read(Path(config.run.dir, "metrics.jsonl"))
    assert [row["step"] for row in rows if "skipped" in row] == ([10] if policy == "skip" else [])
    assert [row["step"] for row in rows] == [*range(1, 13 if status == 0 else 10)]


def test_no_spike_without_a_factor(config, drive):
    config.train.steps = 12
    assert drive(prepare=lambda crew: crew.losses.update({10: [9.0]})) == 0 and not events(config, "spike")


def test_not_a_number_in_the_first_step(config, drive):
    nan = float("nan")
    assert drive(prepare=lambda crew: crew.losses.update({1: [nan, nan]})) == 0 and once_each(config)
    config.run.dir += "-2"
    assert drive(prepare=lambda crew: crew.losses.update({1: [nan] * 3})) == 1


@pytest.mark.parametrize("every", [1, 2])
def test_after_a_skipped_step_memory_has_it(config, drive, every):
    config.train.on_spike, config.elastic.snapshot_every = "skip", every
    nan = float("nan")
    assert drive({"step(5)": [{0: Dead}]}, lambda crew: crew.losses.update({4: [nan]})) == 0
    assert events(config, "restored")[0]["step"] == 4 and once_each(config)


# who is slow, who hangs, what is injected


def test_a_slow_worker_is_said_once_and_stays(config, drive):
    config.train.steps = 12
    assert drive(prepare=lambda crew: crew.slow.add(2)) == 0
    [slow] = events(config, "slow")
    assert (slow["number"], slow["rank"], slow["ratio"]) == (2, 2, 2.0)
    assert drive.out.count("rank 2 on n0 is slow: 2.0 times its stage's median") == 1 and len(seats(config)) == 1


def test_a_slow_worker_is_replaced_for_good(config, drive):
    config.train.steps, config.elastic.spares, config.elastic.replace_slow = 12, 1, True
    assert drive({"step(9)": [{0: Dead}]}, lambda crew: crew.slow.add(2)) == 0
    assert seats(config)[1] == [0, 1, 4, 3] and all(2 not in members for members in seats(config)[1:])
    assert [step for step, _ in steps(config)] == [*range(1, 13)]


def test_deadlines(config, drive):
    config.eval.every, config.elastic.hang_seconds = 2, 7.0
    assert drive({"evaluate": [{}, {1: Hung}]}) == 0 and once_each(config)
    within = dict(drive.crew.calls)
    assert within["step(6)"] == 7.0 == within["evaluate"]  # 5 of these steps are shorter
    assert dict(reversed(drive.crew.calls))["step(1)"] == 120.0
    rows = MetricsLog.read(Path(config.run.dir, "metrics.jsonl"))
    assert [row["step"] for row in rows if "val_loss" in row] == [2, 4, 6]


def test_faults_are_handed_on_once(config, drive):
    config.elastic.faults = ["3:kill:1", "3:nan:0", "9:stop:0"]
    assert drive({"step(3)": [{1: Dead}]}) == 0
    assert [(e["step"], e["faults"]) for e in events(config, "injected")] == [(3, ["3:kill:1", "3:nan:0"])]


def test_generations_count_over_drivers(config, drive):
    config.train.stop_at, config.elastic.replace = 3, False
    assert drive({"step(2)": [{0: Dead}]}) == 0
    config.train.stop_at = 0
    assert drive({"step(5)": [{0: Dead}]}) == 0
    assert [e["generation"] for e in events(config, "forming")] == [1, 2, 3, 4] and once_each(config)
    rows = MetricsLog.read(Path(config.run.dir, "metrics.jsonl"))
    assert [row["generation"] for row in rows] == [1, 2, 2, 3, 4, 4]


def test_checkpoints_tell_the_plan_that_made_them(config, drive, at_once):
    config.checkpoint.every, config.elastic.replace = 3, False
    assert drive({"step(5)": [{0: Dead}]}) == 0
    manifests = sorted(Path(config.run.dir, "checkpoints").glob("step-*/manifest.json"))
    texts = [path.read_text().replace(" ", "") for path in manifests]
    assert ['"data":4' in texts[0], '"data":3' in texts[1]] == [True, True]


def test_a_small_device_gets_no_plan_that_it_has_no_room_for(config, drive):
    from platform.planning.memory_budget import needed_bytes

    config.tensor, config.parallel.data = configure(tensor="1d", axes={"t": 4}).tensor, 1
    config.elastic.replace = False
    room = needed_bytes(config, make_plan(config))
    assert drive({"step(3)": [{0: Dead}]}, lambda crew: setattr(crew, "memory", room)) == 1


@pytest.mark.parametrize(
    ("least", "most", "line"),
    [
        (5, 0, "elastic.min_workers=5: must be <= the 4 workers that the run may have; nearest legal: 4"),
        (1, 3, "elastic.max_workers=3: must be 0 or >= the 4 workers of the plan; nearest legal: 0, 4"),
    ],
)
def test_sizes_that_can_never_be(config, drive, least, most, line):
    config.elastic.min_workers, config.elastic.max_workers = least, most
    with pytest.raises(ConfigError) as caught:
        drive()
    assert caught.value.violations == [line] and not Path(config.run.dir).exists()


def test_a_run_starts_smaller_only_where_min_workers_says_so_and_grows(config, drive):
    def two_are_late(crew):
        crew.lose(2, 3)
        crew.ready = False
        crew.hire = lambda count: None
        crew._starting = [2, 3]

    def they_come(crew):
        crew.arrive()

    assert drive({"step(3)": [they_come]}, two_are_late) == 1  # nobody comes before it forms
    assert "2 workers are there of 4, and elastic.min_workers is not set" in drive.out
    config.run.dir += "-2"
    config.elastic.min_workers, config.elastic.wait = 2, 10.0
    assert drive({"step(3)": [they_come]}, two_are_late) == 0
    sizes = [event["world_size"] for event in events(config, "forming")]
    assert sizes == [2, 4]


def test_a_cluster_without_places_may_be_tried_again(config, drive, monkeypatch):
    def no_places(kind, job, spares):
        raise NoPlaces("waited 600 s for Ray to start 4 times, 2 of 4 there")

    assert drive() == 0
    config.run.dir += "-2"
    monkeypatch.setattr(driver, "open_crew", no_places)
    assert driver.run(config, make_plan(config), command=TYPED) == 75
    assert [event["event"] for event in events(config)] == ["starting", "released", "no_places", "goodput"]

    def too_few(*_):
        raise NoPlaces("waited 5 s for 4 CPUs, 2 of 4 there (free)")

    monkeypatch.setattr(driver.resources, "secure", too_few)
    config.run.dir += "-3"
    assert driver.run(config, make_plan(config), command=TYPED) == 75
    assert not Path(config.run.dir).exists()


DAMAGED = Differences([Damage(1, "model.embedding"), Damage(1, "model.head")])


def test_a_damaged_rank_is_named_and_restored_from_the_others(config, drive):
    """Its process stays; of its memory nothing is used; the step is done again, and none is lost."""
    assert drive(prepare=lambda crew: crew.verdicts.update({4: [DAMAGED]})) == 0
    [failure] = events(config, "failure")
    assert (failure["rank"], failure["number"], failure["kind"], failure["step"]) == (1, 1, "damaged", 4)
    assert "model.embedding and 1 more is not what its replicas hold" in failure["cause"]
    assert events(config, "damaged")[0]["ranks"] == [[1, ["model.embedding", "model.head"]]]
    [restored] = events(config, "restored")
    assert (restored["source"], restored["step"]) == ("memory", 3)
    assert events(config, "released")[0]["lost"] == [] and not events(config, "rolled_back")
    assert "rank1[data1] damaged in step(4)" in drive.out


def test_a_rank_that_is_damaged_again_and_again_ends_the_run(config, drive):
    assert drive(prepare=lambda crew: crew.verdicts.update({4: [DAMAGED] * 9})) == 1
    assert len(events(config, "failure")) == config.elastic.attempts and "model.embedding" in drive.out


def test_replicas_of_which_nobody_is_right_end_the_run(config, drive):
    verdict = Differences(undecided=[Dispute([0, 2], "model.embedding")])
    assert drive(prepare=lambda crew: crew.verdicts.update({4: [verdict]})) == 1
    assert events(config, "undecided")[0]["tensors"] == [[[0, 2], "model.embedding"]]
    assert "model.embedding of rank0[data0] and rank2[data2] differ" in drive.out

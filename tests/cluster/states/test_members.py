"""Members are lost, replaced, waited for and refused: the mesh shrinks and grows, and what fails is tried again."""

import json
from pathlib import Path

import pytest

from platform.boundary.refusals import ConfigError
from platform.monitor import MetricsLog
from tests.doubles.fake_crew import Dead, Hung
from tests.harness.oracle import configure
from tests.harness.scripted_run import BOOM, RUN, events, names, once_each, seats, steps


def test_an_undisturbed_run(config, drive):
    assert drive() == 0 and once_each(config)
    assert names(config) == ["starting", *RUN, "first_step", "checkpoint", "released", "done", "goodput"]
    assert all(event.keys() >= {"time", "generation", "event"} for event in events(config))
    assert drive.crew.released == 0 and "survived" not in drive.out


def test_a_world_of_one_starts(config, drive):
    """No collective reaches anywhere there: what a rank builds is as fresh as elsewhere, and built once."""
    config.parallel.data = 1
    assert drive() == 0 and once_each(config)


def test_it_shrinks_to_fewer_replicas_and_loses_nothing(config, drive):
    config.elastic.replace = False
    assert drive({"step(3)": [{2: Dead}]}) == 0
    assert seats(config) == [[0, 1, 2, 3], [0, 1, 3]]
    assert steps(config) == [(1, 4), (2, 4), (3, 3), (4, 3), (5, 3), (6, 3)]
    again = ["failure", "released", *RUN[:2], "restored", "running", "first_step"]
    assert names(config) == ["starting", *RUN, "first_step", *again, "checkpoint", "released", "done", "goodput"]
    [failure] = events(config, "failure")
    assert (failure["number"], failure["kind"], failure["step"], failure["method"]) == (2, "died", 3, "step(3)")
    assert failure["coordinates"]["data"] == 2 and failure["generation"] == 1
    assert events(config, "released")[0]["lost"] == [2]
    [restored] = events(config, "restored")
    assert (restored["step"], restored["source"], restored["generation"]) == (2, "memory", 2)
    assert events(config, "forming")[1]["reason"].startswith("3 workers: data 4 -> 3")
    [cost] = events(config, "goodput")
    assert (cost["failures"], cost["steps_lost"], len(cost["recoveries"])) == (1, 0, 1)
    rows = MetricsLog.read_rows(Path(config.run.dir, "metrics.jsonl"))
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


@pytest.mark.parametrize("every", [1, 2])
def test_growth_asks_for_what_would_be_held_a_step_later(config, drive, every):
    """As on GPUs: the state after a step is held beside the next one, unless the driver wants it now."""
    config.parallel.data, config.elastic.max_workers, config.elastic.snapshot_every = 2, 3, every

    def prepare(crew):
        crew.late, crew.ready = True, False

    assert drive({"step(2)": [lambda crew: setattr(crew, "ready", True)]}, prepare) == 0 and once_each(config)
    assert [event["step"] for event in events(config, "restored")] == [2]
    assert [name for name, _ in drive.crew.calls].count("hold") == 1


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
        crew_starting = type(crew).starting_members.fget

        class Slowly(type(crew)):
            @property
            def starting_members(self):
                if next(looks, None) is None:
                    self.ready = True
                return crew_starting(self)

        crew.__class__ = Slowly
        return {1: Dead}

    assert drive({"step(3)": [slowly]}) == 0 and once_each(config)
    [waiting] = events(config, "waiting")  # once
    assert waiting["alive"] == 3 and waiting["reason"] == "3 workers there, and elastic.min_workers=4"
    assert drive.out.count("waiting up to 10 s for more") == 1


def test_too_few_workers_for_too_long_end_the_run(config, drive, at_once):
    config.elastic.min_workers, config.checkpoint.every = 4, 2
    assert drive({"step(4)": [lambda crew: setattr(crew, "ready", False) or {1: Dead}]}) == 1
    assert names(config)[-4:] == ["waiting", "released", "gave_up", "goodput"]
    [end] = events(config, "gave_up")
    assert end["cause"].startswith("3 workers there, and elastic.min_workers=4; waited ")
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
    first = drive.out.rindex("rank1[data1] on ")
    said = drive.out[first:].splitlines()
    assert " failed in step(4)" in said[0]
    assert said[1] == "stopped after step 3: the same command continues after step 2:"
    assert said[2].startswith("  python -m platform.launch +experiment=x ")
    assert "0 of 3 failures survived, 1 step lost" in drive.out


def test_attempts(config, drive):
    config.elastic.attempts = 1
    assert drive({"step(4)": [{1: BOOM}]}) == 1
    assert len(events(config, "failure")) == 1


@pytest.mark.parametrize("call", ["step(4)", "evaluate"])
def test_a_users_mistake_is_no_failure_to_recover_from(config, drive, call):
    config.eval.every, config.elastic.attempts = 3, 5
    assert drive({call: [{1: ConfigError("data.objective=own: sample 7 has 300")}]}) == 1
    [end] = events(config, "gave_up")
    assert end["cause"] == "data.objective=own: sample 7 has 300" and end["step"] == 3 - (call == "evaluate")
    assert not events(config, "failure") and len(events(config, "formed")) == 1
    assert drive.out.count("sample 7 has 300") == 1 and "the same command" in drive.out


def test_a_refusal_of_what_may_go_well_elsewhere_is_one(config, drive):
    """A disk that fails, or a worker that has just come, on another machine perhaps."""
    try:
        try:
            raise OSError("Input/output error")
        except OSError:
            raise ConfigError("data.path=a.gz: Input/output error") from None
    except ConfigError as error:
        broken = error
    assert drive({"step(4)": [{1: broken}], "build": [{}, {0: ConfigError("model.source=x: is gone")}]}) == 0
    assert len(events(config, "failure")) == 2 and once_each(config)


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

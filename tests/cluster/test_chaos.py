"""Workers die, stop, hang and raise at random steps and phases; the run gives what it would have given undisturbed."""

from __future__ import annotations

import random
import shutil
import signal
import tempfile

import pytest

from platform.cluster.crew import remote_crew
from tests.harness import chaos

pytestmark = pytest.mark.timeout(900)

STEPS = 20
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
PLANS = {
    "two": {"data": 2},
    "1d": {"tensor": "1d", "axes": {"t": 2}, "data": 4},
    "zero 3": {"tensor": "1d", "axes": {"t": 2}, "data": 4, "zero": 3},
    "interleaved": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "zero": 1, "pipeline": "interleaved", "stages": 2,
                    "chunks": 2},
    "3d": {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 2}},
    "context": {"context": 4, "context_kind": "nested", "context_heads": 2, "data": 2, "zero": 3},
    "dsp_csub": {"tensor": "1d", "axes": {"t": 2}, "branch": "dsp_csub", "branch_axes": {"g": 2}, "data": 2},
}  # fmt: skip
MOMENTS = ("first_step", "failure", "released", "forming", "formed", "running")  # outside: strikes shortly after these


@pytest.fixture
def survives(tmp_path, monkeypatch):
    """Has the run struck by `faults`, and from outside by `signals` shortly after `moments`; compares; its journal."""
    monkeypatch.setattr(tempfile, "tempdir", tempfile.mkdtemp(prefix="chaos-"))  # where nobody else leaves anything
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())

    def survive(config, faults=(), moments=(), signals=(), seed=0, worker=chaos.WORKER):
        config.elastic.faults = list(faults)
        expected = chaos.undisturbed(config, tmp_path / "alone")
        outside = chaos.Outside(config, random.Random(seed), moments, signals)
        with chaos.nothing_left():
            with outside:
                status = chaos.drive(config, worker)
        events = chaos.journal(config)
        assert status == 0, events[-3:]
        assert chaos.differences(chaos.rows(config), expected) == []
        [account] = of(events, "goodput")
        assert len(of(events, "injected")) == len({fault.split(":")[0] for fault in faults})
        assert account["failures"] > 0
        if not of(events, "not_whole"):  # more died at once than one failure domain: then storage, or the beginning
            assert account["steps_lost"] == 0
        print(f"struck {len(of(events, 'injected'))} times inside, {len(outside.sent)} times outside: {account}")
        return events

    yield survive
    shutil.rmtree(tempfile.gettempdir())


def of(events, name):
    return [event for event in events if event["event"] == name]


def configured(tmp_path, plan, spares, steps=STEPS):
    config = chaos.configured(tmp_path / "run", steps, **PLANS[plan])
    config.elastic.spares, config.checkpoint.every = spares, 4
    return config


@pytest.mark.full
@pytest.mark.parametrize("followed", [2, 64])
def test_every_kind_of_failure_in_one_run(tmp_path, survives, monkeypatch, followed):
    monkeypatch.setattr(remote_crew, "FOLLOWED", followed)
    config = configured(tmp_path, "interleaved", spares=1)
    faults = chaos.random_faults(random.Random(0), STEPS, 5, 8)
    assert {fault.split(":")[1] for fault in faults} == set(chaos.KINDS)
    events = survives(config, faults, ["first_step", "failure", "formed"], [KILL, STOP, KILL])
    assert {event["kind"] for event in of(events, "failure")} == {"died", "failed", "hung"}


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("spares", range(3))
@pytest.mark.parametrize("plan", PLANS)
def test_any_plan_survives_anything(tmp_path, survives, plan, spares, seed):
    chance = random.Random(f"{plan} {spares} {seed}")
    faults = chaos.random_faults(chance, STEPS, 6, 8)
    moments = [chance.choice(MOMENTS) for _ in range(4)]
    survives(configured(tmp_path, plan, spares), faults, moments, [chance.choice((KILL, STOP)) for _ in moments], seed)


@pytest.mark.full
def test_replicas_go_one_by_one(tmp_path, survives):
    """4 -> 3 -> 2 -> 1 under ZeRO-3, a global batch of 16."""
    config = chaos.configured(tmp_path / "run", 8, data=4, zero=3)
    config.elastic.replace = False
    events = survives(config, ["3:kill:1:forward", "5:kill:2:checkpoint", "7:kill:0:backward"])
    assert [event["world_size"] for event in of(events, "forming")] == [4, 3, 2, 1]
    assert [row["world_size"] for row in chaos.rows(config)] == [4, 4, 3, 3, 2, 2, 1, 1]


@pytest.mark.full
@pytest.mark.usefixtures("warm_server")
def test_neighbours_that_die_at_once_leave_what_they_held_to_the_others(tmp_path, survives, monkeypatch):
    """Under ZeRO-1, where each rank alone has a quarter of the moments, no copy of it was sent to anybody. The others
    follow rank 0, as in a large world, but for the steps that are saved."""
    monkeypatch.setattr(remote_crew, "FOLLOWED", 2)
    config = chaos.configured(tmp_path / "run", 5, data=4, zero=1)
    config.elastic.replace, config.checkpoint.every = False, 2
    events = survives(config, ["4:kill:1:forward", "4:kill:2:forward"])
    [restored] = of(events, "restored")
    assert (restored["source"], restored["step"], of(events, "not_whole")) == ("memory", 3, [])
    assert [row["world_size"] for row in chaos.rows(config)] == [4, 4, 4, 2, 2]


@pytest.mark.full
def test_a_killed_run_without_snapshots_begins_again(tmp_path):
    """The control of `steps_lost`."""
    config = chaos.configured(tmp_path / "run", 6, data=2)
    config.elastic.snapshot_every, config.elastic.replace, config.elastic.faults = 0, False, ["4:kill:1:forward"]
    assert chaos.drive(config) == 0
    [account] = of(chaos.journal(config), "goodput")
    assert account["steps_lost"] == 3
    assert chaos.differences(chaos.rows(config), chaos.undisturbed(config, tmp_path / "alone")) == []


@pytest.mark.usefixtures("warm_server")
@pytest.mark.parametrize("worker", ["StaleWorker", pytest.param("ForgetfulWorker", marks=pytest.mark.full)])
def test_a_wrong_recovery_is_found(tmp_path, worker):
    """The control of the comparison."""
    config = chaos.configured(tmp_path / "run", 6, data=2)
    config.elastic.replace, config.elastic.faults = False, ["4:kill:1:forward"]
    assert chaos.drive(config, f"tests.doubles.stale_worker:{worker}") == 0
    differing = chaos.differences(chaos.rows(config), chaos.undisturbed(config, tmp_path / "alone"))
    assert differing and all(line.startswith(("step 4", "step 5", "step 6")) for line in differing)

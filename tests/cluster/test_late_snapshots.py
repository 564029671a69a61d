"""Snapshots beside the next step, as on GPUs, of processes that share no memory: copies travel while a step runs."""

from __future__ import annotations

import pytest

from tests.doubles.late_worker import STEP
from tests.harness import chaos

pytestmark = pytest.mark.usefixtures("warm_server")


def drive(tmp_path, worker: str):
    """A run of three replicas under ZeRO-1, of which each rank alone has a third of the moments; its journal."""
    config = chaos.configured(tmp_path / "run", STEP + 1, data=3, zero=1, global_batch=12, layers=1)
    config.elastic.replace = False
    assert chaos.drive(config, f"tests.doubles.late_worker:{worker}") == 0
    assert chaos.differences(chaos.rows(config), chaos.undisturbed(config, tmp_path / "alone")) == []
    return chaos.journal(config)


@pytest.mark.parametrize(("worker", "kind"), [("DyingWorker", "died"), ("HungWorker", "hung")])
def test_who_is_lost_in_the_middle_of_a_transfer_takes_only_that_snapshot_along(tmp_path, worker, kind):
    """The two others go on from the snapshot before it, which is whole, wherever their own transfers had come."""
    events = drive(tmp_path, worker)
    [failure] = [event for event in events if event["event"] == "failure"]
    assert (failure["number"], failure["kind"], failure["method"]) == (1, kind, f"step({STEP})")
    [released, *_] = [event for event in events if event["event"] == "released"]
    assert (released["lost"], released["alive"]) == ([1], 2), "whose transfer was interrupted leaves like others"
    [restored] = [event for event in events if event["event"] == "restored"]
    assert (restored["source"], restored["step"]) == ("memory", STEP - 2)


def test_who_is_killed_takes_the_passes_along_that_were_launched_ahead(tmp_path):
    """The others hold passes of a step that was not ordered: they do it again, and are as if nothing had happened."""
    events = drive(tmp_path, "KilledWorker")
    [failure] = [event for event in events if event["event"] == "failure"]
    assert (failure["number"], failure["kind"]) == (1, "died")
    [restored] = [event for event in events if event["event"] == "restored"]
    assert restored["source"] == "memory" and restored["step"] >= STEP - 2


def test_nobody_is_blamed_for_a_transfer_that_takes_long(tmp_path):
    events = drive(tmp_path, "SlowWorker")
    assert not [event for event in events if event["event"] == "failure"]

"""The sizes that a run may have: device memory, min_workers, max_workers, places of the cluster."""

from pathlib import Path

import pytest

from platform.boundary.refusals import ConfigError
from platform.cluster import driver
from platform.cluster.crew.failures import NoPlaces
from platform.predict.make_plan import make_plan
from tests.doubles.fake_crew import Dead
from tests.harness.oracle import configure
from tests.harness.scripted_run import TYPED, events


def test_a_small_device_gets_no_plan_that_it_has_no_room_for(config, drive):
    from platform.predict.memory_budget import predict_peak_bytes

    config.tensor, config.parallel.data = configure(tensor="1d", axes={"t": 4}).tensor, 1
    config.elastic.replace = False
    room = predict_peak_bytes(config, make_plan(config))
    assert drive({"step(3)": [{0: Dead}]}, lambda crew: setattr(crew, "memory", room)) == 1


@pytest.mark.parametrize(
    ("least", "most", "line"),
    [
        (5, 0, "elastic.min_workers=5: must be <= 4 workers, which the run may have; nearest legal: 4"),
        (1, 3, "elastic.max_workers=3: must be 0 or >= 4 workers, as the plan has; nearest legal: 0, 4"),
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
        crew.hire_workers = lambda count: None
        crew._starting = [2, 3]

    def they_come(crew):
        crew.arrive()

    assert drive({"step(3)": [they_come]}, two_are_late) == 1  # nobody comes before it forms
    assert "2 of 4 workers there, and elastic.min_workers is not set" in drive.out
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
    assert driver.drive_run(config, make_plan(config), command=TYPED) == 75
    assert [event["event"] for event in events(config)] == ["starting", "released", "no_places", "goodput"]

    def too_few(*_, **__):
        raise NoPlaces("waited 5 s for 4 CPUs, 2 of 4 there (free)")

    monkeypatch.setattr(driver.resources, "await_worker_places", too_few)
    config.run.dir += "-3"
    assert driver.drive_run(config, make_plan(config), command=TYPED) == 75
    assert not Path(config.run.dir).exists()

"""What failures cost, from the journal."""

from dataclasses import replace

from platform.monitor.goodput import compute_goodput, cost_line
from tests.harness.happenings import happening


def events(*rows):
    return [happening(time, word, **fields) for time, word, fields in rows]


JOURNAL = events(
    (100.0, "starting", {}),
    (102.0, "formed", {}),
    (103.0, "running", {}),
    (104.0, "first_step", {"step": 1}),
    (110.0, "failure", {"useful_seconds": 6.0}),
    (110.1, "released", {}),
    (110.2, "forming", {}),
    (110.9, "rolled_back", {"steps_lost": 0}),
    (112.0, "first_step", {"step": 8}),
    (120.0, "failure", {"useful_seconds": 8.0}),
    (120.5, "failure", {}),  # another one before the first step
    (121.0, "rolled_back", {"steps_lost": 2, "lost_seconds": 1.5}),
    (123.0, "first_step", {"step": 12}),
    (130.0, "done", {"useful_seconds": 7.0}),
)


def test_a_run_with_failures():
    cost = compute_goodput(JOURNAL)
    assert (cost.failures, cost.steps_lost, cost.transitions) == (3, 2, 0)
    assert cost.recoveries == [2.0, 3.0, 2.5]
    assert cost.seconds == 30.0 and cost.useful_seconds == 6.0 + 8.0 + 7.0 - 1.5
    assert cost.goodput == 19.5 / 30.0
    assert cost_line(cost) == (
        "3 failures survived, 2 steps lost; to the first new step 2.50 s median, 3.00 s longest; "
        "goodput 65.0% of 30.0 s"
    )


def test_only_what_a_step_followed_was_survived():
    ended = events(
        (0.0, "starting", {}), (1.0, "failure", {}), (2.0, "first_step", {}), (3.0, "failure", {}),
        (4.0, "gave_up", {"steps_lost": 2, "useful_seconds": 3.0, "lost_seconds": 1.0}),
        (9.0, "starting", {}), (10.0, "first_step", {}), (11.0, "done", {}),
    )  # fmt: skip
    assert compute_goodput(ended).recoveries == [1.0] and compute_goodput(ended).goodput == 2.0 / 6.0
    assert cost_line(compute_goodput(ended)).startswith("1 of 2 failures survived, 2 steps lost; ")


def test_the_time_between_two_drivers_does_not_count():
    twice = [*JOURNAL, *(replace(event, time=event.time + 1000) for event in JOURNAL)]
    assert compute_goodput(twice).seconds == 60.0
    assert compute_goodput(twice).goodput == 19.5 / 30.0


def test_a_driver_that_was_killed_ends_with_its_last_event():
    assert compute_goodput(JOURNAL[:5]).seconds == 10.0
    later = [replace(event, time=event.time + 1000) for event in JOURNAL]
    assert (
        compute_goodput([*JOURNAL[:5], *later]).seconds == 40.0
        and len(compute_goodput([*JOURNAL[:5], *later]).recoveries) == 3
    )


def test_a_restart_of_the_driver_is_told_from_failures_of_workers():
    """The first driver dies in the middle of what it had not saved; the second loses a worker, and ends."""
    journal = events(
        (0.0, "starting", {}), (2.0, "first_step", {}), (8.0, "checkpoint", {"useful_seconds": 6.0}),
        (10.0, "failure", {"useful_seconds": 2.0}), (11.0, "first_step", {}),
        (500.0, "starting", {}), (500.1, "took_over", {"step": 9, "steps_lost": 3}), (504.0, "first_step", {}),
        (510.0, "failure", {"useful_seconds": 6.0}), (511.0, "first_step", {}),
        (520.0, "done", {"useful_seconds": 9.0}),
    )  # fmt: skip
    cost = compute_goodput(journal)
    assert (cost.restarts, cost.restart_seconds, cost.failures, cost.steps_lost) == (1, 4.0, 2, 3)
    assert cost.recoveries == [1.0, 1.0] and cost.seconds == 11.0 + 20.0
    assert cost.useful_seconds == 6.0 + 6.0 + 9.0  # the 2 s after the checkpoint went with the driver
    line = "2 failures survived, 1 restart of the driver (4.00 s to the first new step), 3 steps lost; "
    assert cost_line(cost).startswith(line)


def test_a_driver_that_ended_and_is_started_again_was_not_restarted():
    journal = events((0.0, "starting", {}), (5.0, "drained", {}), (9.0, "starting", {}), (12.0, "done", {}))
    assert compute_goodput(journal).restarts == 0 and "restart" not in cost_line(compute_goodput(journal))


def test_nothing_happened():
    cost = compute_goodput([])
    assert cost.goodput == 0.0 and cost_line(cost) == "0 failures survived, 0 steps lost; goodput 0.0% of 0.0 s"


def test_growth_is_no_failure():
    grown = events((0.0, "starting", {}), (5.0, "reforming", {"useful_seconds": 4.0}), (6.0, "done", {}))
    assert (
        compute_goodput(grown).transitions == 1
        and compute_goodput(grown).failures == 0
        and compute_goodput(grown).recoveries == []
    )


def test_the_account_of_an_end_that_saved_nothing_does_not_count_again():
    once = events((0.0, "starting", {}), (4.0, "unsaved", {"useful_seconds": 3.0}), (4.0, "goodput", {}))
    later = [replace(event, time=event.time + 1000) for event in once]
    assert compute_goodput([*once, *later]).useful_seconds == 6.0 and compute_goodput([*once, *later]).seconds == 8.0

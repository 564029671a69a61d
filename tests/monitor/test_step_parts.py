"""Parts of a step: typical ones, and the table and the words that set them beside their prediction."""

import pytest

from platform.monitor.step_parts import (
    average_parts,
    describe_likely_cause,
    describe_main_cause,
    is_worth_telling,
    parts_table,
)
from platform.plan.plan_summary import fold_into_measured_parts

PREDICTED = {"computing": 1.0, "waiting for t": 0.2, "bubble": 0.0, "optimizer": 0.1}


def test_a_clock_tells_apart_less_than_a_prediction():
    parts = {"computing": 1.0, "waiting for stage": 0.5, "bubble": 0.25, "host": 2.0, "optimizer": 0.125}
    assert fold_into_measured_parts(parts) == {"computing": 3.0, "bubble": 0.75, "optimizer": 0.125}
    assert "host" in parts, "the argument stays as it is"


def test_steps_that_are_far_from_the_others_do_not_count():
    steps = [{"computing": float(n)} for n in (100, 2, 3, 4, 5, 0, 6, 200)]
    assert average_parts(steps) == {"computing": 4.5}, "2 to 6"
    assert average_parts(steps[:1]) == steps[0]


def test_the_table_adds_up():
    measured = {**PREDICTED, "waiting for t": 0.7, "data": 0.05, "snapshot": 0.001, "rest": 0.02}
    title, _, *rows, line = parts_table(PREDICTED, measured, "cpu", 40)
    assert title == "a step on cpu, measured in 40 steps"
    assert [row.split() for row in rows] == [
        ["computing", "1", "s", "1", "s", "+0", "ms"],
        ["waiting", "for", "t", "200", "ms", "700", "ms", "+500", "ms"],
        ["optimizer", "100", "ms", "100", "ms", "+0", "ms"],
        ["data", "-", "50", "ms", "+50", "ms"],
        ["rest", "-", "21", "ms", "+21", "ms"],
        ["altogether", "1.3", "s", "1.87", "s", "+571", "ms"],
    ]
    assert line == (
        "a step takes 1.4 times as long as predicted; 88% of the difference is waiting for t: links are slower than"
        " described, or ranks more uneven"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"computing": 1.03}, "a step takes as long as predicted, to 2.3%"),
        (
            {"computing": 0.5},
            "0.62 times as long as predicted; 100% of the difference is computing, in which devices are",
        ),
        ({"data": 0.5}, "all of the difference is data, which no prediction counts"),
        ({"bubble": 0.5, "rest": 0.2}, "71% of the difference is the bubble: messages between stages are slower than"),
    ],
)
def test_the_largest_cause_is_named(changes, said):
    assert said in describe_main_cause(PREDICTED, PREDICTED | changes)


def test_large_factors_are_numbers_that_people_read():
    """They used to be 1.5e+02 times."""
    assert "a step takes 1,500 times as long" in describe_main_cause({"computing": 1.0}, {"computing": 1500.0})
    assert "a step takes 15 times as long" in describe_main_cause({"computing": 1.0}, {"computing": 15.2})


@pytest.mark.parametrize("seconds, told", [(1.0, False), (1.9, False), (0.6, False), (2.1, True), (0.4, True)])
def test_what_is_near_its_prediction_is_not_told(seconds, told):
    assert is_worth_telling({"computing": 1.0}, {"computing": seconds}) is told


@pytest.mark.parametrize(
    ("load", "workers", "threads", "said"),
    [
        (2.5, 1, 2, ""),
        (11.2, 1, 1, "likely cause: this machine is busy, with a load average of 11 on 2 cores"),
        (11.2, 1, 2, "wait for each other then: try cluster.threads=1"),
        (11.2, 4, 1, "likely cause: 4 threads of the workers share 2 cores"),
    ],
)
def test_a_likely_cause_is_named(load, workers, threads, said):
    line = describe_likely_cause(load, 2, workers, threads)
    assert line.endswith(said) and bool(line) == bool(said)

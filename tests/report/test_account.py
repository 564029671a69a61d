"""The account of a run's time adds up, and charges each failure for what it cost."""

from __future__ import annotations

import pytest

from platform.monitor.events import JournalEvent, build_event
from platform.monitor.goodput import build_account, compute_goodput
from platform.report.account import is_unfinished, shown_events, time_shares


def at(time: float, event: str, **fields: object) -> JournalEvent:
    return build_event(event, time=time, **fields)


def forming(time: float, workers: int) -> JournalEvent:
    return at(time, "forming", world_size=workers, mesh={"data": workers}, reason="", alive=workers)


def failure(time: float, step: int, useful: float) -> JournalEvent:
    more = {"kind": "died", "method": f"step({step})", "cause": "Traceback\nKilled", "log": None, "coordinates": {}}
    return at(time, "failure", number=3, rank=3, node="host-1/ray", step=step, useful_seconds=useful, **more)


START = [
    at(0, "starting", world_size=4, cluster="local", device="cpu"),
    forming(4, 4),
    at(10, "first_step", step=1),
    at(30, "checkpoint", step=20, directory="a", bytes=1, seconds=0.1, useful_seconds=20.0),
]
FAILED = [
    *START,
    failure(40, 31, useful=10.0),
    at(41, "rolled_back", step=20, steps_lost=10, lost_seconds=10.0),
    forming(42, 3),
    at(44, "first_step", step=21),
    at(64, "reforming", reason="4 workers are there", step=41, useful_seconds=20.0),
    forming(65, 4),
    at(67, "first_step", step=42),
    at(80, "done", step=54, saved=54, useful_seconds=12.0),
]


def test_a_failure_is_charged_for_all_that_it_cost() -> None:
    account = build_account(FAILED)
    assert [tuple(s) for s in account.periods] == [
        ("start", 0, 10),
        ("useful", 10, 30),
        ("lost", 30, 40),
        ("recover", 40, 44),
        ("fewer", 44, 64),
        ("reshape", 64, 67),
        ("useful", 67, 80),
    ]
    [cost] = account.failures
    assert (cost.who, cost.what, cost.step) == ("rank 3 on host-1", "died in step(31): Killed", 31)
    assert (cost.stopped, cost.repeated, cost.steps, cost.fewer) == (4.0, 10.0, 10, 5.0)  # a quarter of 20 s
    assert cost.total_seconds == 19.0


def test_shares_are_those_of_goodput_and_add_up() -> None:
    shares = time_shares(build_account(FAILED), None)
    assert sum(shares.values()) == pytest.approx(compute_goodput(FAILED).seconds)
    assert shares["useful"] == compute_goodput(FAILED).useful_seconds == 52.0
    assert shares["lost"] == 10.0 and shares["recover"] == 4.0 and shares["rest"] == 1.0


def test_the_first_step_of_a_mesh_is_training_and_counted_once() -> None:
    account = build_account(FAILED, step_seconds={1: 2.0, 21: 1.0, 42: 0.5})
    assert [tuple(s) for s in account.periods] == [
        ("start", 0, 8),
        ("useful", 8, 30),
        ("lost", 30, 40),
        ("recover", 40, 43),
        ("fewer", 43, 64),  # of which the last failure is charged with the step from 43 on as a whole
        ("reshape", 64, 66.5),
        ("useful", 66.5, 80),
    ]
    [cost] = account.failures
    assert (cost.stopped, cost.fewer) == (4.0, 5.0)
    assert time_shares(account, None)["rest"] == 1.0 + 3.5


def test_of_two_failures_at_once_each_is_charged_for_its_own_time() -> None:
    account = build_account(
        [*START, failure(40, 31, 10.0), failure(42, 31, 0.0), forming(43, 4), at(47, "first_step", step=31)]
    )
    assert [f.stopped for f in account.failures] == [2.0, 5.0]


def test_a_driver_that_died_is_charged_for_what_its_successor_repeats() -> None:
    again = [
        at(100, "starting", world_size=4, cluster="local", device="cpu"),
        at(100, "took_over", step=25, steps_lost=5),
        forming(101, 4),
        at(106, "first_step", step=21),
    ]
    account = build_account([*START, at(35, "sampled", step=25, prompt="", text=""), *again], now=110)
    assert [tuple(s) for s in account.periods][2:] == [
        ("lost", 30, 35),
        ("down", 35, 100),
        ("start", 100, 106),
        ("useful", 106, 110),
    ]
    [cost] = account.failures
    assert (cost.who, cost.stopped, cost.repeated, cost.steps) == ("the driver", 6.0, 5.0, 5)


def test_an_empty_journal_has_an_empty_account() -> None:
    assert build_account([]).periods == [] and not is_unfinished([])
    assert is_unfinished(START) and not is_unfinished(FAILED)


def test_of_many_events_bad_news_are_kept() -> None:
    many = [failure(1, 1, 0.0), *(at(i, "first_step", step=i) for i in range(2, 100))]
    shown, left_out = shown_events(many, 10)
    assert len(shown) == 10 and shown[0].word == "failure" and left_out == 89

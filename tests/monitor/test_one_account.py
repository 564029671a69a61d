"""The account of a run's time and its goodput agree: on journals that runs left behind, and on drawn ones."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from platform.monitor import events
from platform.monitor.events import JournalEvent
from platform.monitor.goodput import build_account, compute_goodput
from tests.harness.happenings import happening

TESTS = Path(__file__).parents[1]
JOURNALS = sorted(TESTS.glob("kept/run/journal.jsonl")) + sorted(TESTS.glob("commands/kept_runs/*/run/journal.jsonl"))
ENDS = ("done", "drained", "gave_up", "unsaved", "no_places", "cluster_lost")
IN_BETWEEN = ("forming", "formed", "running", "first_step", "failure", "reforming", "rolled_back", "checkpoint",
              "checkpoint_failed", "released", "sampled", "slow", "waiting")  # fmt: skip
USEFUL = (*ENDS, "failure", "reforming", "checkpoint", "checkpoint_failed")


def drawn(seed: int) -> list[JournalEvent]:
    """Up to five drivers, which end or are killed; all times are multiples of 1/8 s, so that sums are exact."""
    chance, time, journal = Random(seed), 1e9, list[JournalEvent]()

    def seconds(most: int) -> float:
        return chance.randrange(8 * most) / 8

    def happen(word: str, **more: object) -> None:
        nonlocal time
        time += seconds(20)
        useful = {"useful_seconds": seconds(9)} if word in USEFUL and chance.random() < 0.8 else {}
        journal.append(happening(time, word, **useful, **more))

    for _ in range(chance.randint(1, 5)):
        killed = bool(journal) and not isinstance(journal[-1], events.Goodput)
        happen("starting")
        if killed and chance.random() < 0.8:
            happen("took_over", steps_lost=chance.randrange(5))
        for _ in range(chance.randrange(25)):
            word = chance.choice(IN_BETWEEN)
            more = {"world_size": chance.randint(1, 4)} if word == "forming" else {}
            if word == "rolled_back":
                more = {"steps_lost": chance.randrange(5), "lost_seconds": seconds(4)}
            happen(word, **more)
        if chance.random() < 0.6:
            happen(chance.choice(ENDS), steps_lost=chance.randrange(5), lost_seconds=seconds(4))
            happen("goodput")
    return journal


def counted(journal: list[JournalEvent]) -> dict[str, object]:
    """Another walk over the journal, for the numbers of goodput alone."""
    lost = restarts = 0
    useful = seconds = unsaved = restarting = 0.0
    restarted: float | None = None
    recoveries, failed = list[float](), list[float]()
    begin: float | None = None
    last = 0.0
    for event in journal:
        if isinstance(event, events.Starting):
            restarted = None
            if begin is not None:
                seconds, useful, restarts, restarted = (
                    seconds + last - begin,
                    useful - unsaved,
                    restarts + 1,
                    event.time,
                )
            begin, unsaved = event.time, 0.0
            failed.clear()
        if begin is None:
            continue
        last = event.time
        gained = getattr(event, "useful_seconds", None) or 0.0
        useful, unsaved = useful + gained, 0.0 if isinstance(event, events.Checkpoint) else unsaved + gained
        useful -= (gone := getattr(event, "lost_seconds", None) or 0.0)
        unsaved -= gone
        lost += getattr(event, "steps_lost", None) or 0
        if isinstance(event, events.Failure):
            failed.append(event.time)
        elif isinstance(event, events.FirstStep):
            recoveries += [event.time - then for then in failed]
            failed.clear()
            restarting += event.time - restarted if restarted is not None else 0.0
            restarted = None
        elif isinstance(event, events.End):
            seconds, begin = seconds + event.time - begin, None
    seconds += last - begin if begin is not None else 0.0
    return {
        "failures": sum(isinstance(event, events.Failure) for event in journal),
        "transitions": sum(isinstance(event, events.Reforming) for event in journal),
        "steps_lost": lost,
        "recoveries": recoveries,
        "seconds": seconds,
        "useful_seconds": useful,
        "goodput": useful / seconds if seconds else 0.0,
        "restarts": restarts,
        "restart_seconds": restarting,
    }


def agree(journal: list[JournalEvent]) -> None:
    account, cost = build_account(journal), compute_goodput(journal)
    assert cost.own_fields() == counted(journal)
    assert sum(s.end - s.start for s in account.periods if s.kind != "down") == cost.seconds
    assert sum(f.who != "the driver" for f in account.failures) == cost.failures
    for before, after in zip(account.periods, account.periods[1:], strict=False):
        assert before.start < before.end <= after.start


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.parts[-3])
def test_both_agree_on_what_a_run_left_behind(path):
    agree(list(events.read_events(path)))


@pytest.mark.parametrize("seeds", [range(first, first + 100) for first in range(0, 500, 100)], ids=str)
def test_both_agree_on_drawn_journals(seeds):
    for seed in seeds:
        agree(drawn(seed))

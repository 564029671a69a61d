"""Cost of failures: goodput, steps lost and recovery times, computed from the events in `journal.jsonl`."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from platform.monitor.records import events
from platform.monitor.records.events import Goodput, JournalEvent
from platform.plan.language.numbers import count_of


def goodput(journal: Iterable[JournalEvent]) -> Goodput:
    """Compute what failures cost a run from its journal's events, in order: goodput, steps lost, and recovery times.
    Useful seconds are the seconds of committed steps, less the steps that a rollback repeats or a driver leaves unsaved
    at its end or death."""
    failures = transitions = lost = restarts = 0
    useful = seconds = restarting = 0.0
    unsaved = 0.0  # of the useful seconds, those after the last checkpoint
    restarted: float | None = None  # start of a driver that took over and that no step has followed yet
    recoveries: list[float] = []
    failed: list[float] = []  # times of the failures that no step has followed yet
    begin: float | None = None
    last = 0.0  # time of the last event
    for event in journal:
        if isinstance(event, events.Starting):
            restarted = None
            if begin is not None:  # the previous driver was killed: it has no end event
                seconds += last - begin
                useful -= unsaved
                restarts, restarted = restarts + 1, event.time
            begin, unsaved = event.time, 0.0
            failed.clear()  # the previous driver did not survive these
        if begin is None:
            continue
        last = event.time
        if isinstance(event, events.Committed):
            useful += event.useful_seconds or 0.0
            unsaved = 0.0 if isinstance(event, events.Checkpoint) else unsaved + (event.useful_seconds or 0.0)
        if isinstance(event, events.RolledBack | events.End):
            useful -= event.lost_seconds or 0.0
            unsaved -= event.lost_seconds or 0.0
        if isinstance(event, events.RolledBack | events.End | events.TookOver):
            lost += event.steps_lost or 0
        if isinstance(event, events.Failure):
            failures += 1
            failed.append(event.time)
        elif isinstance(event, events.Reforming):
            transitions += 1
        elif isinstance(event, events.FirstStep):
            recoveries += [event.time - then for then in failed]
            failed.clear()
            restarting += event.time - restarted if restarted is not None else 0.0
            restarted = None
        elif isinstance(event, events.End):
            seconds += event.time - begin
            begin = None
    if begin is not None:  # the last driver is running, or was killed: count up to its last event
        seconds += last - begin
    return Goodput(
        failures=failures,
        transitions=transitions,
        steps_lost=lost,
        recoveries=recoveries,
        seconds=seconds,
        useful_seconds=useful,
        goodput=useful / seconds if seconds else 0.0,
        restarts=restarts,
        restart_seconds=restarting,
    )


def cost_line(cost: Goodput) -> str:
    """Format what failures cost a run as one line for people: failures of workers survived, restarts of the driver,
    steps lost, recovery times, goodput."""
    recovery = ""
    if cost.recoveries:
        recovery = f"; to the first new step {median(cost.recoveries):.2f} s median, {max(cost.recoveries):.2f} s"
        recovery += " longest"
    survived = len(cost.recoveries)
    of = f"{survived} of " if survived < cost.failures else ""
    failures = f"{of}{count_of(cost.failures, 'failure')} survived"
    lost = f"{count_of(cost.steps_lost, 'step')} lost"
    often = f"{count_of(cost.restarts, 'restart')} of the driver"
    restarts = f", {often} ({cost.restart_seconds:.2f} s to the first new step)" if cost.restarts else ""
    return f"{failures}{restarts}, {lost}{recovery}; goodput {cost.goodput:.1%} of {cost.seconds:.1f} s"

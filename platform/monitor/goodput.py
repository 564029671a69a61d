"""Cost of failures: goodput, steps lost and recovery times, computed from the events in `journal.jsonl`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

_BEGIN = "starting"
_END = ("done", "drained", "stopped", "gave_up")


@dataclass(frozen=True)
class Goodput:
    """Goodput and failure statistics of one driver, or of several in a row that drove the same run.

    `goodput`: seconds of steps that count, over all seconds from a driver's start to its end; the time between drivers
    is left out. `recoveries`: seconds from the detection of a failure to the end of the first new step, one for each
    failure that the run survived, i.e. that a step followed.
    """

    failures: int
    transitions: int  # generations formed without a failure: growth, a notice
    steps_lost: int  # committed, but redone or given up: no state after them was left
    recoveries: tuple[float, ...]
    seconds: float
    useful_seconds: float

    @property
    def goodput(self) -> float:
        return self.useful_seconds / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and `goodput` as plain data, for the journal and W&B."""
        return asdict(self) | {"recoveries": list(self.recoveries), "goodput": self.goodput}

    def __str__(self) -> str:
        recovery = ""
        if self.recoveries:
            recovery = f"; to the first new step {median(self.recoveries):.2f} s median, {max(self.recoveries):.2f} s"
            recovery += " longest"
        survived = len(self.recoveries)
        of = f" of {self.failures}" if survived < self.failures else ""
        failures = f"{survived}{of} failure{'' if self.failures == 1 else 's'} survived"
        lost = f"{self.steps_lost} step{'' if self.steps_lost == 1 else 's'} lost"
        return f"{failures}, {lost}{recovery}; goodput {self.goodput:.1%} of {self.seconds:.1f} s"


def goodput(journal: Iterable[Mapping[str, Any]]) -> Goodput:
    """Compute the goodput from a journal's events, in order. An event's `useful_seconds` are those of the steps that
    were committed since the previous event with that field; `steps_lost` and `lost_seconds` take steps back, including
    those that a driver left unsaved at its end.
    """
    failures = transitions = lost = 0
    useful = seconds = 0.0
    recoveries: list[float] = []
    failed: list[float] = []  # times of the failures that no step has followed yet
    begin: float | None = None
    last = 0.0  # time of the last event
    for event in journal:
        kind, now = event["event"], event.get("time", last)
        if kind == _BEGIN:
            seconds += last - begin if begin is not None else 0.0  # the previous driver was killed: it has no end event
            begin = last = now
            failed.clear()  # the previous driver did not survive these
        elif begin is None:
            continue
        useful += event.get("useful_seconds", 0.0) - event.get("lost_seconds", 0.0)
        lost += event.get("steps_lost", 0)
        if kind == "failure":
            failures += 1
            failed.append(now)
        elif kind == "reforming":
            transitions += 1
        elif kind == "first_step":
            recoveries += [now - then for then in failed]
            failed.clear()
        last = now
        if kind in _END:
            seconds += now - begin
            begin = None
    if begin is not None:  # the last driver is running, or was killed: count up to its last event
        seconds += last - begin
    return Goodput(failures, transitions, lost, tuple(recoveries), seconds, useful)

"""What failures cost: read from the transitions in `journal.jsonl`, never guessed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

_BEGIN = "starting"
_END = ("done", "drained", "stopped", "gave_up")


@dataclass(frozen=True)
class Goodput:
    """Of one driver's run, or of several after another.

    `goodput`: seconds of steps that count, over all seconds from the first forming to the end, without the time between
    drivers. `recoveries`: seconds from the detection of a failure to the end of the first new step, one per failure
    that a step followed: those were survived.
    """

    failures: int
    transitions: int  # new generations without a failure: growth, a notice
    steps_lost: int  # committed, and done again because nobody had the state after them
    recoveries: tuple[float, ...]
    seconds: float
    useful_seconds: float

    @property
    def goodput(self) -> float:
        return self.useful_seconds / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for the journal and W&B."""
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
    """From a journal's events, in order. `useful_seconds` of an event are those of the steps committed since the event
    before it that has them; `steps_lost` and `lost_seconds` take steps back, also those that a driver left unsaved.
    """
    failures = transitions = lost = 0
    useful = seconds = 0.0
    recoveries: list[float] = []
    failed: list[float] = []  # when the failures were seen that no step followed yet
    begin: float | None = None
    last = 0.0  # when the driver was last heard of
    for event in journal:
        kind, now = event["event"], event.get("time", last)
        if kind == _BEGIN:
            seconds += last - begin if begin is not None else 0.0  # the driver before this one was killed
            begin = last = now
            failed.clear()  # what that one did not survive
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
    if begin is not None:  # the driver is at work, or was killed: all that is known of its end
        seconds += last - begin
    return Goodput(failures, transitions, lost, tuple(recoveries), seconds, useful)

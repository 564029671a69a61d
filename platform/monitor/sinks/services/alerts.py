"""Alerts on a run: made of events in its journal, for people to know at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from platform.monitor.goodput import goodput
from platform.monitor.records import events
from platform.monitor.records.events import JournalEvent
from platform.monitor.story import LINES

GRACE_SECONDS = 3600.0  # of a run before its goodput counts: starting is no useful work
INFO, WARN, ERROR = "INFO", "WARN", "ERROR"

OF_EVENTS: dict[type[JournalEvent], tuple[str, str, str]] = {  # kind of event -> kind of alert, its title and level
    events.Spike: ("spike", "Loss spike", WARN),
    events.Failure: ("failure", "Worker lost", ERROR),
    events.Slow: ("straggler", "Slow worker", WARN),
    events.GaveUp: ("end", "Run ended by a failure", ERROR),
    events.Unsaved: ("end", "Run ended, its last step unsaved", ERROR),
}
_COUNTED = (  # kinds of event that goodput is computed from
    *(events.Starting, events.Committed, events.RolledBack, events.TookOver, events.FirstStep),
)


@dataclass(frozen=True, kw_only=True)
class Alert:
    """Alert on a run: `kind` is spike, failure, recovery, straggler, goodput or end; `level` INFO, WARN or ERROR;
    `time`: the time of its event, in seconds since the epoch; `step`: the last one that the journal named before."""

    kind: str
    level: str
    title: str
    text: str
    time: float
    step: int


class Alerts:
    """Finds the alerts in a run's journal, event by event from its first. `goodput_below`: bound of the goodput, of
    which there is one alert each time that the run falls below it; 0 = none."""

    def __init__(self, goodput_below: float = 0.0):
        """Prepare to find the alerts in a run's journal, of goodput those below a bound."""
        self._bound, self._below = goodput_below, False
        self._counted: list[JournalEvent] = []
        self._failed: list[float] = []  # times of failures that no step has followed yet
        self.step = 0

    def alerts_of(self, event: JournalEvent) -> Iterator[Alert]:
        """Yield the alerts that the run's next event gives."""
        self.step = getattr(event, "step", self.step)
        if how := OF_EVENTS.get(type(event)):
            yield self._alert(event, *how, LINES[type(event)](event))
        if isinstance(event, events.Starting):
            self._failed.clear()  # the previous driver did not survive these
        elif isinstance(event, events.Failure):
            self._failed.append(event.time)
        elif isinstance(event, events.FirstStep) and self._failed:
            seconds = event.time - self._failed[0]
            text = f"step {event.step} is done, {seconds:.1f} s after the failure"
            yield self._alert(event, "recovery", "Recovered", INFO, text)
            self._failed.clear()
        if self._bound and isinstance(event, _COUNTED):
            self._counted.append(event)
            yield from self._goodput(event)

    def _goodput(self, event: JournalEvent) -> Iterator[Alert]:
        """Yield an alert if with this event the run's goodput, which was above its bound, is below it."""
        found = goodput(self._counted)
        before, self._below = self._below, found.seconds >= GRACE_SECONDS and found.goodput < self._bound
        if self._below and not before:
            text = f"{found.goodput:.1%} of {found.seconds / 3600:.1f} h were useful, less than {self._bound:.1%}"
            yield self._alert(event, "goodput", "Low goodput", WARN, text)

    def _alert(self, event: JournalEvent, kind: str, title: str, level: str, text: str) -> Alert:
        """Make an alert of the run on its event."""
        return Alert(kind=kind, title=title, level=level, text=text, time=event.time, step=self.step)

"""Alerts on a run: made of events in its journal, for people to know at once; and `MonitorSink`, the interface of every
service that gets a run's numbers: each does its part of it, and leaves out the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from platform.monitor import events
from platform.monitor.events import JournalEvent
from platform.monitor.goodput import LINES, TimeAccount

GRACE_SECONDS = 3600.0  # of a run before its goodput counts: starting is no useful work
INFO, WARN, ERROR = "INFO", "WARN", "ERROR"

OF_EVENTS: dict[type[JournalEvent], tuple[str, str, str]] = {  # kind of event -> kind of alert, its title and level
    events.Spike: ("spike", "Loss spike", WARN),
    events.Failure: ("failure", "Worker lost", ERROR),
    events.Slow: ("straggler", "Slow worker", WARN),
    events.GaveUp: ("end", "Run ended by a failure", ERROR),
    events.Unsaved: ("end", "Run ended, its last step unsaved", ERROR),
}
_COUNTED = events.Starting | events.Committed | events.RolledBack | events.TookOver | events.FirstStep  # by goodput


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


class AlertFinder:
    """Finds the alerts in a run's journal, event by event from its first. `goodput_below`: bound of the goodput, of
    which there is one alert each time that the run falls below it; 0 = none."""

    def __init__(self, goodput_below: float = 0.0):
        """Prepare to find the alerts in a run's journal, of goodput those below a bound."""
        self._bound, self._below = goodput_below, False
        self._account = TimeAccount({})
        self.step = 0

    def find_alerts(self, event: JournalEvent) -> Iterator[Alert]:
        """Yield the alerts that the run's next event gives."""
        self.step = getattr(event, "step", self.step)
        if how := OF_EVENTS.get(type(event)):
            yield self._build_alert(event, *how, LINES[type(event)](event))
        before = len(self._account.recoveries)
        self._account.enter_event(event)
        for seconds in self._account.recoveries[before : before + 1]:  # of the first failure
            text = f"step {self.step} is done, {seconds:.1f} s after the failure"
            yield self._build_alert(event, "recovery", "Recovered", INFO, text)
        if self._bound and isinstance(event, _COUNTED):
            yield from self._find_goodput_alert(event)

    def _find_goodput_alert(self, event: JournalEvent) -> Iterator[Alert]:
        """Yield an alert if with this event the run's goodput, which was above its bound, is below it."""
        cost = self._account.goodput
        before, self._below = self._below, cost.seconds >= GRACE_SECONDS and cost.goodput < self._bound
        if self._below and not before:
            text = f"{cost.goodput:.1%} of {cost.seconds / 3600:.1f} h were useful, less than {self._bound:.1%}"
            yield self._build_alert(event, "goodput", "Low goodput", WARN, text)

    def _build_alert(self, event: JournalEvent, kind: str, title: str, level: str, text: str) -> Alert:
        """Make an alert of the run on its event."""
        return Alert(kind=kind, title=title, level=level, text=text, time=event.time, step=self.step)


RESUMABLE = 75  # the launcher's exit status of a run that will be continued

Numbers = Mapping[str, float | list[int]]  # of a step, by W&B name; a list is a histogram


@dataclass
class SinkRun:
    """Run whose numbers a service gets. `config`: its configuration without secrets; `monitor`: its keys of that group
    as they are; `driver`: the id of its process, 0 if it has ended; `state`: notes of the service on the run for the
    next process, kept in RUN_DIR/sinks/."""

    directory: Path
    config: dict[str, Any]
    monitor: dict[str, Any]
    driver: int = 0
    state: dict[str, Any] = field(default_factory=dict)


class MonitorSink:
    """Service that gets a run's numbers and events. `where`: text for people that says where they are. `replaces`: a
    step that is sent again takes the place of the first; else it is sent once it cannot be trained again.
    `stored_after`: seconds after which a crash of this process does not lose what the service was sent.
    `takes_steps`: it is sent the numbers of steps."""

    where = ""
    replaces: ClassVar[bool] = True
    stored_after: ClassVar[float] = 0.0
    takes_steps: ClassVar[bool] = True

    def note_already_sent_event(self, event: JournalEvent) -> None:
        """Take note of an event of the run that an earlier process has sent to this service."""

    def send_event(self, event: JournalEvent) -> None:
        """Send an event of the run's journal to this service."""

    def send_alert(self, alert: Alert) -> None:
        """Send an alert on the run to this service, which shows or mails it."""

    def send_steps(self, rows: Sequence[Numbers]) -> None:
        """Send the numbers of committed steps, in order, to this service; the steps may begin again at an earlier."""

    def show_newest_step(self, row: Numbers) -> None:
        """Show at this service the numbers of the run's newest step, which may be trained again."""

    def flush(self) -> None:
        """Let this service store the run's numbers that it was sent, so that a crash does not lose them."""

    def close(self, status: int | None) -> None:
        """End the run at this service with the launcher's exit status; None: the driver died, or has ended before."""

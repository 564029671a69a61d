"""Interface of every service that gets a run's numbers; each does its part of it, and leaves out the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from platform.monitor.records.events import JournalEvent
from platform.monitor.sinks.services.alerts import Alert

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


class Sink:
    """Service that gets a run's numbers and events. `where`: text for people that says where they are. `replaces`: a
    step that is sent again takes the place of the first; else it is sent once it cannot be trained again.
    `stored_after`: seconds after which a crash of this process does not lose what the service was sent.
    `takes_steps`: it is sent the numbers of steps."""

    where = ""
    replaces: ClassVar[bool] = True
    stored_after: ClassVar[float] = 0.0
    takes_steps: ClassVar[bool] = True

    def remember(self, event: JournalEvent) -> None:
        """Take note of an event of the run that an earlier process has sent to this service."""

    def event(self, event: JournalEvent) -> None:
        """Send an event of the run's journal to this service."""

    def alert(self, alert: Alert) -> None:
        """Send an alert on the run to this service, which shows or mails it."""

    def steps(self, rows: Sequence[Numbers]) -> None:
        """Send the numbers of committed steps, in order, to this service; the steps may begin again at an earlier."""

    def newest(self, row: Numbers) -> None:
        """Show at this service the numbers of the run's newest step, which may be trained again."""

    def flush(self) -> None:
        """Let this service store the run's numbers that it was sent, so that a crash does not lose them."""

    def close(self, status: int | None) -> None:
        """End the run at this service with the launcher's exit status; None: the driver died, or has ended before."""

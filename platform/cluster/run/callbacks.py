"""Callbacks of a run that Python code starts: the user's functions, called with the run's own records."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

from platform.cluster.crew.base.signals import Stopped
from platform.monitor.records.events import JournalEvent
from platform.monitor.records.metrics import MetricsRow


@dataclass(frozen=True)
class Callbacks:
    """Functions of the user that a run calls in the driver's process, each with a copy of the record just made.

    `on_step(row)`: after every committed step, with its row of metrics.jsonl. `on_event(event)`: after every event of
    the run, with its entry in journal.jsonl. The run waits until they return, and ignores what they return.
    """

    on_step: Callable[[MetricsRow], object] | None = None
    on_event: Callable[[JournalEvent], object] | None = None


class CallbackGuard:
    """Calls the user's callbacks and keeps their exceptions out of the run. The first exception is kept as `error` and
    makes the guard call `stop`, which ends the run at the next safe moment, as a signal does; a callback that has
    raised is not called again."""

    def __init__(self, callbacks: Callbacks):
        """Guard a run against exceptions of the user's callbacks, of which none has raised yet."""
        self._callbacks = callbacks
        self.error: BaseException | None = None
        self._failed: set[str] = set()
        self.stop: Callable[[str], None] = lambda reason: None  # set by the driver

    def step(self, row: MetricsRow) -> None:
        """Call the user's callback `on_step` with a copy of the run's newest row of metrics.jsonl."""
        self._call("on_step", row)

    def event(self, event: JournalEvent) -> None:
        """Call the user's callback `on_event` with a copy of an event of the run's journal."""
        self._call("on_event", event)

    def _call(self, name: str, value: MetricsRow | JournalEvent) -> None:
        """Call the user's callback of this name with a copy of `value`, unless it has raised before; an exception that
        it raises is kept, and stops the run at the next safe moment."""
        function = getattr(self._callbacks, name)
        if function is None or name in self._failed:
            return
        try:
            function(deepcopy(value))
        except Stopped:  # a second signal, which came during the call
            raise
        except BaseException as error:  # SystemExit too: it would leave the workers behind
            self._failed.add(name)
            self.error = self.error or error
            self.stop(f"{name}, which raised {type(error).__name__}")

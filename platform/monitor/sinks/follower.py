"""Follows a run's files, which may be in use, and sends their new lines to one service, each thing once, also over
several processes."""

from __future__ import annotations

import fcntl
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from time import monotonic, time
from typing import Any

from platform.boundary import documents
from platform.boundary.local_files import replace_text
from platform.boundary.schema import Malformed
from platform.monitor import events, json_records
from platform.monitor.json_records import JOURNAL, METRICS
from platform.monitor.metrics import numbers_by_name, validate_row
from platform.monitor.sinks.alerts import RESUMABLE, AlertFinder, MonitorSink, Numbers, SinkRun

_BLOCK = 4 << 20  # bytes that are read at once


def read_new_lines(path: Path, offset: int) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield, for a service, the objects on the whole lines of a run's metrics or journal from the byte `offset` on,
    each with the places of its first byte and behind its last; lines that are no objects are passed over. A file that
    has become shorter is another one, and is read from its start."""
    with suppress(FileNotFoundError, NotADirectoryError), documents.open_regular_file(path) as file:
        if file.seek(0, 2) < offset:
            offset = 0
        file.seek(offset)
        rest = b""
        while block := file.read(_BLOCK):
            *whole_lines, rest = (rest + block).split(b"\n")
            for line in whole_lines:
                start, offset = offset, offset + len(line) + 1
                with suppress(ValueError, RecursionError):
                    if isinstance(record := json.loads(line), dict):
                        named = b'NaN"' in line or b'Infinity"' in line  # rarely: a look at each number takes longer
                        yield json_records.restore_non_finite(record) if named else record, start, offset
            if len(rest) > json_records.LARGEST:
                offset, rest = offset + len(rest), b""


FOLDER = "sinks"  # in the run directory: how far each service is
MOST_HELD = 1000  # steps that are held back for a service that cannot replace them
_AT_ONCE = 10_000  # steps that are read before the service gets them
STALE_SECONDS = 3600.0  # an alert this old is sent no more: the service came later


class RunFollower:
    """Sends a run's numbers, events and alerts to one service, as far as the run's files have them.

    A service that cannot replace a step gets it when a checkpoint has it or the run ends, or when MOST_HELD later steps
    are done; of a step that is trained again nevertheless it keeps the first.
    """

    def __init__(self, name: str, run: SinkRun, open_sink: Callable[[SinkRun], MonitorSink], alerts: bool = True):
        """Open the service `name` by `open_sink` for a run, to go on where the last process ended; the caller has
        locked it (`lock_service`). `alerts`: send these too."""
        self._stale_seconds = STALE_SECONDS if alerts else 0.0
        self._run, self._file = run, run.directory / FOLDER / f"{name}.json"
        self._metrics, self._journal, self._sent = _read_progress(self._file, run.state)
        self._alerts = AlertFinder(run.monitor.get("goodput_below", 0.0))
        self._held: list[tuple[int, int, Numbers]] = []  # step, place of its line, numbers
        self._read = self._metrics  # place up to which the metrics are read; those after self._metrics are held
        self._shown = self._read  # place of the metrics up to which the service has shown the newest step
        self._final: float = 0  # no step up to this one will be trained again
        self._reached: deque[tuple[float, str]] = deque()  # (clock, places) that the service has, and may still lose
        self.status: int | None = None  # the exit status of the run's last driver; None: it has no end
        self.sink = open_sink(run)
        for event, _ in self._read_events(0, self._journal):
            self._note_event(event)
            self.sink.note_already_sent_event(event)
            list(self._alerts.find_alerts(event))  # an earlier process has sent them

    def catch_up(self) -> None:
        """Send the service what the run's files have got since the last time, and note that it has it. The journal is
        read first: the steps that it calls saved are in the metrics by then."""
        before = (self._metrics, self._journal)
        for event, place in self._read_events(self._journal, inf):
            self._note_event(event)
            self.sink.send_event(event)
            for alert in self._alerts.find_alerts(event):
                if alert.time > time() - self._stale_seconds:
                    self.sink.send_alert(alert)
            self._journal = place
        if self.sink.takes_steps:
            self._catch_up_steps()
        if (self._metrics, self._journal) != before:
            self.sink.flush()
            self._reached.append((monotonic(), self._format_progress()))
        self._store_progress(self.sink.stored_after)

    def _catch_up_steps(self) -> None:
        """Send the service the steps of the run that it may have by now, and show the newest."""
        for line, start, place in read_new_lines(self._run.directory / METRICS, self._read):
            self._read = place
            with suppress(Malformed):
                self._hold_row(validate_row(line), start)
            if len(self._held) >= _AT_ONCE:
                self._send_final_steps()
        self._send_final_steps()
        if self._read != self._shown and self._held:
            self.sink.show_newest_step(self._held[-1][2])
        self._shown = self._read

    def _read_events(self, place: int, end: float) -> Iterator[tuple[events.JournalEvent, int]]:
        """Yield the events of the run's journal between two places, each with the place behind it."""
        for line, start, behind in read_new_lines(self._run.directory / JOURNAL, place):
            if start >= end:
                return
            with suppress(Malformed):
                yield events.parse_event(line), behind

    def _note_event(self, event: events.JournalEvent) -> None:
        """Note which steps an event of the run makes final: the saved ones, and all at an end without a sequel."""
        if isinstance(event, events.Checkpoint):
            self._final = event.step
        elif isinstance(event, events.End):
            self.status = {events.Done: 0, events.Drained: RESUMABLE}.get(type(event), 1)
            self._final = inf if self.status != RESUMABLE else self._final
        elif isinstance(event, events.Starting):
            self.status = None
            self._final = 0 if self._final == inf else self._final  # the run goes on after all

    def finalize_all_steps(self) -> None:
        """Let the service have all steps of the run: it does not go on, and so trains none of them again."""
        self._final = inf

    @property
    def num_held_steps(self) -> int:
        """Return the number of the run's steps that the service does not have yet, as they may be trained again."""
        return len(self._held)

    def _hold_row(self, row: dict[str, Any], start: int) -> None:
        """Add a row of metrics to the steps that are to be sent, in the place of all from its step on."""
        while self._held and self._held[-1][0] >= row["step"]:
            self._held.pop()
        self._held.append((row["step"], start, numbers_by_name(row)))

    def _send_final_steps(self) -> None:
        """Send the service the steps that it may have by now."""
        late = 0 if self.sink.replaces else len(self._held) - MOST_HELD
        count = sum(self.sink.replaces or n < late or step <= self._final for n, (step, *_) in enumerate(self._held))
        ready, self._held = self._held[:count], self._held[count:]
        if rows := [numbers for step, _, numbers in ready if self.sink.replaces or step > self._sent]:
            self.sink.send_steps(rows)
        self._sent = max([self._sent, *(step for step, *_ in ready)])
        self._metrics = self._held[0][1] if self._held else self._read

    def _format_progress(self) -> str:
        """Return how far the service is, and what it remembers of the run, as RUN_DIR/sinks/ has it."""
        places = {METRICS: self._metrics, JOURNAL: self._journal, "step": self._sent, "state": self._run.state}
        return json.dumps(places) + "\n"

    def _store_progress(self, stored_after: float) -> None:
        """Note for the next process how far the service was so many seconds ago, in RUN_DIR/sinks/."""
        newest = ""
        while self._reached and self._reached[0][0] <= monotonic() - stored_after:
            newest = self._reached.popleft()[1]
        if newest:
            replace_text(self._file, newest)

    def close(self, status: int | None) -> None:
        """Send the service the rest, and end the run there with the launcher's exit status (None: it has no end)."""
        self.catch_up()
        self.sink.close(status)
        self._reached.append((monotonic(), self._format_progress()))
        self._store_progress(0)


def _read_progress(file: Path, state: dict[str, Any]) -> tuple[int, int, int]:
    """Read a service's places in metrics and journal and its last step from `file`, and its notes into `state`."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        stored = json.loads(file.read_text())
        places = int(stored[METRICS]), int(stored[JOURNAL]), int(stored["step"])
        state.update(stored["state"])
        return places
    return 0, 0, 0


@contextmanager
def lock_service(directory: Path, name: str, say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Hold the lock of a run's service `name` within the block; `say` prints that another process has it before."""
    (directory / FOLDER).mkdir(0o700, exist_ok=True)
    lock = os.open(directory / FOLDER / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another process sends this run there: waiting until it ends")
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)

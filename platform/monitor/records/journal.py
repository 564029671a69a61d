"""`journal.jsonl`: one line per event of a run, with its time, from which e.g. recovery times are computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from platform.boundary.redaction import redact
from platform.boundary.terminal import print_line
from platform.monitor.records import events
from platform.monitor.records.events import JournalEvent
from platform.monitor.records.json_lines import JsonLines


class Journal:
    """Append-only file of a run's events. `generation` counts formations of the mesh from 1, over all drivers of the
    run.

    Opening an existing journal cuts a torn last line and continues from its last generation; a new one is at 0.
    """

    def __init__(
        self,
        path: Path | str,
        say: Callable[[str], None] = print_line,
        on_event: Callable[[JournalEvent], None] = lambda event: None,
    ):
        """Open or create the journal's file. JsonLines prints warnings, and keeps the events that cannot be written.
        `on_event` is called with each event after it was written."""
        self._on_event = on_event
        self._lines = JsonLines(path, say)
        self.generation: int = max((event.generation for event in events.read(path)), default=0)

    def next_generation(self) -> int:
        """Begin a generation of workers and return its number, which the journal gives to the events that follow."""
        self.generation += 1
        return self.generation

    def write(self, event: JournalEvent) -> None:
        """Write an event that happens now to the journal, with the time and the workers' present generation."""
        stamped = replace(event, **redact(dict(vars(event)) | {"time": time.time(), "generation": self.generation}))
        self._lines.append(redact(events.to_plain(stamped)) | {"event": event.word})
        self._on_event(stamped)  # it sees what was recorded, without secrets

    def events(self) -> list[JournalEvent]:
        """List every event of the run: from the journal's file, if it can be read, and from the lines not written yet.
        Raises Malformed for a line that is not an event."""
        written: list[JournalEvent] = []
        with suppress(OSError):
            written = list(events.read(self._lines.path))
        return written + [events.from_plain(line) for line in self._lines.unwritten]

    def close(self) -> None:
        """Close the journal's file, after a last try to write the events that could not be written."""
        self._lines.close()

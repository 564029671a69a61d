"""`journal.jsonl`: one object per event of a run, with its time, from which e.g. recovery times are computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from platform.boundary.redaction import redact
from platform.boundary.terminal import print_line
from platform.monitor.records import records
from platform.monitor.records.json_lines import JsonLines


class Journal:
    """Append-only log of a run's events. `generation` counts formations of the mesh from 1, over all its drivers.

    Opening an existing journal cuts a torn last line and continues from its last generation; a new one is at 0.
    """

    def __init__(
        self,
        path: Path | str,
        tell: Callable[[str], None] = print_line,
        on_event: Callable[[dict[str, Any]], None] = lambda entry: None,
    ):
        """Open or create the file. `tell`: see JsonLines, which also keeps the events that cannot be written.
        `on_event` is called with each entry after it was written."""
        self.path, self._on_event = Path(path), on_event
        self._lines = JsonLines(path, tell)
        self.generation: int = max((event["generation"] for event in records.lines(path, records.EVENT)), default=0)

    def next_generation(self) -> int:
        """Begin a generation and return its number: the events that follow belong to it."""
        self.generation += 1
        return self.generation

    def event(self, event: str, **fields: Any) -> dict[str, Any]:
        """Write an event, with the time (seconds since the epoch) and the generation, and return the whole entry."""
        entry = {"time": time.time(), "generation": self.generation, "event": event, **redact(fields)}
        self._lines.append(entry)
        self._on_event(entry)
        return entry

    def events(self) -> list[dict[str, Any]]:
        """List every event in the file, if it can be read, and those that could not be written yet. Raises Malformed
        for a line that is not an event."""
        written: list[dict[str, Any]] = []
        with suppress(OSError):
            written = self.read(self.path)
        return written + self._lines.unwritten

    def close(self) -> None:
        self._lines.close()

    @staticmethod
    def read(path: Path | str) -> list[dict[str, Any]]:
        """Return all events of a journal file, in order. Raises Malformed, OSError."""
        return list(records.lines(path, records.EVENT))

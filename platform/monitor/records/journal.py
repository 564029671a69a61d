"""`journal.jsonl`: one object per transition of a run, so that recovery time is read and not guessed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from platform.boundary.redaction import redact
from platform.boundary.terminal import say
from platform.monitor.records import records
from platform.monitor.records.json_lines import JsonLines


class Journal:
    """The transitions of a run. `generation` counts formations of the mesh from 1, over all drivers of the run.

    Opening an existing journal cuts a torn last line and goes on from its last generation; a new one is at 0.
    """

    def __init__(self, path: Path | str, tell: Callable[[str], None] = say):
        """`tell`: see JsonLines, which also says what happens to events that cannot be written."""
        self.path = Path(path)
        self._lines = JsonLines(path, tell)
        self.generation: int = max((event["generation"] for event in records.lines(path, records.EVENT)), default=0)

    def next_generation(self) -> int:
        """Begins a generation: the events that follow belong to it."""
        self.generation += 1
        return self.generation

    def event(self, event: str, **fields: Any) -> dict[str, Any]:
        """Writes a transition, with the time (seconds since the epoch) and the generation; returns what it wrote."""
        entry = {"time": time.time(), "generation": self.generation, "event": event, **redact(fields)}
        self._lines.append(entry)
        return entry

    def events(self) -> list[dict[str, Any]]:
        """Lists every transition that can be read, and those that could not be written yet. Raises ValueError for a
        line that is none."""
        written: list[dict[str, Any]] = []
        with suppress(OSError):
            written = self.read(self.path)
        return written + self._lines.unwritten

    def close(self) -> None:
        self._lines.close()

    @staticmethod
    def read(path: Path | str) -> list[dict[str, Any]]:
        """Every transition, in order."""
        return list(records.lines(path, records.EVENT))

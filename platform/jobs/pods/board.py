"""Board on which the pods of a job report to each other: small files in a folder that all of them see.

The first pod announces lives of the run, one per driver, and that the run is over; every other pod writes heartbeats.
All clocks are a reader's own: a pod is there while its heartbeat changes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Annotated, TypeVar

from platform.boundary import documents, schema
from platform.boundary.files.local_files import replace_text
from platform.boundary.schema import Malformed, Span

_LIFE, _END = "life.json", "end.json"
_PORTS = (1 << 16) - 1
_SILENCE = 60.0  # seconds without a new word after which a pod counts as gone; shared storage may be slow to tell
_Said = TypeVar("_Said")
_Count = Annotated[int, Span(0, 1 << 53)]
_Status = dict[str, Annotated[int, Span(0, 255)]]  # of the run, as its only value, in the file that ends a job


@dataclass(frozen=True)
class TorchrunLife:
    """Life of the run: one driver, with one torchrun on every pod. `number`: counts from 1 over all first pods of the
    job; `port`: port of torchrun's store on the first pod; `members`: the tokens of the pods that take part, by
    index."""

    number: _Count
    port: Annotated[int, Span(1, _PORTS)]
    members: list[str]


@dataclass(frozen=True)
class Word:
    """Heartbeat of a pod. `token`: random id, drawn when its process began; `beat`: number of heartbeats so far;
    `life`: the number of the last life that it joined, 0 for none; `runs`: its torchrun of that life runs; `leaving`:
    it has a stop signal."""

    token: str
    beat: _Count = 0
    life: _Count = 0
    runs: bool = False
    leaving: bool = False


class Board:
    """Reads and writes the files of a job's board; a file that is missing or broken reads as None."""

    def __init__(self, folder: Path):
        """Open the board, a folder of files by which a job's pods speak to each other, no heartbeat read yet."""
        self._folder = folder
        self._heard: dict[int, tuple[Word, float]] = {}  # the newest word of each pod, and when it was new

    def announce(self, life: TorchrunLife) -> None:
        """Write a life of the run (a driver with torchrun on all pods) to the board, for the other pods to join."""
        self._write(_LIFE, life)

    def life(self) -> TorchrunLife | None:
        """Return the newest life of the run (a driver with torchrun on all pods) on the board; None before any."""
        return self._read(TorchrunLife, _LIFE)

    def end(self, status: int) -> None:
        """Write to the board that the job is over, with this exit status, as its first pod."""
        self._write(_END, {"status": status})

    def ended(self) -> int | None:
        """Return the exit status with which the job is over by the board, None while it is not."""
        return (self._read(_Status, _END) or {}).get("status")

    def say(self, index: int, word: Word) -> None:
        """Write a heartbeat, `word`, of the job's pod number `index` to the board."""
        self._write(f"pod-{index}.json", word)

    def there(self, index: int) -> Word | None:
        """Return the newest heartbeat of the job's pod number `index`; None if the pod counts as gone, as it has
        written no heartbeat, or none that is new for _SILENCE seconds. A heartbeat from before the first look may be a
        dead pod's."""
        word, now = self._read(Word, f"pod-{index}.json"), monotonic()
        before, since = self._heard.get(index, (word, -_SILENCE))
        if word is None:
            return before if before and now < since + _SILENCE else None
        if word != before:
            since = now
        self._heard[index] = word, since
        return word if now < since + _SILENCE else None

    def _write(self, name: str, what: object) -> None:
        """Write a file of the pods' board in one step, for this user alone."""
        self._folder.mkdir(0o700, parents=True, exist_ok=True)
        replace_text(self._folder / name, json.dumps(what, default=schema.fields_of), 0o600)

    def _read(self, kind: type[_Said], name: str) -> _Said | None:
        """Read a file of the pods' board as a `kind`, None if it is missing or broken."""
        try:
            return schema.read(kind, documents.json_file(self._folder / name))
        except (OSError, Malformed):
            return None

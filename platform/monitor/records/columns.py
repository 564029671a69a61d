"""`metrics.jsonl` as columns of numbers by their W&B names, read as far as it is written and read on as it grows."""

from __future__ import annotations

import io
import json
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from math import inf, nan
from pathlib import Path
from typing import Any

from platform.boundary import documents
from platform.monitor.records.metrics import wandb_names
from platform.monitor.records.records import LARGEST, NON_FINITE

_BLOCK = 4 << 20  # bytes that are read at once
_DECODER = json.JSONDecoder()
_MOST_COLUMNS = 4096  # anybody may have written the file


class Columns:
    """Numbers of a run's metrics file: `steps`, and by W&B name a column with a number for each of these steps, NaN for
    none. A row replaces all from its step on. `unread`: whole lines that are no rows, and were passed over.

    A row is a line as MetricsLog writes it, of any version; of an unknown one, the keys that are known here. Each
    number is checked by itself, which is much faster than a check of each row against a schema.
    """

    def __init__(self, path: Path):
        """Prepare to read the metrics file at `path`, which need not be there yet."""
        self._path = path
        self._forget_rows()

    def _forget_rows(self) -> None:
        """Forget all that was read of the metrics file."""
        self._place = self.unread = 0  # the place is behind the last whole line
        self._numbers: dict[str, array[float]] = {}
        self.steps = array("q")

    @property
    def names(self) -> list[str]:
        """Return the W&B names of a metrics file's columns."""
        return list(self._numbers)

    def column(self, name: str) -> array[float]:
        """Return a metrics file's column of that W&B name, as long as `steps`; all NaN if there is none."""
        found = self._numbers.get(name)
        return _lengthened(array("d") if found is None else found, len(self.steps))

    def read_on(self) -> int:
        """Read the new lines of the metrics file; return how many leading rows still hold."""
        kept = len(self.steps)  # a file that has become shorter is read anew
        with suppress(FileNotFoundError, NotADirectoryError):
            for line in self._new_lines():
                kept = min(kept, self._take_row(line))
        return min(kept, len(self.steps))

    def _new_lines(self) -> Iterator[bytes]:
        """Yield the whole lines that the metrics file has got since the last time; what follows may be torn."""
        with documents.open_regular(self._path) as file:
            if file.seek(0, io.SEEK_END) < self._place:
                self._forget_rows()
            file.seek(self._place)
            rest = b""
            while block := file.read(_BLOCK):
                *whole, rest = (rest + block).split(b"\n")
                self._place += sum(map(len, whole)) + len(whole)
                yield from whole
                if len(rest) > LARGEST:
                    self._place, rest, self.unread = self._place + len(rest), b"", self.unread + 1

    def _take_row(self, line: bytes) -> int:
        """Add the row on a line of the metrics file; return the number of rows before it."""
        try:
            row, end = _DECODER.raw_decode(text := line.decode())
            step = row["step"] if end == len(text) else None
        except (ValueError, RecursionError, TypeError, KeyError):
            row = step = None
        if type(step) is not int or not 0 <= step < 1 << 53 or not isinstance(row, dict):
            self.unread += 1
            return len(self.steps)
        if self.steps and step <= self.steps[-1]:  # after a rollback
            before = bisect_left(self.steps, step)
            del self.steps[before:]
            for longer in self._numbers.values():
                del longer[before:]
        before, columns = len(self.steps), self._numbers
        self.steps.append(step)
        for name, value in _flat(row):
            column = columns.get(name)
            if type(value) is float and column is not None and len(column) == before:  # nearly all
                column.append(value)
            elif (number := _as_number(value)) is not None:
                if column is None and len(columns) < _MOST_COLUMNS:
                    column = columns[name] = array("d")
                if column is not None and len(_lengthened(column, before)) == before:  # else a name comes twice
                    column.append(number)
        return before


def _lengthened(column: array[float], length: int) -> array[float]:
    """Return a column of metrics after adding NaN at its end, in place, up to a length."""
    if len(column) < length:
        column.extend([nan] * (length - len(column)))
    return column


def _flat(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield W&B name and value of all that W&B gets of a row of metrics.jsonl, the parts of maps and lists each."""
    names = wandb_names()
    for key, value in row.items():
        if name := names.get(key):
            if type(value) is dict:
                yield from [(f"{name}/{inner}", part) for inner, part in value.items()]
            elif type(value) is list:
                yield from [(f"{name}/{place}", part) for place, part in enumerate(value)]
            else:
                yield name, value


def _as_number(value: Any) -> float | None:
    """Return a value in a row of metrics as a float, None if it is none; NaN and infinities are texts there."""
    if isinstance(value, int):  # True is 1: the step was skipped
        return float(value) if abs(value) < 1 << 1000 else inf
    return value if isinstance(value, float) else NON_FINITE.get(value) if isinstance(value, str) else None

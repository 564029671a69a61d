"""`metrics.jsonl` as columns of numbers by their W&B names, read as far as it is written and read on as it grows."""

from __future__ import annotations

import io
import json
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from math import inf, nan
from pathlib import Path
from typing import Any

from platform.boundary import documents
from platform.monitor.records.metrics import wandb_names
from platform.monitor.records.records import LARGEST, NON_FINITE

_BLOCK = 4 << 20  # bytes that are read at once
_DECODER = json.JSONDecoder()
_MOST_COLUMNS = 4096  # anybody may have written the file
_Shape = tuple[str | tuple[str | int, ...], ...]  # of a row: its keys, a map's with its own, a list's with its length


class Columns:
    """Numbers of a run's metrics file: `steps`, and by W&B name a column with a number for each of these steps, NaN for
    none. A row replaces all from its step on. `unread`: whole lines that are no rows, and were passed over.

    A row is a line as MetricsLog writes it, of any version; of an unknown one, the keys that are known here. Rows of
    one shape are checked together, column by column, which is much faster than each row against a schema.
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
            for lines in self._new_lines():
                kept = min(kept, self._take_rows(lines))
        return min(kept, len(self.steps))

    def _new_lines(self) -> Iterator[list[bytes]]:
        """Yield the whole lines that the metrics file has got since the last time, a block at once; what follows may be
        torn."""
        with documents.open_regular(self._path) as file:
            if file.seek(0, io.SEEK_END) < self._place:
                self._forget_rows()
            file.seek(self._place)
            rest = b""
            while block := file.read(_BLOCK):
                *whole, rest = (rest + block).split(b"\n")
                self._place += sum(map(len, whole)) + len(whole)
                yield whole
                if len(rest) > LARGEST:
                    self._place, rest, self.unread = self._place + len(rest), b"", self.unread + 1

    def _take_rows(self, lines: Sequence[bytes]) -> int:
        """Add the rows on lines of the metrics file; return how many rows before them still hold."""
        kept, last = len(self.steps), self.steps[-1] if self.steps else -1
        shape: _Shape = ()
        alike: list[list[Any]] = []  # the values of rows of that shape, which become columns together
        for line in lines:
            row = _row_on(line)
            if row is None:
                self.unread += 1
                continue
            step: int = row["step"]
            found, values = _flat(row)
            if found != shape or step <= last:
                self._add_rows(shape, alike)
                shape, alike = found, []
            if step <= last:  # after a rollback
                kept = min(kept, self._take_back(step))
            last = step
            self.steps.append(step)
            alike.append(values)
        self._add_rows(shape, alike)
        return kept

    def _take_back(self, step: int) -> int:
        """Forget the rows from a step on; return how many there are before it."""
        before = bisect_left(self.steps, step)
        del self.steps[before:]
        for longer in self._numbers.values():
            del longer[before:]
        return before

    def _add_rows(self, shape: _Shape, rows: Sequence[Sequence[Any]]) -> None:
        """Add to the columns the values of rows of one shape, whose steps have just been added."""
        before = len(self.steps) - len(rows)
        for name, values in zip(_flat_names(shape), zip(*rows, strict=True), strict=True):
            if name and (numbers := _as_numbers(values)) is not None:
                if name not in self._numbers and len(self._numbers) < _MOST_COLUMNS:
                    self._numbers[name] = array("d")
                column = self._numbers.get(name)
                if column is not None and len(_lengthened(column, before)) == before:  # else a name comes twice
                    column.extend(numbers)


def _row_on(line: bytes) -> dict[str, Any] | None:
    """Return the row on a line of a metrics file, with a valid step; None if it is none."""
    try:
        row, end = _DECODER.raw_decode(text := line.decode())
        step = row["step"] if end == len(text) else None
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    valid = type(step) is int and 0 <= step < 1 << 53 and isinstance(row, dict)
    return row if valid else None


def _lengthened(column: array[float], length: int) -> array[float]:
    """Return a column of metrics after adding NaN at its end, in place, up to a length."""
    if len(column) < length:
        column.extend([nan] * (length - len(column)))
    return column


def _flat(row: dict[str, Any]) -> tuple[_Shape, list[Any]]:
    """Return the shape of a row of metrics.jsonl, and its values, the parts of maps and lists each."""
    shape: list[Any] = []
    values: list[Any] = []
    for key, value in row.items():
        if type(value) is dict:
            shape.append((key, *value))
            values += value.values()
        elif type(value) is list:
            shape.append((key, len(value)))
            values += value
        else:
            shape.append(key)
            values.append(value)
    return tuple(shape), values


@lru_cache(maxsize=8)
def _flat_names(shape: _Shape) -> list[str]:
    """Return the W&B names of the values of rows of that shape, "" of what W&B does not get."""
    known = wandb_names()
    found: list[str] = []
    for part in shape:
        if isinstance(part, str):
            found.append(known.get(part, ""))
        else:
            key, *inner = part
            places: Iterable[Any] = range(inner[0]) if inner and isinstance(inner[0], int) else inner
            found += [f"{known[key]}/{place}" if key in known else "" for place in places]
    return found


def _as_numbers(values: Sequence[Any]) -> array[float] | None:
    """Return values in rows of metrics as floats, NaN where one is no number; None if none is."""
    try:
        return array("d", values)
    except (TypeError, OverflowError):  # few have texts, as NaN and infinities are, or nothing
        numbers = [_as_number(value) for value in values]
    return None if all(n is None for n in numbers) else array("d", [nan if n is None else n for n in numbers])


def _as_number(value: Any) -> float | None:
    """Return a value in a row of metrics as a float, None if it is none; NaN and infinities are texts there."""
    if isinstance(value, int):  # True is 1: the step was skipped
        return float(value) if abs(value) < 1 << 1000 else inf
    return value if isinstance(value, float) else NON_FINITE.get(value) if isinstance(value, str) else None

"""Append-only files of one JSON object per line, in which every line is whole after any crash. Anybody may have written
a file that is read, so each line is validated."""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from functools import cache
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from platform.boundary import documents, schema
from platform.boundary.schema import Malformed, OneOf, Span
from platform.boundary.terminal import print_line
from platform.plan.layout import format_count

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


T = TypeVar("T")

JOURNAL, METRICS = "journal.jsonl", "metrics.jsonl"  # in the run directory
LARGEST = 16 << 20  # bytes of a line: the event `formed` lists every worker
_TAIL = 1 << 20  # bytes that are read to find the last lines

# JSON has no such numbers. A strict parser accepts these strings, and both Python's float() and JavaScript's Number()
# convert them back (protobuf's JSON mapping uses the same three).
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Seconds = Annotated[float, Span(-1e12, 1e12)]
Steps = Annotated[int, Span(0, 10**15)]
Number = float | Annotated[Any, OneOf((math.nan,), "number")]  # also NaN


def plain_fields(record: DataclassInstance) -> dict[str, Any]:
    """Return the fields of a record (a journal's event, a row of metrics) by name, as they are written to its file: a
    field that is None by default is left out while it is None."""
    values = vars(record)
    return {name: values[name] for name, needed in _fields_to_write(type(record)) if needed or values[name] is not None}


@cache
def _fields_to_write(kind: type[DataclassInstance]) -> list[tuple[str, bool]]:
    """Return the fields of a kind of record by name, each with True if it is written though it may be None."""
    return [(field.name, field.default is MISSING) for field in fields(kind)]


def read_lines(path: Path | str, read: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    """Yield what `read` makes of the JSON object on every whole line of a journal or metrics file, in order; the file
    may be in use. Raises Malformed, naming the line, where `read` does or a line is no JSON object; OSError."""
    with io.BufferedReader(documents.open_regular_file(path)) as file:
        for number, line in enumerate(iter(lambda: file.readline(LARGEST + 2), b""), 1):
            if line.endswith(b"\n"):
                yield _parse_line(line, read, f"line {number}")
            elif len(line) > LARGEST:
                raise Malformed(f"more than {LARGEST} bytes", f"line {number}")  # else it is torn, or being written


def read_last_lines(path: Path | str, read: Callable[[dict[str, Any]], T]) -> list[T]:
    """Return what `read` makes of the last whole lines of a journal or metrics file, as many as lie in its last _TAIL
    bytes. Raises as `read_lines`."""
    with documents.open_regular_file(path) as file:
        start = max(0, file.seek(0, io.SEEK_END) - _TAIL)
        file.seek(start)
        tail = file.read(_TAIL + 1) or b""
    whole_lines = tail.split(b"\n")[bool(start) : -1]  # the first may be only a part of a line
    places = (f"line {number} of the last {len(whole_lines)}" for number in range(1, len(whole_lines) + 1))
    return [_parse_line(line, read, place) for line, place in zip(whole_lines, places, strict=True)]


def _parse_line(line: bytes, read: Callable[[dict[str, Any]], T], place: str) -> T:
    """Return `read` of the JSON object on a journal's or metrics file's line. Raises Malformed, naming `place`."""
    try:
        return read(restore_non_finite(schema.parse_value(dict[str, Any], documents.parse_json(line, LARGEST + 2))))
    except Malformed as error:
        raise Malformed(str(error), place) from None


def restore_non_finite(value: Any) -> Any:
    """Return a journal's or metrics file's JSON data with NaN and infinities in place of their strings (NON_FINITE)."""
    return schema.map_nested_values(value, str, lambda text: NON_FINITE.get(text, text))


KEPT_BYTES = 16 << 20  # limit for lines that could not be written yet


class JsonLines:
    """File to which objects are appended, each as one whole line in one write.

    Opening cuts a torn last line, and raises OSError if the file cannot be opened or created. A line that cannot be
    written afterwards is kept, announced once, and written before any later line; beyond KEPT_BYTES the oldest lines
    are lost. Numbers are not rounded; NaN and infinities are written as strings.
    """

    def __init__(self, path: Path | str, say: Callable[[str], None] = print_line):
        """Open or create the journal or metrics file at `path` to append to; a function gets its warnings."""
        self.path, self._say = Path(path), say
        self._kept: deque[bytes] = deque()  # lines still to be written, the oldest first
        self._troubled, self._torn, self._lost = False, False, 0
        self._file = self._open_file()

    def append(self, value: dict[str, Any]) -> None:
        """Append an object to the journal or metrics file as a line of JSON, now or as soon as it can be written."""
        self._kept.append((_strict_json(value) + "\n").encode())
        self._write_pending_lines()
        while sum(map(len, self._kept)) > KEPT_BYTES:
            self._kept.popleft()
            self._lost += 1

    def close(self) -> None:
        """Try a last time to write the journal's or metrics file's kept lines, announce the lost ones, and close it."""
        self._write_pending_lines()
        if missing := self._lost + len(self._kept):
            self._say(f"WARNING: {self.path} lacks {format_count(missing, 'line')}")
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @property
    def unwritten_records(self) -> list[dict[str, Any]]:
        """Return the objects appended to the journal or metrics file that could not be written yet, in order."""
        return [restore_non_finite(json.loads(line)) for line in self._kept]

    def _open_file(self) -> int:
        """Open or create the journal or metrics file to append to, without a torn last line; return its descriptor."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._cut_torn_line(file)
        return file

    def _cut_torn_line(self, file: int) -> None:
        """Remove a torn last line, which a crash or a full disk left in the open journal or metrics `file`."""
        self._torn = True
        os.ftruncate(file, _end_of_last_line(file))
        self._torn = False

    def _write_pending_lines(self) -> None:
        """Write the lines of the journal or metrics file that are still to be written, as many as possible; announce
        when this begins to fail, and when it works again."""
        count = len(self._kept)
        try:
            while self._kept:
                self._write_line(self._kept[0])
                self._kept.popleft()
        except OSError as error:
            if not self._troubled:
                why = f"cannot be written ({error.strerror}): its lines are kept, and tried again"
                self._say(f"WARNING: run.dir: {self.path} {why}")
            self._troubled = True
        else:
            if self._troubled:
                self._say(f"{self.path} is written again: {format_count(count, 'line')} kept")
            self._troubled = False

    def _write_line(self, line: bytes) -> None:
        """Write one line to the journal or metrics file. After an OSError the file still ends with a whole line, or is
        cut before the next write."""
        self._reopen_if_moved()
        if self._torn:
            self._cut_torn_line(self._file)
        written = os.write(self._file, line)
        if written < len(line):
            self._cut_torn_line(self._file)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def _reopen_if_moved(self) -> None:
        """Open the journal or metrics file again if `path` no longer names the open file, as its directory may have
        been removed, or mounted anew; creates it if it is missing."""
        try:
            if self._file >= 0 and os.path.samestat(os.stat(self.path), os.fstat(self._file)):
                return
        except FileNotFoundError:
            pass
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open_file()

    @staticmethod
    def read_objects(path: Path | str) -> list[dict[str, Any]]:
        """List the objects on all whole lines of a journal or metrics file. Raises Malformed for any other line."""
        return list(read_lines(path, dict))


def _strict_json(value: dict[str, Any]) -> str:
    """Return an object of the journal or metrics file as JSON, with strings for NaN and infinities."""
    try:  # they are rare
        return json.dumps(value, allow_nan=False)
    except ValueError:
        finite = schema.map_nested_values(value, float, lambda x: x if isfinite(x) else json.dumps(x))
        return json.dumps(finite, allow_nan=False)


def _end_of_last_line(file: int, block: int = 1 << 16) -> int:
    """Return the size in bytes of the open journal or metrics `file` without a torn last line; read backwards, `block`
    bytes at a time."""
    end = os.fstat(file).st_size
    while end:
        start = max(0, end - block)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0

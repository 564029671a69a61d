"""Reading of files of one JSON object per line; anybody may have written them, so each line is validated."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from platform.boundary import documents, schema
from platform.boundary.schema import Malformed, OneOf, Span

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


def plain(record: DataclassInstance) -> dict[str, Any]:
    """Return the fields of a record (a journal's event, a row of metrics) by name, as they are written to its file: a
    field that is None by default is left out while it is None."""
    values = vars(record)
    return {name: values[name] for name, needed in _written(type(record)) if needed or values[name] is not None}


@cache
def _written(kind: type[DataclassInstance]) -> list[tuple[str, bool]]:
    """Return the fields of a kind of record by name, each with True if it is written though it may be None."""
    return [(field.name, field.default is MISSING) for field in fields(kind)]


def lines(path: Path | str, read: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    """Yield what `read` makes of the JSON object on every whole line of a journal or metrics file, in order; the file
    may be in use. Raises Malformed, naming the line, where `read` does or a line is no JSON object; OSError."""
    with io.BufferedReader(documents.open_regular(path)) as file:
        number = 0
        while line := file.readline(LARGEST + 2):
            number += 1
            if line.endswith(b"\n"):
                yield _read(line, read, f"line {number}")
            elif len(line) > LARGEST:
                raise Malformed(f"more than {LARGEST} bytes", f"line {number}")  # else it is torn, or being written


def last(path: Path | str, read: Callable[[dict[str, Any]], T]) -> list[T]:
    """Return what `read` makes of the last whole lines of a journal or metrics file, as many as lie in its last _TAIL
    bytes. Raises as `lines`."""
    with documents.open_regular(path) as file:
        start = max(0, file.seek(0, io.SEEK_END) - _TAIL)
        file.seek(start)
        tail = file.read(_TAIL + 1) or b""
    whole = tail.split(b"\n")[bool(start) : -1]  # the first may be only a part of a line
    return [_read(line, read, f"line {number} of the last {len(whole)}") for number, line in enumerate(whole, 1)]


def _read(line: bytes, read: Callable[[dict[str, Any]], T], place: str) -> T:
    """Return `read` of the JSON object on a journal's or metrics file's line. Raises Malformed, naming `place`."""
    try:
        return read(with_numbers(schema.read(dict[str, Any], documents.from_json(line, LARGEST + 2))))
    except Malformed as error:
        raise Malformed(str(error), place) from None


def with_numbers(value: Any) -> Any:
    """Return a journal's or metrics file's JSON data with NaN and infinities in place of their strings (NON_FINITE)."""
    return schema.changed(value, str, lambda text: NON_FINITE.get(text, text))

"""Reading of files of one JSON object per line; anybody may have written them, so a schema validates each line."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from platform.boundary import documents, schema
from platform.boundary.schema import Malformed, OpenMap, Span, Text

LARGEST = 16 << 20  # bytes of a line: the event `formed` lists every worker
_TAIL = 1 << 20  # bytes that are read to find the last lines

# JSON has no such numbers. A strict parser accepts these strings, and both Python's float() and JavaScript's Number()
# convert them back (protobuf's JSON mapping uses the same three).
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Seconds = Annotated[float, Span(-1e12, 1e12)]
Steps = Annotated[int, Span(0, 10**15)]
ANY = dict[str, Any]
_READ = {  # fields of any event that are read
    "time": Seconds,
    "generation": Annotated[int, Span(0, 10**9)],
    "event": Annotated[str, Text(r"\w{1,40}", "a word")],
    "step": Steps,
    "saved": Steps,
    "steps_lost": Steps,
    "useful_seconds": Seconds,
    "lost_seconds": Seconds,
}
EVENT = Annotated[dict[str, Any], OpenMap(tuple(_READ.items()), ("generation", "event"))]  # of journal.jsonl
ROW = Annotated[dict[str, Any], OpenMap((("step", Steps),), ("step",))]  # of metrics.jsonl


def lines(path: Path | str, kind: Any = ANY) -> Iterator[dict[str, Any]]:
    """Yield the object on every whole line, in order; the file may be in use. Raises Malformed, naming the line, if one
    does not match the schema `kind`; OSError."""
    with io.BufferedReader(documents.open_regular(path)) as file:
        number = 0
        while line := file.readline(LARGEST + 2):
            number += 1
            if line.endswith(b"\n"):
                yield _read(line, kind, f"line {number}")
            elif len(line) > LARGEST:
                raise Malformed(f"more than {LARGEST} bytes", f"line {number}")  # else it is torn, or being written


def last(path: Path | str, kind: Any = ANY) -> list[dict[str, Any]]:
    """Return the objects on the last whole lines, as many as lie in the last _TAIL bytes. Raises as `lines` does."""
    with documents.open_regular(path) as file:
        start = max(0, file.seek(0, io.SEEK_END) - _TAIL)
        file.seek(start)
        tail = file.read(_TAIL + 1) or b""
    whole = tail.split(b"\n")[bool(start) : -1]  # the first may be only a part of a line
    return [_read(line, kind, f"line {number} of the last {len(whole)}") for number, line in enumerate(whole, 1)]


def _read(line: bytes, kind: Any, place: str) -> dict[str, Any]:
    try:
        plain = schema.read(ANY, documents.from_json(line, LARGEST + 2))
        found: dict[str, Any] = schema.read(kind, with_numbers(plain))
        return found
    except Malformed as error:
        raise Malformed(str(error), place) from None


def with_numbers(value: Any) -> Any:
    """Return data with NaN and infinities in place of the strings that stand for them in JSON (NON_FINITE)."""
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: with_numbers(item) for key, item in value.items()}
    return [with_numbers(item) for item in value] if isinstance(value, list) else value

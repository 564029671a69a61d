"""The lines that a run's metrics or journal got since they were last read, while they may be in use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from platform.boundary import documents
from platform.monitor.records import records

_BLOCK = 4 << 20  # bytes that are read at once


def new_lines(path: Path, place: int) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield the objects on the whole lines of a run's metrics or journal from the byte `place` on, each with the places
    of its first byte and behind its last; lines that are no objects are passed over. A file that has become shorter is
    another one, and is read from its start."""
    with suppress(FileNotFoundError, NotADirectoryError), documents.open_regular(path) as file:
        if file.seek(0, 2) < place:
            place = 0
        file.seek(place)
        rest = b""
        while block := file.read(_BLOCK):
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                start, place = place, place + len(line) + 1
                with suppress(ValueError, RecursionError):
                    if isinstance(found := json.loads(line), dict):
                        named = b'NaN"' in line or b'Infinity"' in line  # rarely: a look at each number takes longer
                        yield records.with_numbers(found) if named else found, start, place
            if len(rest) > records.LARGEST:
                place, rest = place + len(rest), b""

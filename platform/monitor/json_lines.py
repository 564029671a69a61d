"""Append-only files of one JSON object per line, whole after any crash."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

from platform.monitor import records


class JsonLines:
    """A file that objects are appended to, each as one whole line in one write.

    Opening cuts a torn last line. Numbers are not rounded; NaN and infinities are written as strings.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._file, _end_of_last_line(self._file))

    def append(self, value: dict[str, Any]) -> None:
        """Adds one line. Raises OSError when the disk is full; the file then still ends with a whole line."""
        line = (json.dumps(_strict(value), allow_nan=False) + "\n").encode()
        written = os.write(self._file, line)
        if written < len(line):
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        os.close(self._file)

    @staticmethod
    def read(path: Path | str) -> list[dict[str, Any]]:
        """Every whole line, in order; the file may be in use. Raises ValueError for a line that is no JSON object."""
        return list(records.lines(path))


def _end_of_last_line(file: int, block: int = 1 << 16) -> int:
    end = os.fstat(file).st_size
    while end:
        start = max(0, end - block)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value

"""Append-only files of one JSON object per line, in which every line is whole after any crash."""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

from platform.boundary import schema
from platform.boundary.terminal import print_line
from platform.monitor.records import records
from platform.plan.language.numbers import count_of

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
        self._file = self._open()

    def append(self, value: dict[str, Any]) -> None:
        """Append an object to the journal or metrics file as a line of JSON, now or as soon as it can be written."""
        self._kept.append((_strict_json(value) + "\n").encode())
        self._write_kept()
        while sum(map(len, self._kept)) > KEPT_BYTES:
            self._kept.popleft()
            self._lost += 1

    def close(self) -> None:
        """Try a last time to write the journal's or metrics file's kept lines, announce the lost ones, and close it."""
        self._write_kept()
        if missing := self._lost + len(self._kept):
            self._say(f"WARNING: {self.path} lacks {count_of(missing, 'line')}")
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @property
    def unwritten(self) -> list[dict[str, Any]]:
        """Return the objects appended to the journal or metrics file that could not be written yet, in order."""
        return [records.with_numbers(json.loads(line)) for line in self._kept]

    def _open(self) -> int:
        """Open or create the journal or metrics file to append to, without a torn last line; return its descriptor."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._cut(file)
        return file

    def _cut(self, file: int) -> None:
        """Remove a torn last line, which a crash or a full disk left in the open journal or metrics `file`."""
        self._torn = True
        os.ftruncate(file, _end_of_last_line(file))
        self._torn = False

    def _write_kept(self) -> None:
        """Write the lines of the journal or metrics file that are still to be written, as many as possible; announce
        when this begins to fail, and when it works again."""
        count = len(self._kept)
        try:
            while self._kept:
                self._write(self._kept[0])
                self._kept.popleft()
        except OSError as error:
            if not self._troubled:
                why = f"cannot be written ({error.strerror}): its lines are kept, and tried again"
                self._say(f"WARNING: run.dir: {self.path} {why}")
            self._troubled = True
        else:
            if self._troubled:
                self._say(f"{self.path} is written again: {count_of(count, 'line')} kept")
            self._troubled = False

    def _write(self, line: bytes) -> None:
        """Write one line to the journal or metrics file. After an OSError the file still ends with a whole line, or is
        cut before the next write."""
        self._find()
        if self._torn:
            self._cut(self._file)
        written = os.write(self._file, line)
        if written < len(line):
            self._cut(self._file)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def _find(self) -> None:
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
        self._file = self._open()

    @staticmethod
    def read(path: Path | str) -> list[dict[str, Any]]:
        """List the objects on all whole lines of a journal or metrics file. Raises Malformed for any other line."""
        return list(records.lines(path, dict))


def _strict_json(value: dict[str, Any]) -> str:
    """Return an object of the journal or metrics file as JSON, with strings for NaN and infinities."""
    try:  # they are rare
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(schema.changed(value, float, lambda x: x if isfinite(x) else json.dumps(x)), allow_nan=False)


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

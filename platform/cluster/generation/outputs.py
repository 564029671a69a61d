"""Files for the results of a command: refused before a model is loaded if they cannot be written, and never left with
half a line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType

from platform.boundary.documents import one_line
from platform.boundary.files.local_files import replace_text
from platform.boundary.refusals import ConfigError, violation


class Lines:
    """New file at `path`, which the option `flag` names, that lines are added to. If one cannot be written, its part in
    the file is taken back; a file without a line is removed at the end. Raises ConfigError if it cannot be made."""

    def __init__(self, path: str, flag: str):
        """Create the file for a model's answers at `path`, which an option `flag` names. Raises ConfigError."""
        self._path, self._flag, self._whole = path, flag, 0
        with _named(flag, path):
            self._file = open(path, "xb", buffering=0)

    def add(self, text: str) -> None:
        """Append a line to the file of a model's answers. Raises ConfigError, naming the option, if that fails."""
        raw = memoryview(f"{text}\n".encode())
        with _named(self._flag, self._path):
            while raw:
                raw = raw[self._file.write(raw) :]
        self._whole = self._file.tell()

    def __enter__(self) -> Lines:
        """Return this file of a model's answers, which `__exit__` closes."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Close the file of a model's answers, cut after its last whole line, and remove it if it has none."""
        with suppress(OSError):
            self._file.truncate(self._whole)
        self._file.close()
        if not self._whole:
            with suppress(OSError):
                os.unlink(self._path)


class WholeFile:
    """File at `path`, which the option `flag` names, that is replaced as a whole by the text that `write` gets; without
    it, the old contents stay. Raises ConfigError if it cannot be written."""

    def __init__(self, path: str, flag: str):
        """Check that the file for a model's results at `path`, which a command's option `flag` names, can be written,
        and leave its contents. Raises ConfigError if it cannot."""
        self._path, self._flag, self._target = Path(path), flag, Path(os.path.realpath(path))
        with _named(flag, path):
            if self._path.is_dir():
                raise IsADirectoryError("Is a directory")
            if self._special:
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                return
            with suppress(FileNotFoundError):  # a name that is too long
                os.lstat(self._target)
            with TemporaryFile(dir=self._target.parent):
                pass

    @property
    def _special(self) -> bool:
        """Return True if the file for a model's results is a device or pipe, which is written to, not replaced."""
        return self._path.exists() and not self._path.is_file()

    def write(self, text: str) -> None:
        """Replace the file of a model's results by the text as a whole; write it to a device. Raises ConfigError."""
        with _named(self._flag, self._path):
            if self._special:
                self._path.write_text(text)
            else:
                replace_text(self._target, text)


@contextmanager
def _named(flag: str, path: str | Path) -> Iterator[None]:
    """Raise ConfigError, naming the option `flag`, for an OSError on the file of a model's answers in the block."""
    try:
        yield
    except OSError as error:
        raise ConfigError(violation(flag, path, f"cannot be written: {one_line(error.strerror or error)}")) from None

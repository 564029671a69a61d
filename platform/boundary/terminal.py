"""What is said to a person, who may have gone away: a closed terminal or a broken pipe ends no run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO


def say(text: str, stream: TextIO | None = None) -> None:
    """Writes a line to `stream` (default: standard output), if somebody takes it."""
    write(stream or sys.stdout, text + "\n")


def write(stream: TextIO | None, text: str) -> None:
    """Writes to a stream; what it does not take is lost, and it is tried again with the next text."""
    if stream is not None:  # Python's streams are None where they were closed at the start
        with suppress(OSError, ValueError):  # ValueError: it was closed since
            stream.write(text)
            stream.flush()


def settle() -> None:
    """Lets this process end with its own status: Python would end with 120 where standard output takes nothing."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def tolerated(tell: Callable[[str], None], what: str) -> Iterator[None]:
    """Warns where a file that a run can do without cannot be written."""
    try:
        yield
    except OSError as error:
        tell(f"WARNING: {what} could not be written: {error}")

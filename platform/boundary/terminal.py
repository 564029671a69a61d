"""Output to a person who may have gone away: a closed terminal or a broken pipe does not end a run."""

from __future__ import annotations

import atexit
import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from platform.boundary.interrupts import run_interruptible


def printable(text: str, kept: str = "") -> str:
    """Escape every unprintable character of a text but those in `kept`, line ends and terminals' escape sequences
    included: without any kept, it is one line that is safe for any terminal."""
    if text.isprintable():
        return text
    escaped = (c.encode("unicode_escape", "surrogatepass").decode() for c in text)
    return "".join(c if c.isprintable() or c in kept else e for c, e in zip(text, escaped, strict=True))


def visible(text: str) -> str:
    """Escape the unprintable characters of a text for a terminal, except its line ends and tabs."""
    return printable(text, "\n\t")


def one_refusal(text: str) -> str:
    """Return a refusal as one printable line, even if a library put line ends or control characters into it."""
    return printable(" ".join(text.splitlines()))


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Write a line to `stream` (default: standard output); it is lost if the stream is closed or broken."""
    write_text(stream or sys.stdout, visible(text) + "\n")


def print_refusals(name: str, refusals: Iterable[object]) -> None:
    """Write why a command is refused or failed to standard error, in one line each, which begins with its `name`."""
    for refusal in refusals:
        print_line(f"{name}: {one_refusal(str(refusal))}", sys.stderr)


def write_text(stream: TextIO | None, text: str) -> None:
    """Write a text to a standard stream and flush it, ignoring errors: on a closed or broken stream it is lost."""
    if stream is not None:  # Python sets a standard stream to None if it was closed at the start
        with suppress(OSError, ValueError):  # ValueError: the stream was closed later
            encoding = getattr(stream, "encoding", None) or "utf-8"  # which may lack a character
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()


def flush_streams() -> None:
    """Flush stdout and stderr at the end of a command, so that this process exits with its own status.

    Python exits with 120 if flushing fails at exit; a stream that fails here is redirected to /dev/null.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class QuickExit:
    """Ends this process, once `status` is set, after the exit handlers registered later, without freeing imported
    modules, which takes most of a second for torch. Make it first: exit handlers registered earlier do not run."""

    def __init__(self) -> None:
        """Register an exit function that ends the process at once with `status`, if a command has set it."""
        self.status: int | None = None
        atexit.register(self._leave)

    def _leave(self) -> None:
        """Flush the standard streams and end the command's process at once with its exit `status`, if it is set."""
        if self.status is not None:
            flush_streams()
            os._exit(self.status)


def print_while_read(command: Callable[[], int]) -> int:
    """Run a command that only prints, and return its exit status: 0 also if its reader, such as `| head`, leaves. A
    pipe that breaks elsewhere is an error as any other."""
    try:
        return run_interruptible(command)
    except BrokenPipeError:
        if not reader_left():
            raise
        return 0
    finally:
        flush_streams()


def reader_left() -> bool:
    """Return True if nothing reads this process's standard output or standard error any more."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # no file stands behind it
            poll.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


@contextmanager
def tolerated(say: Callable[[str], None], what: str) -> Iterator[None]:
    """Turn an OSError within the context into a warning that `what`, a file not needed by a run, is not written."""
    try:
        yield
    except OSError as error:
        say(f"WARNING: {what} could not be written: {error}")

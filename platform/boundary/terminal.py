"""Output to a person who may have gone away: a closed terminal or a broken pipe does not end a run.

A `show_phase` that takes longer than a second is shown on standard error, with the amount that is done: on a terminal
as one line with a bar, redrawn in place and gone at the end; in a log as a line after ten seconds, and then at
intervals that double. With NO_PROGRESS set neither is shown.
"""

from __future__ import annotations

import atexit
import io
import os
import re
import select
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import TextIO, TypeVar

from platform.boundary.interrupts import run_interruptible

SILENCE = 1.0  # seconds without a word on a terminal
LOG_SILENCE = 10.0  # in a log, of a job or a test that nobody watches
_LONGEST = 600.0  # seconds between two lines in a log
_REDRAWN = 0.1  # seconds between two looks
_BAR = 24  # cells of a bar
_ERASE = "\r\x1b[2K"

T = TypeVar("T")
Say = Callable[[str], None]  # prints a line to the user
Look = Callable[[], tuple[float, float]]  # says how much of a phase is done, and of what


class _TerminalState:
    """State of the terminal: `transient` while a line stands there that the next text takes the place of."""

    transient = False


def escape_unprintable(text: str, kept_characters: str = "") -> str:
    """Escape every unprintable character of a text but those in `kept_characters`, line ends and terminals' escape
    sequences included: without any kept, it is one line that is safe for any terminal."""
    if text.isprintable():
        return text
    escaped = (c.encode("unicode_escape", "surrogatepass").decode() for c in text)
    return "".join(c if c.isprintable() or c in kept_characters else e for c, e in zip(text, escaped, strict=True))


def escape_terminal_text(text: str) -> str:
    """Escape the unprintable characters of a text for a terminal, except its line ends and tabs."""
    return escape_unprintable(text, "\n\t")


def refusal_line(text: str) -> str:
    """Return a refusal as one printable line, even if a library put line ends or control characters into it."""
    return escape_unprintable(" ".join(text.splitlines()))


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Write a line to `stream` (default: standard output); it is lost if the stream is closed or broken."""
    write_text(stream or sys.stdout, escape_terminal_text(text) + "\n")


def print_refusals(name: str, refusals: Iterable[object]) -> None:
    """Write why a command is refused or failed to standard error, in one line each, which begins with its `name`."""
    for refusal in refusals:
        print_line(f"{name}: {refusal_line(str(refusal))}", sys.stderr)


def write_text(stream: TextIO | None, text: str) -> None:
    """Write a text to a standard stream and flush it, ignoring errors: on a closed or broken stream it is lost."""
    if stream is not None:  # Python sets a standard stream to None if it was closed at the start
        with suppress(OSError, ValueError):  # ValueError: the stream was closed later
            if _TerminalState.transient and stream.isatty():
                text, _TerminalState.transient = _ERASE + text, False
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
        """Register an exit function that flushes the standard streams and ends this process, if `status` is set."""
        self.status: int | None = None
        atexit.register(self._exit_process)

    def run(self, command: Callable[[], int]) -> int:
        """Run `command` and return its exit status, with which this process ends at once, its streams flushed."""
        self.status = status = command()
        flush_streams()
        return status

    def _exit_process(self) -> None:
        """Flush the standard streams and end this process at once with its exit `status`, if it is set."""
        if self.status is not None:
            flush_streams()
            os._exit(self.status)


def run_printing_command(command: Callable[[], int]) -> int:
    """Run a command that only prints, and return its exit status: 0 also if its reader, such as `| head`, leaves. A
    pipe that breaks elsewhere is an error as any other."""
    try:
        return run_interruptible(command)
    except BrokenPipeError:
        if not is_reader_gone():
            raise
        return 0
    finally:
        flush_streams()


def is_reader_gone() -> bool:
    """Return True if nothing reads this process's standard output or standard error any more."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # no file stands behind it
            poll.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


@contextmanager
def warn_on_write_error(say: Callable[[str], None], what: str) -> Iterator[None]:
    """Turn an OSError within the context into a line of text: a warning that `what`, a file, could not be written."""
    try:
        yield
    except OSError as error:
        say(f"WARNING: {what} could not be written: {error}")


@dataclass(eq=False)
class LongPhase:
    """Long phase of a command: `what` is done; `done` of `total` are, in a `unit`, if it is known: "B" for bytes."""

    what: str
    total: float = 0.0
    unit: str = ""
    done: float = 0.0
    began: float = field(default_factory=monotonic)
    look: Look | None = None  # if nobody counts it
    _next: float = field(default_factory=lambda: LOG_SILENCE)  # seconds of it after which a log has its next line

    def count_done(self, count: float = 1.0) -> None:
        """Count more of what this phase does as done."""
        self.done += count

    def iterate_parts(self, parts: Iterable[T], size: Callable[[T], float] = lambda _: 1.0) -> Iterator[T]:
        """Yield the parts of this phase's work, each counted by its size once it is done."""
        for part in parts:
            yield part
            self.count_done(size(part))

    def describe_progress(self, now: float) -> str:
        """Return the words that a terminal shows of this phase: how far it is, and how long it takes."""
        age = now - self.began
        if self.look:
            self.done, self.total = self.look()
        parts = [_format_amount(self.done, self.total, self.unit)] if self.unit and self.total or self.done else []
        if 0 < self.done < self.total:
            parts.append(f"{_format_time(age / self.done * (self.total - self.done))} left")
        return ", ".join([*parts, _format_time(age)] if len(parts) < 2 else parts)

    def claim_log_line(self, now: float) -> bool:
        """Return True if a log is to have a line on this phase now, and note that it gets one."""
        if (age := now - self.began) < self._next:
            return False
        self._next = min(2 * age, age + _LONGEST)
        return True

    @property
    def has_log_line(self) -> bool:
        """Return True if a log has a line on this phase."""
        return self._next > LOG_SILENCE


@contextmanager
def show_phase(what: str, total: float = 0.0, unit: str = "", look: Look | None = None) -> Iterator[LongPhase]:
    """Show a phase of this process's main thread to its user while the context lasts, if it lasts long; phases of other
    threads are not shown. `look` says how much is done, and of what total."""
    long_phase = LongPhase(what, total, unit, look=look)
    if threading.current_thread() is not threading.main_thread() or os.environ.get("NO_PROGRESS"):
        yield long_phase
        return
    _current_phase_display().add_phase(long_phase)
    try:
        yield long_phase
    finally:
        _current_phase_display().end_phase(long_phase)


class _PhaseDisplay:
    """Thread that shows the phases under way. One that is begun within another stands in its place once it takes long
    itself."""

    def __init__(self) -> None:
        """Start a thread that sleeps while there is no phase."""
        self.process = os.getpid()
        self._phases: list[LongPhase] = []
        self._change = threading.Condition()
        self._drawn = False
        threading.Thread(target=self._show_phases_forever, name="phases", daemon=True).start()

    def add_phase(self, long_phase: LongPhase) -> None:
        """Begin to show a long phase of this process on the terminal."""
        with self._change:
            self._phases.append(long_phase)
            self._change.notify()

    def end_phase(self, long_phase: LongPhase) -> None:
        """End a phase of this process: take its line off a terminal; a log gets its time."""
        with self._change:
            self._phases.remove(long_phase)
            self._erase_line()
            if long_phase.has_log_line:
                print_line(f"{long_phase.what}: took {_format_time(monotonic() - long_phase.began)}", sys.stderr)

    def _show_phases_forever(self) -> None:
        """Show the innermost phase that takes long, again and again."""
        while True:
            with self._change:
                if not self._phases:
                    self._change.wait()
                with suppress(Exception):  # what cannot be shown is no reason for anything to fail
                    self._show_phase(monotonic())
            sleep(_REDRAWN)

    def _show_phase(self, now: float) -> None:
        """Show the innermost phase that takes long at this time, if there is one."""
        long_phases = [long_phase for long_phase in self._phases if now - long_phase.began >= SILENCE]
        if not long_phases:
            return
        if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
            if long_phases[-1].claim_log_line(now):
                print_line(f"{long_phases[-1].what}: {long_phases[-1].describe_progress(now)}", sys.stderr)
            return
        line = _draw_phase(long_phases[-1], now)
        _TerminalState.transient = True  # so that it takes the place of what stands there
        write_text(sys.stderr, line)
        _TerminalState.transient = self._drawn = True

    def _erase_line(self) -> None:
        """Take the line of a long phase of this process off the terminal."""
        if self._drawn:
            write_text(sys.stderr, "")
            self._drawn = False


_known: list[_PhaseDisplay] = []


def _current_phase_display() -> _PhaseDisplay:
    """Return the teller of this process; one that was forked has none of its parent's threads."""
    if not _known or _known[0].process != os.getpid():
        _known[:] = [_PhaseDisplay()]
    return _known[0]


def _draw_phase(long_phase: LongPhase, now: float) -> str:
    """Return the line by which a terminal shows a long phase of this process."""
    from rich.console import Console
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    width = shutil.get_terminal_size().columns - 1  # a wrapped line could not be erased
    console = Console(file=io.StringIO(), force_terminal=True, width=width, highlight=False, legacy_windows=False)
    bar = ProgressBar(long_phase.total or None, long_phase.done, width=_BAR, animation_time=now)
    with console.capture() as captured:
        console.print(bar, end="")
    line = Text(f"{escape_unprintable(long_phase.what)} ")
    line.append_text(Text.from_ansi(captured.get()))
    line.append(f" {long_phase.describe_progress(now)}")
    line.truncate(width, overflow="ellipsis")
    with console.capture() as captured:
        console.print(line, end="", soft_wrap=True)
    return captured.get()


def _format_amount(done: float, total: float, unit: str) -> str:
    """Return how much of a long phase is done as a terminal shows it: "1.2 of 8.9 GB", "3 of 4 workers"."""
    if unit == "B":
        most = max(done, total)
        scale, name = next((s, n) for s, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (0, "B")) if most >= s)
        scale = scale or 1
        return f"{done / scale:.1f} of {total / scale:.1f} {name}" if total else f"{done / scale:.1f} {name}"
    return f"{done:,.0f} of {total:,.0f} {unit}" if total else f"{done:,.0f} {unit}"


def _format_time(seconds: float) -> str:
    """Return the time that a long phase takes as a terminal shows it, such as 12 s or 3 min 20 s."""
    whole_seconds = round(seconds)
    return f"{whole_seconds} s" if whole_seconds < 60 else f"{whole_seconds // 60} min {whole_seconds % 60} s"


def align_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as indented lines with aligned columns; columns of numbers are aligned to the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(re.fullmatch(r"x?[\d,]*", cell) for cell in column[1:]) and any(column[1:]) for column in columns]
    justify = [str.rjust if is_numeric else str.ljust for is_numeric in numeric]
    aligned = ([f(cell, w) for f, cell, w in zip(justify, row, widths, strict=True)] for row in rows)
    return [f"  {'  '.join(cells).rstrip()}" for cells in aligned]

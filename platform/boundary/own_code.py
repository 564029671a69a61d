"""Calls of the user's own code, which may raise anything, exit, or never come back."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from time import monotonic
from traceback import walk_tb
from types import FrameType

REPORT_AFTER = 10.0  # seconds of one call after which a warning says that it still runs
QUICK = 300.0  # seconds that an import, or a function that computes, may take
READING = 3600.0  # and one that reads documents or finds files, which may fetch them first
logger = logging.getLogger(__name__)


class OwnCodeError(Exception):
    """Reports that code of the user's own failed; its text says how, in one line."""


class _Hangs(BaseException):
    """Ends code of the user's own that does not come back; no Exception, so that this code does not catch it."""


def said(error: BaseException) -> str:
    """Return an exception of the user's own code as one line, such as "ValueError: no"; its text may itself fail."""
    name = type(error).__name__
    try:
        return " ".join(f"{name}: {error}".split())
    except BaseException:
        return f"{name}, whose text raises an error too"


def passes(error: BaseException) -> bool:
    """Return True if an exception raised while the user's own code ran is a stop signal, and no error of that code."""
    if isinstance(error, KeyboardInterrupt):  # of Ctrl-C, unless another handler takes note of that
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return not isinstance(error, Exception | _Hangs) and type(error).__module__.startswith("platform.")


@contextmanager
def own_code(what: str, unchanged: tuple[type[Exception], ...] = (), limit: float = QUICK) -> Iterator[None]:
    """Raise OwnCodeError in place of any exception that the user's own code `what`, such as "extend=my_module", raises
    within the context, SystemExit too; errors of the types `unchanged`, and stop signals, pass. In the main thread a
    warning after REPORT_AFTER seconds says that the code still runs, and where; the code is ended after `limit`
    seconds."""
    try:
        with _alarm(what, limit):
            yield
    except unchanged:
        raise
    except _Hangs as error:
        raise OwnCodeError(f"does not come back: ended after {limit:g} s{_place(error)}") from None
    except BaseException as error:
        if passes(error):
            raise
        raise OwnCodeError(f"raises {said(error)}") from error


@contextmanager
def _alarm(what: str, limit: float) -> Iterator[None]:
    """Raise _Hangs in the user's own code, called `what`, once the context has lasted `limit` seconds, after warnings
    that it still runs; do nothing outside of the main thread, or where another handler of SIGALRM is set."""
    free = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    if not free or limit == inf:
        yield
        return
    end = monotonic() + limit

    def rings(_: int, frame: FrameType | None) -> None:
        """Raise _Hangs if the user's own code has used up its time; else warn that it still runs, and where."""
        if (left := end - monotonic()) <= 0:
            raise _Hangs
        where = f", at {_short(frame)}:{frame.f_lineno}" if frame else ""
        logger.warning("%s: still runs after %.3g s%s; it is ended after %g s", what, limit - left, where, limit)
        signal.setitimer(signal.ITIMER_REAL, left)

    signal.signal(signal.SIGALRM, rings)
    signal.setitimer(signal.ITIMER_REAL, min(REPORT_AFTER, limit))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _place(error: BaseException) -> str:
    """Return where an alarm has interrupted the user's own code, such as ", at my_module.py:3"."""
    frames = [(frame, line) for frame, line in walk_tb(error.__traceback__) if _short(frame) != Path(__file__).name]
    return f", at {_short(frames[-1][0])}:{frames[-1][1]}" if frames else ""


def _short(frame: FrameType) -> str:
    """Return the file name, without folders, of a stack frame, for messages on where the user's own code runs."""
    return Path(frame.f_code.co_filename).name

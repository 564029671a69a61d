"""Stop signals, by any of which a process is ended: the first stops the run at a safe moment, the second at once."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from time import monotonic
from types import FrameType
from typing import Any

from platform.boundary import documents
from platform.boundary.interrupts import ENDING, exit_process
from platform.boundary.schema import Malformed
from platform.boundary.terminal import escape_unprintable

_ALWAYS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # also where they were ignored, as under a shell's `&`
REASON = "PLATFORM_STOP_REASON"  # environment variable that names the file in which a supervisor says why it signals
_ECHO_SECONDS = 0.5  # within which a repeat is the same signal: sent to all processes, and passed on by a script too


def stop_reason(number: int) -> str:
    """Return why a signal stops the run: a supervisor's text in the file that REASON names, else the signal's name."""
    reason = ""
    with suppress(OSError, Malformed, KeyError):
        reason = escape_unprintable(documents.read_bytes(os.environ[REASON], 200).decode(errors="replace"))
    return reason or signal.Signals(number).name


class Stopped(BaseException):
    """Reports that the run was asked to stop; the message names the signal or other reason. Like KeyboardInterrupt it
    is not an Exception, so no recovery code catches it."""


class StopSignals:
    """Handles the stop signals while entered. The first one raises Stopped wherever the driver is or, after
    `defer_stop`, is only recorded for `raise_if_requested`. The second one raises Stopped anywhere, and further ones
    are ignored while the crew is being closed. A signal within _ECHO_SECONDS of the first is not a second one."""

    def __enter__(self) -> StopSignals:
        """Install the handlers of the run's stop signals, until the context is left. Keep ignoring signals that
        were ignored before (nohup does so with SIGHUP), except the signals of _ALWAYS."""
        self._requested: str | None = None
        self._deferred = self._interrupting = False
        self._status: int | None = None  # exit status, once the run's end is being reported
        self._first: float | None = None  # when the first signal came
        numbers = [n for n in ENDING if n in _ALWAYS or signal.getsignal(n) != signal.SIG_IGN]
        self._previous: dict[int, Any] = {number: signal.signal(number, self._receive_signal) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers that the run's stop signals had before the context."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def defer_stop(self) -> None:
        """Hold the first stop signal from now on, so no work is lost, until `raise_if_requested` raises it."""
        self._deferred = True

    def exit_on_second_signal(self, status: int) -> None:
        """Ignore a first stop signal while the run's end is reported; let a second one exit at once with `status`."""
        self._status = status

    @property
    def stop_requested(self) -> bool:
        """Return True if a stop of the run was requested, by a signal, by `request_stop` or by `note_request`."""
        return self._requested is not None

    def request_stop(self, reason: str) -> None:
        """Request a stop of the run, for `reason`, as a first stop signal does; callable from any thread. A first
        signal after it does not count as a second one: Slurm sends its own at about the time limit too."""
        self.note_request(reason)
        if not self._deferred:
            self._interrupting = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def note_request(self, reason: str) -> None:
        """Record a request to stop the run, which the next `raise_if_requested` raises; never interrupt, as
        `request_stop` does."""
        self._requested = self._requested or reason

    def raise_if_requested(self) -> None:
        """Raise Stopped if a stop of the run was requested; called between steps, where stopping loses nothing."""
        if self._requested:
            raise Stopped(self._requested)

    def _receive_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a stop signal of the run as the class describes; also the one that `request_stop` sends to this
        process, which raises Stopped unless stopping is deferred."""
        if self._interrupting:  # the signal that `request_stop` sent
            self._interrupting = False
            return None if self._deferred else self.raise_if_requested()
        now, first = monotonic(), self._first is None
        if self._first is None:
            self._first = now
        elif now < self._first + _ECHO_SECONDS:
            return
        if self._status is not None:
            return None if first else exit_process(self._status)
        self._requested = self._requested or stop_reason(number)
        if not first:
            for ignored in ENDING:
                signal.signal(ignored, signal.SIG_IGN)
        if not (first and self._deferred):
            raise Stopped(self._requested)
        with suppress(OSError):  # not print(), which the signal may have interrupted
            os.write(2, f"\n{self._requested}: stopping after this step; once more stops at once\n".encode())

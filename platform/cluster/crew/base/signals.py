"""Ctrl-C, SIGTERM and SIGUSR1: the first asks the run to stop at the next good moment, the second stops it at once."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from time import monotonic
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_ECHO_SECONDS = 0.5  # in which a signal comes twice that went to all processes, and is also passed on by a script


class Stopped(BaseException):
    """The run was asked to stop, by the named signal. Like KeyboardInterrupt no Exception: nothing recovers from it."""


class StopSignals:
    """While entered, the first signal raises Stopped where it finds the driver, or, after `defer`, is only noted for
    `check`. The second raises Stopped anywhere, and further ones are ignored while the crew is being ended. One that
    comes with the first is no second."""

    def __enter__(self) -> StopSignals:
        self._requested: str | None = None
        self._deferred = self._interrupting = False
        self._status: int | None = None  # once the end is told
        self._first: float | None = None  # when a signal has come
        self._previous: dict[int, Any] = {number: signal.signal(number, self._handle) for number in STOPPING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def defer(self) -> None:
        """Leaves it to `check` to stop, at good moments: from now on there is something to lose."""
        self._deferred = True

    def finish(self, status: int) -> None:
        """Notes that the end is being told: a further signal ends this process at once, with `status`."""
        self._status = status

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._requested is not None

    def request(self, reason: str) -> None:
        """Asks as a first signal does, from any thread. A signal that comes besides is no second one: Slurm's comes at
        about the time when its allocation ends."""
        self._requested = self._requested or reason
        if not self._deferred:
            self._interrupting = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def check(self) -> None:
        """Raises Stopped if a signal has come."""
        if self._requested:
            raise Stopped(self._requested)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._interrupting:  # that of `request`
            self._interrupting = False
            return None if self._deferred else self.check()
        now, first = monotonic(), self._first is None
        if self._first is None:
            self._first = now
        elif now < self._first + _ECHO_SECONDS:
            return
        if self._status is not None:
            return None if first else os._exit(self._status)
        self._requested = self._requested or signal.Signals(number).name
        if not first:
            for ignored in STOPPING:
                signal.signal(ignored, signal.SIG_IGN)
        if not (first and self._deferred):
            raise Stopped(self._requested)
        with suppress(OSError):  # not print(): the signal may have come in the middle of one
            os.write(
                2, f"\n{signal.Signals(number).name}: stopping after this step; once more stops at once\n".encode()
            )

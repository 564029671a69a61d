"""Current activity of this process, readable from another thread (for its heartbeats) to tell computing, waiting and
hanging apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Annotated

from platform.boundary.schema import Span


@dataclass(frozen=True)
class Activity:
    """Heartbeat of a worker: the driver's call that it is in, "" for none; the innermost
    section; True if it waits there for other ranks; and the seconds since any of these changed."""

    call: str
    section: str
    waiting: bool
    seconds: Annotated[float, Span(0, 1e12)]


class Progress:
    """Keeps the driver's call and the innermost clock section that the main thread of a worker is in. The section's
    state is one tuple, replaced as a whole, so that a reader in another thread never sees half of a change."""

    def __init__(self) -> None:
        self._call = ""
        self._now = ("", False, monotonic())  # section, waiting for other ranks, since

    def begin(self, call: str) -> None:
        """Record that this worker begins to execute `call`, the driver's call as text; "" when the call has ended."""
        self._call, self._now = call, ("", False, monotonic())

    def enter(self, section: str, waiting: bool = False) -> tuple[str, bool]:
        """Record that the main thread enters the clock section `section`, in which it only waits for other ranks if
        `waiting`. Returns the arguments with which `enter` restores the section before."""
        section_before, waiting_before, _ = self._now
        self._now = (section, waiting, monotonic())
        return section_before, waiting_before

    @contextmanager
    def waiting(self, section: str) -> Iterator[None]:
        """Mark the context as the section `section`, in which this rank waits for other ranks: a rank that hangs in it
        is not to blame."""
        before = self.enter(section, True)
        try:
            yield
        finally:
            self.enter(*before)

    def beat(self) -> Activity:
        """Return the heartbeat of this process: its call, the innermost section, and how long it has been there."""
        section, waiting, since = self._now
        return Activity(self._call, section, waiting, monotonic() - since)


PROGRESS = Progress()

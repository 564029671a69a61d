"""Current activity of this process, readable from another thread (for its heartbeats) to tell computing, waiting and
hanging apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any


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

    def beat(self) -> dict[str, Any]:
        """Return the heartbeat of this process, plain data: {"call", "section", "waiting", "seconds": since any of
        these changed}."""
        section, waiting, since = self._now
        return {"call": self._call, "section": section, "waiting": waiting, "seconds": monotonic() - since}


PROGRESS = Progress()

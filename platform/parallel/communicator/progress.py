"""What this process is doing at the moment, for whoever asks from another thread: does it compute, wait, or hang?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any


class Progress:
    """The innermost section that the working thread is in. One tuple, so that a reader never sees half of a change."""

    def __init__(self) -> None:
        self._call = ""
        self._now = ("", False, monotonic())  # section, whether it only waits for other ranks, since when

    def begin(self, call: str) -> None:
        """A call of the driver begins; "" when it has ended."""
        self._call, self._now = call, ("", False, monotonic())

    def enter(self, section: str, waiting: bool = False) -> tuple[str, bool]:
        """Returns what `enter` takes to go back."""
        section_before, waiting_before, _ = self._now
        self._now = (section, waiting, monotonic())
        return section_before, waiting_before

    @contextmanager
    def waiting(self, section: str) -> Iterator[None]:
        """What happens inside depends on other ranks: who hangs here is not to blame."""
        before = self.enter(section, True)
        try:
            yield
        finally:
            self.enter(*before)

    def beat(self) -> dict[str, Any]:
        """{"call", "section", "waiting", "seconds": since the last change of any of them}; plain data."""
        section, waiting, since = self._now
        return {"call": self._call, "section": section, "waiting": waiting, "seconds": monotonic() - since}


PROGRESS = Progress()

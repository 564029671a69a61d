"""How long the committed steps took: what a step may last, and what it costs to do some again."""

from __future__ import annotations

from array import array
from statistics import median

WINDOW = 32  # steps that the median is of


class Pace:
    """Of the steps that this driver has committed and that count: consecutive ones."""

    def __init__(self) -> None:
        self._before = 0  # the step before the first one known
        self._seconds = array("d")

    def __len__(self) -> int:
        return len(self._seconds)

    def add(self, step: int, seconds: float) -> None:
        """After the one before, or after `take_back` to that."""
        if not self._seconds:
            self._before = step - 1
        assert step == self._before + len(self._seconds) + 1, f"step {step} does not follow"
        self._seconds.append(seconds)

    def take_back(self, step: int) -> float:
        """Forgets the steps after `step`; the seconds that they took."""
        kept = max(0, step - self._before)
        lost = sum(self._seconds[kept:])
        del self._seconds[kept:]
        return lost

    def usual(self, since: int) -> float | None:
        """The median of the last steps, of those after step `since`; None where there are none."""
        known = self._seconds[max(0, since - self._before) :][-WINDOW:]
        return median(known) if known else None

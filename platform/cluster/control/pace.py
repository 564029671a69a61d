"""Durations of committed steps: the usual time of a step, and the time lost when steps are taken back."""

from __future__ import annotations

from array import array
from statistics import median

USUAL_STEPS = 32  # steps that `Pace.usual` takes the median over


class Pace:
    """Durations of the consecutive training steps that this driver has committed and that were not rolled back; its
    length is their number."""

    def __init__(self) -> None:
        """Initialise the durations of a run's training steps, of which none is recorded yet."""
        self._before = 0  # the step before the first one recorded
        self._seconds = array("d")

    def __len__(self) -> int:
        """Return the number of the run's training steps whose durations are recorded."""
        return len(self._seconds)

    def add(self, step: int, seconds: float) -> None:
        """Append the duration of the run's step `step`, which must follow the last one added and not taken back."""
        if not self._seconds:
            self._before = step - 1
        assert step == self._before + len(self._seconds) + 1, f"step {step} does not follow"
        self._seconds.append(seconds)

    def take_back(self, step: int) -> float:
        """Forget the durations of the run's steps after `step`, which are rolled back; return their sum in seconds."""
        kept = max(0, step - self._before)
        lost = sum(self._seconds[kept:])
        del self._seconds[kept:]
        return lost

    def usual(self, since: int) -> float | None:
        """Return the median seconds of the run's last USUAL_STEPS steps after step `since`; None without any."""
        known = self._seconds[max(0, since - self._before) :][-USUAL_STEPS:]
        return median(known) if known else None

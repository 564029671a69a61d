"""Schedule of the checkpoints that a run saves while it trains."""

from __future__ import annotations

from time import monotonic

from platform.config.durations import rhythm_of


class Cadence:
    """Save interval of `checkpoint.every`: every `steps` steps (0: none), or, if `seconds` is set, once that many
    seconds have passed since the previous save, or since the driver started."""

    def __init__(self, every: int | str):
        self.steps, seconds = rhythm_of(every)
        self.seconds = seconds or None
        self._since = monotonic()

    def due(self, step: int) -> bool:
        """Return True if the run should save after `step`."""
        if self.seconds:
            return monotonic() - self._since >= self.seconds
        return bool(self.steps) and step % self.steps == 0

    def saved(self) -> None:
        """Note that a save begins. It may fail: the next one still comes at its usual time."""
        self._since = monotonic()

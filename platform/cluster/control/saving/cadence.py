"""Schedule of the checkpoints that a run saves while it trains."""

from __future__ import annotations

from time import monotonic

from platform.config.durations import rhythm_of


class Cadence:
    """Interval between checkpoints that `checkpoint.every` sets: every `steps` steps (0: none), or, if `seconds` is not
    None, once that many seconds have passed since the previous save began, or since the driver started."""

    def __init__(self, every: int | str):
        """Set the interval between checkpoints from checkpoint.every, in steps or in time, which counts from now."""
        self.steps, seconds = rhythm_of(every)
        self.seconds = seconds or None
        self._since = monotonic()

    def due(self, step: int) -> bool:
        """Return True if `checkpoint.every` asks for a checkpoint of the state after training step `step`, now."""
        if self.seconds:
            return monotonic() - self._since >= self.seconds
        return bool(self.steps) and step % self.steps == 0

    def saved(self) -> None:
        """Start the time interval between checkpoints anew, as a save begins, even if that save fails later."""
        self._since = monotonic()

"""How often a run saves while it trains."""

from __future__ import annotations

from time import monotonic

from platform.config.durations import rhythm_of


class Cadence:
    """`checkpoint.every` at work: saves after every so many `steps` (0: none), or, where `seconds` are given, once so
    many have passed since the save before, or since the driver started."""

    def __init__(self, every: int | str):
        self.steps, seconds = rhythm_of(every)
        self.seconds = seconds or None
        self._since = monotonic()

    def due(self, step: int) -> bool:
        """Says whether to save after `step`."""
        if self.seconds:
            return monotonic() - self._since >= self.seconds
        return bool(self.steps) and step % self.steps == 0

    def saved(self) -> None:
        """Notes that a save begins, which may fail: then the next one comes when it would have."""
        self._since = monotonic()

"""Losses that no step should have: what `train.spike` and `train.on_spike` decide, once for all ranks."""

from __future__ import annotations

from collections import deque
from math import inf, isfinite
from statistics import median

WINDOW = 32  # losses that the median is of
_FEWEST = 8  # losses before which nothing is a spike: a run's first ones say little


class Spikes:
    """`limit`: what the next loss may be at most; inf where any finite one will do."""

    def __init__(self, factor: float):
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=WINDOW)

    @property
    def limit(self) -> float:
        return self._factor * median(self._losses) if self._factor and len(self._losses) >= _FEWEST else inf

    def add(self, loss: float) -> None:
        """Of a committed step."""
        if isfinite(loss):
            self._losses.append(loss)

"""Detection of loss spikes (`train.spike`), by the driver once for all ranks; `train.on_spike` says what follows."""

from __future__ import annotations

from collections import deque
from math import inf, isfinite
from statistics import median

RECENT_LOSSES = 32  # losses that the median is taken over
_FEWEST = 8  # fewer losses than this: nothing is a spike, as a run's first losses say little


class Spikes:
    """Tracks the losses of recent training steps, to detect a loss spike. `factor`: train.spike, how many times their
    median a loss may be; 0: any."""

    def __init__(self, factor: float):
        """Prepare to detect a run's loss spikes; none is known. `factor`: train.spike, in medians of recent losses."""
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=RECENT_LOSSES)

    @property
    def limit(self) -> float:
        """Return the run's highest loss that is no spike: `factor` x the recent median; inf if few or factor is 0."""
        return self._factor * median(self._losses) if self._factor and len(self._losses) >= _FEWEST else inf

    def add(self, loss: float) -> None:
        """Add the loss of the run's committed step to the recent ones, by which spikes are judged, if it is finite."""
        if isfinite(loss):
            self._losses.append(loss)

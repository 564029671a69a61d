"""Learning-rate schedules as functions of the update."""

from __future__ import annotations

import math

from platform.config import Optimizer


def _constant(progress: float, low: float) -> float:
    return 1.0


def _cosine(progress: float, low: float) -> float:
    return low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2


SCHEDULES = {"constant": _constant, "cosine": _cosine}


def learning_rate(o: Optimizer, step: int, steps: int) -> float:
    """The rate of update `step` (from 1) of `steps`: linear warm-up, then the schedule down to min_lr x lr."""
    if step <= o.warmup_steps:
        return o.lr * step / o.warmup_steps
    progress = (step - o.warmup_steps) / max(1, steps - o.warmup_steps)
    return o.lr * SCHEDULES[o.schedule](min(progress, 1.0), o.min_lr)

"""Learning-rate schedules as functions of the update."""

from __future__ import annotations

import math
from collections.abc import Callable

from platform.checks import allow
from platform.config import Optimizer


def _constant(progress: float, low: float) -> float:
    return 1.0


def _cosine(progress: float, low: float) -> float:
    return low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2


Schedule = Callable[[float, float], float]  # (progress after warm-up in [0, 1], min_lr) -> factor of lr

SCHEDULES: dict[str, Schedule] = {"constant": _constant, "cosine": _cosine}


def register_schedule(name: str, schedule: Schedule) -> None:
    """Makes `optimizer.schedule=NAME` known."""
    SCHEDULES[name] = schedule
    allow("optimizer.schedule", name)


def learning_rate(o: Optimizer, step: int, steps: int) -> float:
    """The rate of update `step` (from 1) of `steps`: linear warm-up, then the schedule down to min_lr x lr."""
    if step <= o.warmup_steps:
        return o.lr * step / o.warmup_steps
    progress = (step - o.warmup_steps) / max(1, steps - o.warmup_steps)
    return o.lr * SCHEDULES[o.schedule](min(progress, 1.0), o.min_lr)

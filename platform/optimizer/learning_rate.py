"""Learning-rate schedules by name, as functions of the optimizer update's number."""

from __future__ import annotations

import math
from collections.abc import Callable

from platform.config.bounds import allow
from platform.config.fields import Optimizer


def _constant(o: Optimizer, step: int, steps: int) -> float:
    return 1.0


def _cosine(o: Optimizer, step: int, steps: int) -> float:
    progress = min((step - o.warmup_steps) / max(1, steps - o.warmup_steps), 1.0)
    return o.min_lr + (1 - o.min_lr) * (1 + math.cos(math.pi * progress)) / 2


def _inverse_sqrt(o: Optimizer, step: int, steps: int) -> float:
    return math.sqrt(max(1, o.warmup_steps) / step)


# (config.optimizer, number of the update, updates) -> fraction of lr after warm-up
LearningRate = Callable[[Optimizer, int, int], float]

# inverse_sqrt: "Attention Is All You Need", 5.3; its rate d_model^-0.5 x min(step^-0.5, step x warmup^-1.5) is the one
# here with lr = (d_model x warmup)^-0.5.
SCHEDULES: dict[str, LearningRate] = {"constant": _constant, "cosine": _cosine, "inverse_sqrt": _inverse_sqrt}


def register_schedule(name: str, schedule: LearningRate) -> None:
    """Register a learning-rate schedule as `optimizer.schedule=NAME`: `schedule(config.optimizer, step, steps)` returns
    the fraction of optimizer.lr at update `step` of `steps` after warm-up."""
    allow("optimizer.schedule", name, schedule)
    SCHEDULES[name] = schedule


def learning_rate(o: Optimizer, step: int, steps: int) -> float:
    """Return the learning rate of optimizer update `step` (from 1) of `steps`, by config.optimizer `o`: linear warm-up
    to lr, then the configured schedule; the cosine ends at min_lr x lr."""
    if step <= o.warmup_steps:
        return o.lr * step / o.warmup_steps
    return o.lr * SCHEDULES[o.schedule](o, step, steps)


def short_of_peak(o: Optimizer, steps: int) -> str:
    """Return a line for the user if a run of `steps` updates ends within its warm-up, and so never reaches
    optimizer.lr; "" if it does not."""
    if o.warmup_steps <= steps or not steps:
        return ""
    most = o.lr * steps / o.warmup_steps
    reached = f"the learning rate ends at {most:.3g}, {steps / o.warmup_steps:.0%} of optimizer.lr={o.lr:g}"
    return f"optimizer.warmup_steps={o.warmup_steps} is more than the {steps} steps of this run: {reached}"

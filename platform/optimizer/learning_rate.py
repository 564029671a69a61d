"""Learning-rate schedules by name, as functions of the optimizer update's number."""

from __future__ import annotations

import math
from collections.abc import Callable

from platform.config.extensions import bind_settings_object, register_own_function
from platform.config.fields import Optimizer
from platform.plan.layout import format_count


def _schedule_progress(o: Optimizer, step: int, steps: int) -> float:
    """Return the fraction of the learning-rate schedule after warm-up that is done at update `step`, at most 1."""
    return min((step - o.warmup_steps) / max(1, steps - o.warmup_steps), 1.0)


def _linear_decay(o: Optimizer, progress: float) -> float:
    """Return the share of the peak learning rate on a line from 1 to min_lr, at `progress` from 0 to 1."""
    return o.min_lr + (1 - o.min_lr) * (1 - progress)


def _cosine_decay(o: Optimizer, progress: float) -> float:
    """Return the share of the peak learning rate on a half cosine from 1 to min_lr, at `progress` from 0 to 1."""
    return o.min_lr + (1 - o.min_lr) * (1 + math.cos(math.pi * progress)) / 2


def _cosine_restarts(o: Optimizer, step: int, steps: int) -> float:
    """Return the share of the peak learning rate along `optimizer.cycles` cosines, each ending at its last update."""
    progress = _schedule_progress(o, step, steps) * o.cycles
    return _cosine_decay(o, progress - max(0, math.ceil(progress) - 1))


def _warmup_stable_decay(o: Optimizer, step: int, steps: int) -> float:
    """Return the share of the peak learning rate under warm-up, stable, decay: 1, then a linear fall to min_lr."""
    decay_steps = min(o.decay_steps or math.ceil(steps / 10), max(1, steps - o.warmup_steps))
    return _linear_decay(o, min(max(0.0, (step - (steps - decay_steps)) / decay_steps), 1.0))


# (config.optimizer, number of the update, updates) -> fraction of lr after warm-up
LearningRate = Callable[..., float]

# inverse_sqrt: "Attention Is All You Need", 5.3; its rate d_model^-0.5 x min(step^-0.5, step x warmup^-1.5) is the one
# here with lr = (d_model x warmup)^-0.5. cosine_restarts: "SGDR: Stochastic Gradient Descent with Warm Restarts", with
# cycles of one length. wsd (warm-up, stable, decay): "MiniCPM: Unveiling the Potential of Small Language Models", 4.
SCHEDULES: dict[str, LearningRate] = {
    "constant": lambda o, step, steps: 1.0,
    "cosine": lambda o, step, steps: _cosine_decay(o, _schedule_progress(o, step, steps)),
    "cosine_restarts": _cosine_restarts,
    "inverse_sqrt": lambda o, step, steps: math.sqrt(max(1, o.warmup_steps) / step),
    "linear": lambda o, step, steps: _linear_decay(o, _schedule_progress(o, step, steps)),
    "wsd": _warmup_stable_decay,
}


def register_schedule(name: str, schedule: Callable[..., float], settings: type | None = None) -> None:
    """Register a learning-rate schedule as `optimizer.schedule=NAME`: `schedule(config.optimizer, step, steps)` returns
    the fraction of optimizer.lr at update `step` of `steps` after warm-up. `settings`: a dataclass of
    optimizer.schedule_settings, which `schedule` gets as `settings`."""
    register_own_function("optimizer.schedule", name, settings, schedule)
    SCHEDULES[name] = schedule


def learning_rate(o: Optimizer, step: int, steps: int) -> float:
    """Return the learning rate of optimizer update `step` (from 1) of `steps`, by config.optimizer `o`: linear warm-up
    to lr, then the configured schedule; the cosines, linear and wsd end at min_lr x lr."""
    if step <= o.warmup_steps:
        return o.lr * step / o.warmup_steps
    factor = bind_settings_object(SCHEDULES[o.schedule], "optimizer.schedule", o.schedule, o.schedule_settings)
    return float(o.lr * factor(o, step, steps))


def warning_of_warmup(o: Optimizer, steps: int) -> str:
    """Return a warning line if a run of `steps` updates ends in warm-up, below the peak learning rate, else ""."""
    if o.warmup_steps <= steps or not steps:
        return ""
    highest_rate = o.lr * steps / o.warmup_steps
    reached = f"the learning rate ends at {highest_rate:.3g}, {steps / o.warmup_steps:.0%} of optimizer.lr={o.lr:g}"
    length = format_count(steps, "step")
    return f"optimizer.warmup_steps={o.warmup_steps} is more than the {length} of this run: {reached}"

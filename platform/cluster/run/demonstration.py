"""Warning for a long run that would train on the demonstration text alone."""

from __future__ import annotations

from platform.config.fields import Config
from platform.plan.core.plan import Plan
from platform.plan.memory.hardware import dense_bf16_peak
from platform.plan.reports.describe import human

_DAY = 86400.0
_CORE = 1e11  # FLOP/s of a CPU worker, at most
_BYTES_PER_TOKEN = 3.5  # of Python source, under a vocabulary trained on it


def demonstration(config: Config, plan: Plan, nbytes: float) -> str:
    """Return a one-line warning for a run that would take more than a day even at its devices' peak, but has only the
    demonstration text, `nbytes` bytes of Python's standard library (data=stdlib), to train on; else ""."""
    tokens = config.train.steps * plan.tokens_per_step
    peak = dense_bf16_peak(config.cluster.gpu) or _CORE
    if config.data.kind != "stdlib" or tokens * plan.flops_per_token < _DAY * peak * plan.mesh.size:
        return ""
    there = nbytes / _BYTES_PER_TOKEN
    wanted, has = (human(n).strip() for n in (tokens, there))
    return (
        f"data=stdlib: {config.train.steps} steps take {wanted} tokens, and the demonstration text, Python's own"
        f" standard library, has about {has}: {tokens / there:,.0f} times over; for text of your own:"
        " data=text data.path=FILE_OR_FOLDER"
    )

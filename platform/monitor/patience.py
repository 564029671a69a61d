"""Early stopping: whether evaluations say that a run learns no more (`eval.patience`), from its rows of metrics alone,
so that a run that was resumed decides as one that was not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, isfinite
from typing import Any, NamedTuple

from platform.config.fields import Eval


class Best(NamedTuple):
    """Lowest validation loss of a run, and the step after which it was measured; 0 and inf: there is none yet."""

    step: int
    loss: float


def learned_out(rows: Iterable[Mapping[str, Any]], e: Eval) -> Best | None:
    """Return a run's best evaluation if eval.patience evaluations in a row have not been better by more than
    eval.least_gain; else None. `rows`: rows of metrics.jsonl, in order."""
    best, worse = Best(0, inf), 0
    for row in rows:
        loss = row.get("val_loss")
        if not isinstance(loss, int | float):
            continue
        if loss < best.loss - e.least_gain:
            best, worse = Best(row["step"], loss), 0
        else:
            worse += 1
        if e.patience and worse >= e.patience:
            return best
    return None


def validation_losses(rows: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Return the finite validation losses in rows of metrics.jsonl, by step."""
    found = {row["step"]: row.get("val_loss") for row in rows}
    return {step: loss for step, loss in found.items() if isinstance(loss, int | float) and isfinite(loss)}

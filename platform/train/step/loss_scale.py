"""Loss scale of float16 training: the loss is multiplied by it before the backward pass, so that small gradients do not
vanish in float16, and gradients are divided by it before the update.

Dynamic, as in Micikevicius et al. 2018, "Mixed Precision Training": it falls when a gradient overflows, and rises after
many updates in a row. The norm of the whole model's gradient decides, so that all ranks decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Annotated

from platform.boundary.schema import Count, Span
from platform.config.fields import LossScaling

LARGEST = 2.0**100  # a loss times this is finite in fp32


@dataclass(frozen=True)
class LossScale:
    """Factor by which the loss of a training step is multiplied (`scale`), and the number of updates since it last
    changed (`good_steps`)."""

    scale: Annotated[float, Span(1 / LARGEST, LARGEST)]
    good_steps: Count = 0

    def overflowed(self, loss: float, norm: float, rules: LossScaling) -> bool:
        """Return True if a training step's gradient overflowed in fp16, and a smaller loss scale may cure that: its
        global 2-norm `norm` is not finite but the loss is, and the scale is above its least value."""
        return isfinite(loss) and not isfinite(norm) and self.scale > rules.least

    def after_overflow(self, rules: LossScaling) -> LossScale:
        """Return the smaller fp16 loss scale for the next training step, after one whose gradient overflowed."""
        return LossScale(max(rules.least, self.scale * rules.backoff))

    def after_update(self, rules: LossScaling) -> LossScale:
        """Return the fp16 loss scale for the next training step, after an update: larger after growth_every of them."""
        if self.good_steps + 1 < rules.growth_every:
            return LossScale(self.scale, self.good_steps + 1)
        return LossScale(min(LARGEST, self.scale * rules.growth))

"""Operands of planned einsums on their way to the product: started where they are used, or ahead of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.parallel.sharding.convert import Pending, convert
from platform.plan.communication.planned import EinsumGroup
from platform.plan.core.ahead import Ahead, Use


class Operands(NamedTuple):
    """Conversions of the operands of one `group` of einsums. With `ahead`, they are parameters that `ahead` converts
    for the `use` of them."""

    communicator: Communicator
    group: EinsumGroup
    ahead: Ahead[Pending] | None = None
    use: Use = ("", "", 0)

    def take(self, stored: Sequence[Tensor], back: bool = False) -> list[Pending]:
        """Start the gathers of an einsum group's operand tensors from the layouts in which they are `stored`, or return
        the conversions started ahead. `back`: True in the backward pass, for which only operands that the plan gathers
        again are converted."""
        steps = [e.operand.forward if e.regathered or not back else () for e in self.group.einsums]
        if self.ahead and any(steps):
            return self.ahead.take(self.use, back)
        return [convert(self.communicator, w, s) for w, s in zip(stored, steps, strict=True)]

    def onward(self, back: bool = False) -> None:
        """Start gathering the parameters of the next group of einsums (of the backward pass if `back`), which travel
        beside the product of this group, whose own have arrived."""
        if self.ahead:
            self.ahead.onward(self.use, back)

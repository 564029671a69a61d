"""Exchange of the matrices of experts that ranks compute for others, and of their gradients back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from platform.parallel.communicator.base import Communicator, Handle
from platform.plan.communication.rule import Step


class Lending(NamedTuple):
    """Step of a conversion under way that lends experts, or gives their gradients back, for the block `x` of experts.
    `handle`: the exchange, None if nothing is exchanged; `sent`: this rank's experts that others compute."""

    step: Step
    x: Tensor
    handle: Handle | None
    sent: list[int]

    def wait(self) -> Tensor:
        """Return the block with lent experts behind its own, or its gradients with the lent experts' added."""
        x, step = self.x, self.step
        came = self.handle.wait() if self.handle else x[:0]
        if step.op == "lend":
            empty = x.new_zeros((step.shape[0] - x.shape[0] - came.shape[0], *x.shape[1:]))
            return torch.cat([x, came, empty])
        own = x.narrow(0, 0, step.shape[0])
        for i, expert in enumerate(self.sent):  # in one order, so that sums are the same each time
            own[expert] += came[i]
        return own


def lending(communicator: Communicator, step: Step, x: Tensor) -> Lending:
    """Start the exchange of a step of experts that are lent, or of their gradients, as `communicator.lent` says."""
    lent, me = communicator.lent.get(step.layer, ()), communicator.index(step.axes)
    each = step.shape[0] if step.op == "give_back" else x.shape[0]
    if not x.numel() or not any(lent):
        return Lending(step, x, None, [])
    mine = [[expert - me * each for expert in there if expert // each == me] for there in lent]
    given = [expert for there in mine for expert in there]
    out, into = list(map(len, mine)), [sum(expert // each == rank for expert in lent[me]) for rank in range(len(lent))]
    name = f"{step.op} experts of {step.layer}"
    if step.op == "lend":
        rows = x[given] if given else x[:0]
        return Lending(step, x, communicator.deal(rows, out, into, step.axes, name=name), given)
    return Lending(step, x, communicator.deal(x[each : each + sum(into)], into, out, step.axes, name=name), given)

"""One rank's blocks of the parameters: master copies, compute copies and gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from platform.parallel.convert import absent
from platform.parallel.groups import Communicator
from platform.parallel.ops import initialise
from platform.plan.plan import Plan

# precision -> type of the compute copies, and of master copies and summed gradients
DTYPES = {
    "fp64": (torch.float64, torch.float64),
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.float32),
}


class Weights:
    """`compute`: name -> what the forward pass reads; `master`: name -> what the optimizer updates, the same tensor
    where the precisions agree. `gradients`: name -> gradient in the master's type, summed over microbatches. What this
    rank has no block of is empty."""

    def __init__(self, plan: Plan, communicator: Communicator, seed: int):
        low, high = DTYPES[plan.precision]
        self.master: dict[str, Tensor] = {}
        for p in plan.parameters:
            shape = plan.local_shape(p) if plan.present(p, communicator.coordinates) else 0
            block = torch.empty(shape, dtype=high, device=communicator.device)
            if not absent(block):
                initialise(plan, communicator, p, seed, block)
            self.master[p.name] = block.requires_grad_()
        self._shadowed = low != high
        self.compute: Mapping[str, Tensor] = self.master
        if self._shadowed:
            self.compute = {n: w.detach().to(low).requires_grad_() for n, w in self.master.items()}

    @property
    def gradients(self) -> dict[str, Tensor]:
        return {n: w.grad for n, w in self.owned.items() if w.grad is not None}

    @property
    def owned(self) -> dict[str, Tensor]:
        """The master copies of which this rank has a block."""
        return {n: w for n, w in self.master.items() if not absent(w)}

    def accumulate(self) -> None:
        """Adds the last microbatch's gradients of the compute copies to the master's."""
        if self._shadowed:
            for name, low in self.compute.items():
                high = self.master[name]
                if low.grad is not None:
                    high.grad = low.grad.to(high.dtype) if high.grad is None else high.grad.add_(low.grad)
                    low.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Brings the compute copies up to the updated master copies and drops the gradients."""
        for name, high in self.master.items():
            high.grad = None
            if self._shadowed:
                self.compute[name].copy_(high)

"""Lion, an optimizer whose update is the sign of a momentum ("Symbolic Discovery of Optimization Algorithms")."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Updates each element by the sign of a mean of its momentum and its gradient, with decoupled weight decay.

    `betas`: the momentum's share in that mean, and its decay rate."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float]):
        """Construct Lion for the parameter `groups`; `betas`: the momentum's share in an update, and its decay rate."""
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient by Lion. `closure` is not supported."""
        assert closure is None, "gradients are there"
        for group in self.param_groups:
            lr, (share, decay) = group["lr"], group["betas"]
            for w in group["params"]:
                if w.grad is None:
                    continue
                momentum = self.state[w].setdefault("exp_avg", torch.zeros_like(w, requires_grad=False))
                w.mul_(1 - lr * group["weight_decay"])
                w.sub_(momentum.lerp(w.grad, 1 - share).sign_(), alpha=lr)
                momentum.lerp_(w.grad, 1 - decay)

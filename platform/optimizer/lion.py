"""Lion, an optimizer whose update is the sign of a momentum ("Symbolic Discovery of Optimization Algorithms")."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


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
        most = max(w.numel() for group in self.param_groups for w in group["params"])
        for group in self.param_groups:
            lr, (share, decay) = group["lr"], group["betas"]
            for weights in _together([w for w in group["params"] if w.grad is not None], most):
                gradients = [w.grad for w in weights if w.grad is not None]
                momenta = [self._momentum(w) for w in weights]
                torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
                signs = torch._foreach_lerp(momenta, gradients, 1 - share)
                torch._foreach_sign_(signs)
                torch._foreach_add_(weights, signs, alpha=-lr)
                torch._foreach_lerp_(momenta, gradients, 1 - decay)
                del signs  # before the next weights' are made

    def _momentum(self, w: Tensor) -> Tensor:
        """Return the momentum of a parameter, which its first Lion update creates."""
        if not self.state[w]:
            self.state[w]["exp_avg"] = torch.zeros_like(w, requires_grad=False)
        momentum: Tensor = self.state[w]["exp_avg"]
        return momentum


def _together(weights: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Yield lists of weights to update in the same launches, with no more than `most` elements unless one has more."""
    found: list[Tensor] = []
    for w in weights:
        if found and sum(map(Tensor.numel, found)) + w.numel() > most:
            yield found
            found = []
        found.append(w)
    if found:
        yield found

"""Muon ("Muon: An optimizer for hidden layers in neural networks", Jordan et al.): orthogonal updates of matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import sqrt
from typing import Any, Protocol

import torch
from torch import Tensor

from platform.config.fields import Optimizer

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the quintic iteration, chosen by the reference for a steep start
EPS = 1e-7

# [rows, columns] of a matrix -> factor on the learning rate: that of the reference, or the one with which an update is
# as large as AdamW's ("Muon is Scalable for LLM Training", 2.2)
FACTORS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * sqrt(max(rows, columns)),
}


class WholeMatrices(Protocol):
    """Gives whole matrices of which this rank has parts; see `platform.parallel.sharding.matrices.Matrices`."""

    half: bool

    def map(self, function: Callable[[Tensor], Tensor], parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, this rank's part of `function` of the whole matrix) for Muon, gathered from `parts`."""

    def shape(self, name: str) -> tuple[int, int]:
        """Return the (rows, columns) of each whole weight matrix that the parameter `name` is, for Muon."""


class Muon(torch.optim.AdamW):
    """Updates parameters of groups with `matrix` by their orthogonalised momentum, and all others as AdamW does.

    `matrices` gathers the whole of what this rank has parts of; all ranks step together. Momentum is kept as `exp_avg`.
    """

    matrices: WholeMatrices

    def __init__(self, groups: list[dict[str, Any]], o: Optimizer):
        """Construct Muon for the parameter `groups` (key `matrix`: True for matrices) by config.optimizer `o`."""
        super().__init__(groups, o.lr, (o.betas[0], o.betas[1]), o.eps, fused=True)
        self._o = o

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient by Muon. `closure` is not supported."""
        assert closure is None, "gradients are there"
        every = self.param_groups
        of_matrices = [group for group in every if group.get("matrix")]
        self.param_groups = [group for group in every if not group.get("matrix")]
        try:
            super().step()
        finally:
            self.param_groups = every
        if hasattr(self, "matrices"):
            self._update(of_matrices)

    def _update(self, groups: list[dict[str, Any]]) -> None:
        """Update the matrices of the parameter `groups` by their orthogonalised momentum, gathered from all ranks one
        by one."""
        o = self._o
        owned = {name: (w, group) for group in groups for name, w in zip(group["names"], group["params"], strict=True)}
        parts = {name: self._momentum(w) for name, (w, _) in owned.items()}

        def made(whole: Tensor) -> Tensor:
            """Return Muon's orthogonal update of whole matrices, computed in bf16 for a model in half precision."""
            x = whole.bfloat16() if self.matrices.half else whole
            return orthogonal(x, o.newton_schulz).to(whole.dtype)

        for name, part in self.matrices.map(made, parts):
            w, group = owned[name]
            w.mul_(1 - group["lr"] * group["weight_decay"])
            w.sub_(part.view_as(w), alpha=group["lr"] * FACTORS[o.matrix_lr](*self.matrices.shape(name)))
            del part  # before the next matrix is made

    def _momentum(self, w: Tensor) -> Tensor:
        """Add the gradient of this rank's part of a matrix to Muon's momentum; return the update, not orthogonal."""
        o, state = self._o, self.state[w]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=w.device)
            state["exp_avg"] = torch.zeros_like(w, requires_grad=False)
        state["step"] += 1
        assert w.grad is not None, "every part of a matrix has a gradient"
        momentum: Tensor = state["exp_avg"].lerp_(w.grad, 1 - o.momentum)
        return w.grad.lerp(momentum, o.momentum) if o.nesterov else momentum


def orthogonal(matrix: Tensor, iterations: int) -> Tensor:
    """Return Muon's orthogonal update: a matrix with the singular vectors of `matrix` and singular values near 1, of
    the same type, after so many `iterations` of Newton and Schulz; of [number, rows, columns] each matrix by itself."""
    a, b, c = COEFFICIENTS
    add, tall = torch.addmm if matrix.dim() == 2 else torch.baddbmm, matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(iterations):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).contiguous()

"""Adafactor ("Adafactor: Adaptive Learning Rates with Sublinear Memory Cost"), with the choices of torch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any, Protocol

import torch
from torch import Tensor

from platform.config.fields import Optimizer

ROWS, COLUMNS, WHOLE = "row_var", "col_var", "variance"  # names of its state


class SumsOverRanks(Protocol):
    """Sums what ranks have of the parameters of which they have parts; see `platform.parallel.sharding.factors`."""

    @property
    def elements(self) -> Mapping[str, int]:
        """Return parameter name -> number of its elements over all ranks, for Adafactor."""

    def shape(self, name: str) -> tuple[int, int, int] | None:
        """Return (number, rows, columns) of a parameter's matrices, None unless Adafactor factors their moments."""

    def sides(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of a parameter's squared gradient by row and column, of this rank's part, for Adafactor."""

    def product(self, name: str, rows: Tensor, columns: Tensor, like: Tensor) -> Tensor:
        """Return this rank's part of Adafactor's second moments: of `rows` times `columns`, laid out as `like`."""

    def summed(self, found: Mapping[str, Sequence[Tensor]], totals: bool = False) -> dict[str, list[Tensor]]:
        """Sum over ranks the sums of squares, `found`, that Adafactor needs of each parameter; `totals`: one each."""


class Adafactor(torch.optim.Optimizer):
    """Divides each gradient by the root of its second moments, of which it keeps a mean per row and per column of a
    matrix; updates are clipped to a root mean square, and as large as the weights are.

    `factors` sums over the ranks that have parts of a parameter; all ranks step together. Without it a step only makes
    the state of each parameter, as of one that is no matrix.
    """

    factors: SumsOverRanks

    def __init__(self, groups: list[dict[str, Any]], o: Optimizer):
        """Construct Adafactor for the parameter `groups`, with lr and its other settings from config.optimizer `o`."""
        super().__init__(groups, {"lr": o.lr, "weight_decay": 0.0})
        self._o = o

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient by Adafactor. `closure` is not supported."""
        assert closure is None, "gradients are there"
        if not hasattr(self, "factors"):
            for w in (w for group in self.param_groups for w in group["params"]):
                self._begin(w, None)["step"] += 1
            return
        owned = {
            name: (w, group)
            for group in self.param_groups
            for name, w in zip(group.get("names", ()), group["params"], strict=False)
        }
        found = {name: [*self._sides(name, w), _square(w)] for name, (w, _) in owned.items()}
        sums = self.factors.summed(found)
        found = {name: [self._divide(name, w, sums[name][:-1])] for name, (w, _) in owned.items()}
        totals = self.factors.summed(found, totals=True)
        for name, (w, group) in owned.items():
            self._apply(w, group, self.factors.elements[name], sums[name][-1], totals[name][0])

    def _sides(self, name: str, w: Tensor) -> tuple[Tensor, ...]:
        """Return the sums by row and by column of this rank's squared gradient of a matrix; () for other parameters."""
        assert w.grad is not None, "every part has a gradient"
        return self.factors.sides(name, w.grad) if self.factors.shape(name) else ()

    def _begin(self, w: Tensor, shape: tuple[int, int, int] | None) -> dict[str, Any]:
        """Return the optimizer state of a parameter, which its first Adafactor update creates; `shape`: number, rows
        and columns of matrices, None for other parameters."""
        state = self.state[w]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=w.device)
            if shape:
                state[ROWS], state[COLUMNS] = (
                    torch.zeros(shape[0] * n, dtype=w.dtype, device=w.device) for n in shape[1:]
                )
            else:
                state[WHOLE] = torch.zeros_like(w, requires_grad=False)
        return state

    def _divide(self, name: str, w: Tensor, sides: Sequence[Tensor]) -> Tensor:
        """Add the squares of a gradient to Adafactor's running second moments, and divide the gradient by their root,
        in place; return the sum of squares of the divided gradient. `sides`: sums of squares by row and by column, over
        all ranks (empty if `name` is no matrix)."""
        gradient, shape = w.grad, self.factors.shape(name)
        assert gradient is not None, "every part has a gradient"
        state, eps = self._begin(w, shape), self._o.eps
        state["step"] += 1
        part = (state["step"].double() ** self._o.beta2_decay).to(w.dtype)
        if shape:
            rows, columns = state[ROWS], state[COLUMNS]
            for moment, squares, others in ((rows, sides[0], shape[2]), (columns, sides[1], shape[1])):
                moment.lerp_(squares / others, part)
            by_matrix = rows.view(shape[0], -1)
            relative = by_matrix / by_matrix.mean(1, keepdim=True).clamp(min=eps)
            moments = self.factors.product(name, relative.view(-1), columns, gradient)
        else:
            moments = state[WHOLE].lerp_(gradient.square(), part).clone()
        return _square(gradient.mul_(moments.clamp_(min=eps * eps).rsqrt_()))

    def _apply(self, w: Tensor, group: Mapping[str, Any], elements: int, weights: Tensor, update: Tensor) -> None:
        """Update a parameter by Adafactor from its gradient as `_divide` has left it, clipped to a root mean square.
        `elements`: size of the whole parameter over all ranks; `weights`, `update`: sums of squares of its weights and
        of its divided gradient."""
        o, lr, step = self._o, group["lr"], self.state[w]["step"]
        assert w.grad is not None, "every part has a gradient"
        scale = (weights / elements).sqrt().clamp(min=o.least_scale) if o.scale_by_weight else torch.ones_like(weights)
        rate = step.double().rsqrt().clamp(max=lr).to(w.dtype) if o.relative_step else lr
        clipped = (update.sqrt() / (sqrt(elements) * o.update_clip)).clamp(min=1)
        w.mul_(1 - lr * group["weight_decay"])
        w.sub_(w.grad.mul_(rate * scale / clipped))


def _square(x: Tensor) -> Tensor:
    """Return the sum of the squares of a gradient or weight x, as a tensor of one element, for Adafactor."""
    return torch.linalg.vector_norm(x).square().view(1)

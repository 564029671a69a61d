"""Update rules that torch lacks, or whose updates need sums or matrices over ranks.

- AdamW in the order of torchao's arithmetic, for moments that are kept in fewer bits.
- Adafactor ("Adafactor: Adaptive Learning Rates with Sublinear Memory Cost"), with the choices of torch's.
- Lion ("Symbolic Discovery of Optimization Algorithms"): the update is the sign of a momentum.
- Muon ("Muon: An optimizer for hidden layers in neural networks", Jordan et al.): orthogonal updates of matrices.

Each takes an attribute `found_inf`, as torch's fused optimizers do: where it is 1, on the device, an update changes no
number (`Skip`). Nothing here asks the device for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import sqrt
from typing import Any, Protocol

import torch
from torch import Tensor

from platform.config.fields import Optimizer

ROWS, COLUMNS, WHOLE = "row_var", "col_var", "variance"  # names of its state


class Skip:
    """Word of the device on whether it leaves out an update of `optimizer`, whose attribute `found_inf` is then 1; None
    or missing where the host has decided to update. With it every operation of an update becomes one that changes
    nothing, so that no copy of weights or moments is made."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        """Take the word that an optimizer's update has now."""
        self._flag: Tensor | None = getattr(optimizer, "found_inf", None)
        self._mask = None if self._flag is None else self._flag.bool()

    def hold(self, x: Tensor, moment: Tensor) -> Tensor:
        """Replace x in place by the moment that would move to it, if the update is left out; return x."""
        return x if self._mask is None else torch.where(self._mask, moment, x, out=x)

    def clear(self, x: Tensor) -> Tensor:
        """Replace x in place, which weights would change by, by zeros if the update is left out; return x."""
        return x if self._mask is None else x.masked_fill_(self._mask, 0)

    def weaken(self, decay: float, dtype: torch.dtype) -> float | Tensor:
        """Return what weights are multiplied by: 1 - `decay`, of the type of weights; 1 if the update is left out."""
        return 1 - decay if self._flag is None else (1 - decay * (1 - self._flag.double())).to(dtype)

    def count_back(self, steps: Tensor) -> None:
        """Take an update that is left out off the count of `steps`, to which it was added."""
        if self._flag is not None:
            steps.sub_(self._flag)


class Sgd(torch.optim.SGD):
    """Torch's fused SGD, whose momenta are zeros before the first update: its kernels may skip that one too, and would
    leave momenta that torch has just allocated undefined."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient by SGD. `closure` is not supported."""
        assert closure is None, "gradients are there"
        for w in (w for group in self.param_groups if group["momentum"] for w in group["params"] if w.grad is not None):
            if "momentum_buffer" not in self.state[w]:
                self.state[w]["momentum_buffer"] = torch.zeros_like(w, requires_grad=False)
        super().step()


class SumsOverRanks(Protocol):
    """Sums what ranks have of the parameters of which they have parts; see `platform.runtime.matrices`."""

    @property
    def parameter_sizes(self) -> Mapping[str, int]:
        """Return parameter name -> number of its elements over all ranks, for the Adafactor optimizer."""

    def matrix_shape(self, name: str) -> tuple[int, int, int] | None:
        """Return (number, rows, columns) of a parameter's matrices, None unless Adafactor factors their moments."""

    def squares_by_side(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums by row and column of a parameter's squared gradient, of a rank's part, for Adafactor."""

    def outer_product_part(self, name: str, rows: Tensor, columns: Tensor, like: Tensor) -> Tensor:
        """Return this rank's part of Adafactor's second moments: of `rows` times `columns`, laid out as `like`."""

    def sum_over_ranks(self, squares: Mapping[str, Sequence[Tensor]], totals: bool = False) -> dict[str, list[Tensor]]:
        """Sum over ranks the `squares` that Adafactor's update of each parameter needs; `totals`: one sum each."""


class Adafactor(torch.optim.Optimizer):
    """Divides each gradient by the root of its second moments, of which it keeps a mean per row and per column of a
    matrix; updates are clipped to a root mean square, and as large as the weights are.

    `factors` sums over the ranks that have parts of a parameter; all ranks step together. Of a group without names a
    step only makes the state, as of parameters that are no matrix.
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
        for w in (w for group in self.param_groups if "names" not in group for w in group["params"]):
            self._ensure_state(w, None)["step"] += 1
        if not hasattr(self, "factors"):
            return
        skip = Skip(self)
        owned = {n: (w, g) for g in self.param_groups for n, w in zip(g.get("names", ()), g["params"], strict=False)}
        local_sums = {name: [*self._sum_local_sides(name, w), _sum_squares(w)] for name, (w, _) in owned.items()}
        sums = self.factors.sum_over_ranks(local_sums)
        local_sums = {name: [self._divide_gradient(name, w, sums[name][:-1], skip)] for name, (w, _) in owned.items()}
        totals = self.factors.sum_over_ranks(local_sums, totals=True)
        for name, (w, group) in owned.items():
            self._apply_update(w, group, self.factors.parameter_sizes[name], sums[name][-1], totals[name][0], skip)

    def _sum_local_sides(self, name: str, w: Tensor) -> tuple[Tensor, ...]:
        """Return the sums by row and by column of this rank's squared gradient of a matrix; () for other parameters."""
        assert w.grad is not None, "every part has a gradient"
        return self.factors.squares_by_side(name, w.grad) if self.factors.matrix_shape(name) else ()

    def _ensure_state(self, w: Tensor, shape: tuple[int, int, int] | None) -> dict[str, Any]:
        """Return the optimizer state of a parameter, which its first Adafactor update creates; `shape`: number, rows
        and columns of matrices, None for other parameters."""
        state = self.state[w]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=w.device)
            if shape:
                state[ROWS], state[COLUMNS] = (w.new_zeros(shape[0] * n) for n in shape[1:])
            else:
                state[WHOLE] = torch.zeros_like(w, requires_grad=False)
        return state

    def _divide_gradient(self, name: str, w: Tensor, row_and_column_sums: Sequence[Tensor], skip: Skip) -> Tensor:
        """Add the squares of a gradient to Adafactor's running second moments, and divide the gradient by their root,
        in place; return the sum of squares of the divided gradient. `row_and_column_sums`: sums of squares by row and
        by column, over all ranks (empty if `name` is no matrix)."""
        gradient, shape = w.grad, self.factors.matrix_shape(name)
        assert gradient is not None, "every part has a gradient"
        state, eps = self._ensure_state(w, shape), self._o.eps
        state["step"] += 1
        new_share = (state["step"].double() ** self._o.beta2_decay).to(w.dtype)
        if shape:
            rows, columns = state[ROWS], state[COLUMNS]
            for moment, squares, others in (
                (rows, row_and_column_sums[0], shape[2]),
                (columns, row_and_column_sums[1], shape[1]),
            ):
                moment.lerp_(skip.hold(squares / others, moment), new_share)
            by_matrix = rows.view(shape[0], -1)
            relative = by_matrix / by_matrix.mean(1, keepdim=True).clamp(min=eps)
            moments = self.factors.outer_product_part(name, relative.view(-1), columns, gradient)
        else:
            moments = state[WHOLE].lerp_(skip.hold(gradient.square(), state[WHOLE]), new_share).clone()
        return _sum_squares(gradient.mul_(moments.clamp_(min=eps * eps).rsqrt_()))

    def _apply_update(
        self, w: Tensor, group: Mapping[str, Any], size: int, weights: Tensor, update: Tensor, skip: Skip
    ) -> None:
        """Update a parameter by Adafactor from its gradient as `_divide_gradient` has left it, clipped to a root mean
        square. `size`: elements of the whole parameter over all ranks; `weights`, `update`: sums of squares of its
        weights and of its divided gradient."""
        o, lr, step = self._o, group["lr"], self.state[w]["step"]
        assert w.grad is not None, "every part has a gradient"
        scale = (weights / size).sqrt().clamp(min=o.least_scale) if o.scale_by_weight else torch.ones_like(weights)
        rate = step.double().rsqrt().clamp(max=lr).to(w.dtype) if o.relative_step else lr
        clipped = (update.sqrt() / (sqrt(size) * o.update_clip)).clamp(min=1)
        w.mul_(skip.weaken(lr * group["weight_decay"], w.dtype))
        w.sub_(skip.clear(w.grad.mul_(rate * scale / clipped)))
        skip.count_back(step)


def _sum_squares(x: Tensor) -> Tensor:
    """Return the sum of the squares of a gradient or weight x, as a tensor of one element, for Adafactor."""
    return torch.linalg.vector_norm(x).square().view(1)


class OrderedAdamW(torch.optim.Optimizer):
    """AdamW whose every operation is torchao's, so that moments rounded after an update are equal in every bit; torch's
    fused kernels round elsewhere."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float):
        """Construct AdamW for the parameter `groups`; `betas`: decay rates of its two moments."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient by AdamW. `closure` is not supported."""
        assert closure is None, "gradients are there"
        skip = Skip(self)
        for group in self.param_groups:
            for w in (w for w in group["params"] if w.grad is not None):
                state = self.state[w]
                if not state:
                    state["step"] = torch.zeros((), dtype=w.dtype, device=w.device)
                    state |= {name: torch.zeros_like(w, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
                state["step"] += 1
                lr = skip.clear(torch.full((), group["lr"], dtype=w.dtype, device=w.device))
                rest_of_mean, rest_of_square = (1 - beta ** state["step"] for beta in group["betas"])
                w.sub_(lr * group["weight_decay"] * w)
                squares = skip.hold(w.grad.square(), state["exp_avg_sq"])
                mean = state["exp_avg"].lerp_(skip.hold(w.grad, state["exp_avg"]), 1 - group["betas"][0])
                square = state["exp_avg_sq"].lerp_(squares, 1 - group["betas"][1])
                root = square.sqrt().div_(rest_of_square.sqrt()).add_(group["eps"])
                w.sub_((mean / rest_of_mean).mul_(lr).div_(root))
                skip.count_back(state["step"])


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
        skip = Skip(self)
        most = max(w.numel() for group in self.param_groups for w in group["params"])
        for group in self.param_groups:
            lr, (share, decay) = group["lr"], group["betas"]
            for weights in _batch_weights([w for w in group["params"] if w.grad is not None], most):
                momenta = [self._ensure_momentum(w) for w in weights]
                pairs = zip(weights, momenta, strict=True)
                gradients = [skip.hold(w.grad, m) for w, m in pairs if w.grad is not None]
                torch._foreach_mul_(weights, skip.weaken(lr * group["weight_decay"], weights[0].dtype))
                signs = torch._foreach_lerp(momenta, gradients, 1 - share)
                torch._foreach_sign_(signs)
                for x in signs:
                    skip.clear(x)
                torch._foreach_add_(weights, signs, alpha=-lr)
                torch._foreach_lerp_(momenta, gradients, 1 - decay)
                del signs  # before the next weights' are made

    def _ensure_momentum(self, w: Tensor) -> Tensor:
        """Return the momentum of a parameter, which its first Lion update creates."""
        if not self.state[w]:
            self.state[w]["exp_avg"] = torch.zeros_like(w, requires_grad=False)
        momentum: Tensor = self.state[w]["exp_avg"]
        return momentum


def _batch_weights(weights: Sequence[Tensor], max_elements: int) -> Iterator[list[Tensor]]:
    """Yield lists of weights to update in the same launches, of at most `max_elements` elements unless one has more."""
    batch: list[Tensor] = []
    for w in weights:
        if batch and sum(map(Tensor.numel, batch)) + w.numel() > max_elements:
            yield batch
            batch = []
        batch.append(w)
    if batch:
        yield batch


COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the quintic iteration, chosen by the reference for a steep start
EPS = 1e-7

# [rows, columns] of a matrix -> factor on the learning rate: that of the reference, or the one with which an update is
# as large as AdamW's ("Muon is Scalable for LLM Training", 2.2)
FACTORS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * sqrt(max(rows, columns)),
}


class WholeMatrices(Protocol):
    """Gives whole matrices of which this rank has parts; see `platform.runtime.matrices.MuonMatrices`."""

    half: bool

    def map_matrices(
        self, function: Callable[[Tensor], Tensor], parts: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, this rank's part of `function` of the whole matrix) for Muon's update, gathered from `parts`."""

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """Return the (rows, columns) of each whole matrix that the parameter `name` is, for the Muon optimizer."""


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
            self._update_matrices(of_matrices, Skip(self))

    def _update_matrices(self, groups: list[dict[str, Any]], skip: Skip) -> None:
        """Update the matrices of the parameter `groups` by their orthogonalised momentum, gathered from all ranks one
        by one."""
        o = self._o
        owned = {name: (w, group) for group in groups for name, w in zip(group["names"], group["params"], strict=True)}
        parts = {name: self._advance_momentum(w, skip) for name, (w, _) in owned.items()}

        def compute_update(matrices: Tensor) -> Tensor:
            """Return Muon's orthogonal update of whole matrices, computed in bf16 for a model in half precision."""
            x = matrices.bfloat16() if self.matrices.half else matrices
            return orthogonalize_matrix(x, o.newton_schulz).to(matrices.dtype)

        for name, part in self.matrices.map_matrices(compute_update, parts):
            w, group = owned[name]
            w.mul_(skip.weaken(group["lr"] * group["weight_decay"], w.dtype))
            change = skip.clear(part.view_as(w))
            w.sub_(change, alpha=group["lr"] * FACTORS[o.matrix_lr](*self.matrices.matrix_shape(name)))
            del part, change  # before the next matrix is made

    def _advance_momentum(self, w: Tensor, skip: Skip) -> Tensor:
        """Add the gradient of this rank's part of a matrix to Muon's momentum; return the update, not orthogonal."""
        o, state = self._o, self.state[w]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=w.device)
            state["exp_avg"] = torch.zeros_like(w, requires_grad=False)
        state["step"] += 1
        skip.count_back(state["step"])
        assert w.grad is not None, "every part of a matrix has a gradient"
        momentum: Tensor = state["exp_avg"].lerp_(skip.hold(w.grad, state["exp_avg"]), 1 - o.momentum)
        return w.grad.lerp(momentum, o.momentum) if o.nesterov else momentum


def orthogonalize_matrix(matrix: Tensor, iterations: int) -> Tensor:
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

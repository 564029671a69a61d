"""Two products with a function between them, chunk by chunk of rows: the hidden rows between are computed again in the
backward pass, so that only one chunk's are ever there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.parallel.kernels.leaves import AddPart, add_total, in_parts
from platform.parallel.kernels.products import add_product


@dataclass(frozen=True)
class HiddenRows:
    """Weights [hidden, in] and biases (or none) of the products before `function`, and the weight [out, hidden] and the
    bias (or None) of the product after it, as local rows are multiplied by them. `chunk`: rows of a chunk."""

    function: Callable[..., Tensor]
    inner: Sequence[Tensor]
    inner_biases: Sequence[Tensor]
    outer: Tensor
    outer_bias: Tensor | None
    chunk: int

    @property
    def tensors(self) -> list[Tensor]:
        """Return all weights and biases, for autograd to see."""
        return [*self.inner, *self.inner_biases, self.outer, *([] if self.outer_bias is None else [self.outer_bias])]

    def chunks(self, x: Tensor) -> Iterator[slice]:
        """Yield slices that divide the rows of x."""
        return (slice(i, i + self.chunk) for i in range(0, len(x), self.chunk))

    def before(self, x: Tensor) -> list[Tensor]:
        """Return the products of the rows x, without a graph: the arguments of `function`, its gate last."""
        pairs = zip_longest(self.inner, self.inner_biases)
        return [F.linear(x, w.detach(), b if b is None else b.detach()) for w, b in pairs]

    def after(self, hidden: Tensor, out: Tensor) -> None:
        """Write the product of hidden rows with the outer weight, and its bias, to `out`."""
        if self.outer_bias is None:
            torch.mm(hidden, self.outer.t(), out=out)
        else:
            torch.addmm(self.outer_bias, hidden, self.outer.t(), out=out)

    def gradients(self, x: Tensor, gradient: Tensor, dx: Tensor, adds: Sequence[AddPart]) -> list[Tensor]:
        """Compute the gradients of one chunk from its rows x and the `gradient` of its results: write the gradient
        of x to `dx`, add the weights' by `adds`, one each, inner ones first; return the gradients of inner products."""
        *inner, outer = adds
        with torch.enable_grad():
            products = [h.requires_grad_() for h in self.before(x)]
            hidden = self.function(*reversed(products))
        outer(lambda into, fresh: add_product(into, gradient.t(), hidden.detach(), fresh))
        found = torch.autograd.grad(hidden, products, gradient @ self.outer)
        for i, (w, g, add) in enumerate(zip(self.inner, found, inner, strict=True)):
            torch.mm(g, w, out=dx) if i == 0 else dx.addmm_(g, w)
            add(lambda into, fresh, g=g: add_product(into, g.t(), x, fresh))  # type: ignore[misc]
        return list(found)


class _ByChunks(torch.autograd.Function):
    """Autograd function of `HiddenRows`, which saves the rows alone. It adds the gradients of weights and biases, which
    are leaves, to their sums."""

    @staticmethod
    def forward(ctx, layer: HiddenRows, x: Tensor, *tensors: Tensor):
        """Return the results [rows, out] of the rows x."""
        ctx.layer = layer
        ctx.save_for_backward(x)
        out = x.new_empty(len(x), len(layer.outer))
        for at in layer.chunks(x):
            layer.after(layer.function(*reversed(layer.before(x[at]))), out[at])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        """Return the gradient of the rows, chunk by chunk."""
        (x,), layer = ctx.saved_tensors, ctx.layer
        gradient, dx = gradient.contiguous(), torch.empty_like(x)
        with ExitStack() as stack:
            adds = [stack.enter_context(in_parts(w)) for w in (*layer.inner, layer.outer)]
            sums = [torch.zeros_like(b) for b in layer.inner_biases]
            for at in layer.chunks(x):
                for total, g in zip(sums, layer.gradients(x[at], gradient[at], dx[at], adds), strict=False):
                    total += g.sum(0)
        for b, total in zip(layer.inner_biases, sums, strict=True):
            add_total(b, lambda dtype, total=total: total.to(dtype))
        if layer.outer_bias is not None:
            add_total(layer.outer_bias, lambda dtype: gradient.sum(0, dtype=dtype))
        return None, dx, *(None for _ in layer.tensors)


def by_chunks(layer: HiddenRows, x: Tensor) -> Tensor:
    """Return the results [..., out] of a layer for the rows x [..., in]."""
    rows = x.flatten(0, -2)
    return _ByChunks.apply(layer, rows, *layer.tensors).view(*x.shape[:-1], -1)

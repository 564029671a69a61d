"""Products of planned einsums in 8 bits: `ScaledEinsums` multiplies local tensors of named dims, each quantised along
the dims that the product contracts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from platform.plan.operation_plan import Einsum
from platform.plan.quantisation import ROLES, Quantisation, ScaledProducts, arrange_product, contracted_dims
from platform.runtime.communicator import Communicator
from platform.runtime.conversion import is_absent_block
from platform.runtime.eight_bits import ScaledMatrix, find_tile_maxima, multiply_scaled, quantise_matrices
from platform.runtime.products import local_einsum_function
from platform.runtime.statistics import max_over_ranks, widen_dtype

Dims = tuple[str, ...]


def arrange_as_matrices(x: Tensor, dims: Dims, shared: Dims, contracted: Dims, how: Quantisation) -> Tensor:
    """Return x as matrices [shared, other dims, contracted dims] to be quantised along their rows. Where blocks have
    scales, each sequence of a batch begins one."""
    extents = dict(zip(dims, x.shape, strict=True))
    rows = [d for d in dims if d not in shared and d not in contracted]
    turned = x.permute([dims.index(d) for d in (*shared, *rows, *contracted)])
    if contracted[0] == "batch" != contracted[-1] and how.tiles[0][1]:
        turned = F.pad(turned, (0, -extents[contracted[-1]] % how.block))
    inner = prod(turned.shape[len(shared) + len(rows) :])
    return turned.reshape(prod(extents[d] for d in shared), prod(extents[d] for d in rows), inner)


@cache
def _find_plain_function(x: Dims, weight: Dims, out: Dims, product: str) -> Callable[..., Tensor]:
    """Return the function of a `product` of an einsum in the compute type, as `local_einsum_function` has it."""
    return local_einsum_function(*arrange_product(x, weight, out, product))


class ScaledEinsums:
    """Products of a group of einsums in one pass, each operand of which is quantised once. `communicator`: takes
    maxima over ranks, as planned."""

    def __init__(self, communicator: Communicator):
        """Begin the products in 8 bits of a pass; none of their operands are quantised yet."""
        self._communicator = communicator
        self._operands: dict[tuple, tuple[Tensor, ScaledMatrix]] = {}  # beside each the tensor, so that no id is reused

    def find_function(self, e: Einsum, product: str) -> Callable[..., Tensor]:
        """Return the function of a `product` of the einsum e, in 8 bits or as `local_einsum_function` has it."""
        if e.scaled is None or product not in e.scaled.products:
            return _find_plain_function(e.x_dims, e.dims, e.out_dims, product)
        dims = arrange_product(e.x_dims, e.dims, e.out_dims, product)
        return partial(self._multiply, e.scaled, product, dims)

    def _multiply(
        self, scaled: ScaledProducts, product: str, dims: tuple[Dims, Dims, Dims], x: Tensor, y: Tensor,
        bias: Tensor | None = None, into: Tensor | None = None, fresh: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return a product in 8 bits of x and y, with the `bias` or added to `into`, as `local_einsum_function`."""
        if is_absent_block(x):
            return x + y if into is None else into
        a, b, out = dims
        extents = dict(zip((*a, *b), (*x.shape, *y.shape), strict=True))
        contracted, shared = contracted_dims(a, b, out), tuple(d for d in a if d in b and d in out)
        left, right = (self._quantise(scaled, product, n, t, dims[n], shared, contracted) for n, t in enumerate((x, y)))
        left, right = (m if shared else m.drop_stack() for m in (left, right))
        if bias is None and next(d for d in out if d not in shared) in b:  # as gradients of weights lie
            (left, a), (right, b) = (right, b), (left, a)
        z = multiply_scaled(left, right, x.dtype if into is None else into.dtype, scaled.how.powers)
        z = z if bias is None else z + (bias.reshape(-1) if not shared else bias.reshape(z.shape[0], 1, -1))
        order = [*shared, *(d for d in (*a, *b) if d in out and d not in shared)]
        z = z.view([extents[d] for d in order]).permute([order.index(d) for d in out])
        if into is None:
            return z.contiguous()
        return into.copy_(z) if fresh else into.add_(z)

    def round_rows(self, e: Einsum, product: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the operands of a product of rows of several experts, as the numbers that they are in 8 bits if so
        planned: no kernel multiplies these here."""
        if e.scaled is None or product not in e.scaled.products or is_absent_block(x):
            return x, y
        dims = arrange_product(e.x_dims, e.dims, e.out_dims, product)
        contracted, rounded = contracted_dims(*dims), list[Tensor]()
        for n, (t, names) in enumerate(zip((x, y), dims, strict=False)):
            shared = tuple(d for d in names if d == "experts")
            numbers = self._quantise(e.scaled, product, n, t, names, shared, contracted).decode(widen_dtype(t).dtype)
            order = [*shared, *(d for d in names if d not in (*shared, *contracted)), *contracted]
            numbers = numbers.view([t.shape[names.index(d)] for d in order]).permute([order.index(d) for d in names])
            rounded.append(numbers.to(t.dtype).contiguous())
        return rounded[0], rounded[1]

    def _quantise(
        self, scaled: ScaledProducts, product: str, number: int, x: Tensor, dims: Dims, shared: Dims, contracted: Dims
    ) -> ScaledMatrix:
        """Return operand `number` of a product as matrices in 8 bits, as an earlier product of the pass has made it."""
        how, role, axes = scaled.how, ROLES[product][number], scaled.axes_of_maximum(product, number)
        key = id(x), shared, contracted
        if key not in self._operands:
            operand = x if get_proxy_mode() is None else torch.ops.platform.operand(x)
            matrices, tile = arrange_as_matrices(operand, dims, shared, contracted, how), how.tiles[role == "weight"]
            maxima = max_over_ranks(self._communicator, find_tile_maxima(matrices, tile), axes)
            form = how.gradients if role == "gradient" else "e4m3"
            self._operands[key] = x, quantise_matrices(matrices, tile, form, how.powers, maxima)
        return self._operands[key][1]

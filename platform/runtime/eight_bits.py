"""Matrices in 8 bits: values in e4m3 or e5m2 with a scale for each tile, and their products, by a kernel or emulated.

`ScaledEinsums` multiplies local tensors of named dims, each quantised along the dims that the product contracts.
Scales of blocks are DeepSeek-V3's (2024, section 3.3.2), equal to torchao's; as powers of two they are rounded up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from platform.plan.operation_plan import Einsum
from platform.plan.quantisation import (
    LEAST_MAXIMUM,
    ROLES,
    Quantisation,
    ScaledProducts,
    Tile,
    arrange_product,
    contracted_dims,
)
from platform.runtime.communicator import Communicator
from platform.runtime.conversion import is_absent_block
from platform.runtime.products import local_einsum_function
from platform.runtime.statistics import max_over_ranks, widen_dtype

FORMS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LEAST_EXPONENT, MOST_EXPONENT = -127, 127  # of a scale that is a power of two, which e8m0 holds
MANTISSA, EXPONENT_OF_ONE = 52, 1023  # bits of a number in fp64; how it stores the exponent 0
KERNEL_SIDE = 16  # by which the kernel wants the sides of its matrices to divide

Dims = tuple[str, ...]


class ScaledMatrix(NamedTuple):
    """Matrices [.., rows, columns] in 8 bits: the numbers are `values` times the fp32 `scales`, one for each of the
    tiles of extents `tile`, whose last ones may be shorter; an extent of 0 is the whole side."""

    values: Tensor
    scales: Tensor
    tile: Tile

    def drop_stack(self) -> ScaledMatrix:
        """Return the only one of these matrices in 8 bits as [rows, columns]."""
        return ScaledMatrix(self.values[0], self.scales[0], self.tile)

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers that matrices in 8 bits stand for, in `dtype`."""
        rows, columns = self.values.shape[-2:]
        numbers = self.values.to(dtype)
        if not numbers.numel():
            return numbers
        tiles = _view_as_tiles(numbers, self.tile).mul_(self.scales[..., :, None, :, None])
        return tiles.flatten(-4, -3).flatten(-2)[..., :rows, :columns]


def _view_as_tiles(x: Tensor, tile: Tile) -> Tensor:
    """Return matrices in 8 bits, or to be so, as [.., tiles, rows, tiles, columns]: with zeros to whole tiles."""
    *stack, rows, columns = x.shape
    # a single tile needs no zeros
    tall, wide = (min(extent or n, n) or 1 for extent, n in zip(tile, (rows, columns), strict=True))
    if rows % tall or columns % wide:
        x = F.pad(x, (0, -columns % wide, 0, -rows % tall))
    return x.reshape(*stack, x.shape[-2] // tall, tall, x.shape[-1] // wide, wide)


def find_tile_maxima(x: Tensor, tile: Tile) -> Tensor:
    """Return the largest absolute value of each tile of the matrices x [.., rows, columns], to scale 8 bits by."""
    if not x.numel():
        shape = (1 if whole == 0 else -(-n // whole) for n, whole in zip(x.shape[-2:], tile, strict=True))
        return widen_dtype(x.new_zeros(*x.shape[:-2], *shape))
    tiles = _view_as_tiles(x, tile)
    return widen_dtype(torch.maximum(tiles.amax((-3, -1)), -tiles.amin((-3, -1))))


def choose_factors(maxima: Tensor, largest: float, powers: bool) -> Tensor:
    """Return what numbers are multiplied by to be rounded to 8 bits of at most `largest`, fp32; no number for a tile
    with one that is not finite. `powers`: the largest power of two that fits."""
    wide = maxima.double()
    if not powers:
        return (largest / wide.clamp(min=LEAST_MAXIMUM)).float()
    # by its bits: what torch's compiler makes of frexp on a CPU is no C++
    exponent = ((largest / wide).view(torch.int64) >> MANTISSA) - EXPONENT_OF_ONE
    exponent = torch.where(wide > 0, exponent, MOST_EXPONENT).clamp(LEAST_EXPONENT, MOST_EXPONENT)
    factors = torch.ldexp(torch.ones_like(wide), exponent).float()
    return factors.masked_fill(~wide.isfinite(), torch.nan)


def quantise_matrices(x: Tensor, tile: Tile, form: str, powers: bool, maxima: Tensor | None = None) -> ScaledMatrix:
    """Return matrices x [.., rows, columns] in 8 bits of a `form`, e4m3 or e5m2, with a scale for each tile. `maxima`:
    of the tiles, if other ranks have parts of these."""
    dtype = FORMS[form]
    if not x.numel():
        return ScaledMatrix(x.to(dtype), find_tile_maxima(x, tile), tile)
    maxima = find_tile_maxima(x, tile) if maxima is None else maxima
    factors = choose_factors(maxima, torch.finfo(dtype).max, powers)
    return ScaledMatrix(round_tiles(x, tile, factors, dtype), 1 / factors, tile)


def round_tiles(x: Tensor, tile: Tile, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return matrices x [.., rows, columns] times the factor of each tile, rounded to 8 bits of a `dtype`."""
    largest, (rows, columns) = torch.finfo(dtype).max, x.shape[-2:]
    scaled = _view_as_tiles(x, tile) * factors[..., :, None, :, None]  # in fp32, or wider as x is
    # row after row, as kernels read them: what came column by column would be turned by a kernel of its own
    values = scaled.clamp_(-largest, largest).to(dtype, memory_format=torch.contiguous_format)
    values = values.flatten(-4, -3).flatten(-2)
    return values[..., :rows, :columns]


def multiply_scaled(a: ScaledMatrix, b: ScaledMatrix, dtype: torch.dtype, powers: bool) -> Tensor:
    """Return the products, in `dtype`, of matrices in 8 bits a [.., rows, k] and b [.., columns, k]."""
    if has_scaled_kernel(a, b, dtype):
        return multiply_by_kernel(a, b, dtype)
    # times a power of two, values fit in the compute type as they are
    exact = dtype if powers else torch.promote_types(dtype, torch.float32)
    return torch.matmul(a.decode(exact), b.decode(exact).mT).to(dtype)


def has_scaled_kernel(a: ScaledMatrix, b: ScaledMatrix, dtype: torch.dtype) -> bool:
    """Return True if one kernel multiplies two matrices in 8 bits: on GPUs, where a matrix or a row has one scale."""
    is_plain = a.values.dim() == 2 and not (a.tile[1] or b.tile[1]) and a.tile == b.tile
    aligned = not any(n % KERNEL_SIDE for n in (*a.values.shape, *b.values.shape))
    if not (is_plain and aligned and dtype in (torch.bfloat16, torch.float32)):
        return False
    return find_capability(a.values.device) >= ((9, 0) if a.tile[0] else (8, 9))


def find_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, which decides what it multiplies in 8 bits; (0, 0) of a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def multiply_by_kernel(a: ScaledMatrix, b: ScaledMatrix, dtype: torch.dtype) -> Tensor:
    """Return the product of two matrices in 8 bits by torch's kernel, which takes scales of whole matrices or rows."""
    scales = (a.scales.contiguous(), b.scales.t().contiguous()) if a.tile[0] else (a.scales[0, 0], b.scales[0, 0])
    # of rows, the one type that it writes on GPUs
    narrow = torch.bfloat16 if a.tile[0] and a.values.device.type != "cpu" else dtype
    return torch._scaled_mm(a.values, b.values.t(), *scales, out_dtype=narrow).to(dtype)


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

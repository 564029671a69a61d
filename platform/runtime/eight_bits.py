"""Matrices in 8 bits: values in e4m3 or e5m2 with a scale for each tile, and their products, by a kernel or emulated.

Scales of blocks are DeepSeek-V3's (2024, section 3.3.2), equal to torchao's; as powers of two they are rounded up.
Kernels are cuBLAS's, by `torch.nn.functional.scaled_mm`; `platform.plan.quantisation` says which GPU has which.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from platform.plan.quantisation import LEAST_MAXIMUM, MX_BLOCK, Tile, Version, find_scaled_kernel
from platform.runtime.statistics import widen_dtype

FORMS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LEAST_EXPONENT, MOST_EXPONENT = -127, 127  # of a scale that is a power of two, which e8m0 holds
MANTISSA, EXPONENT_OF_ONE = 52, 1023  # bits of a number in fp64; how it stores the exponent 0
SCALE_MANTISSA = 23  # bits of a number in fp32
KERNEL_SIDE = 16  # by which kernels want the sides of their matrices to divide
# Scales that kernels read at once: so many along k, and of MX of four times 32 rows
SCALES_ALONG_K, SCALE_GROUPS, SCALE_LANES = 4, 4, 32

BLOCKS = (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
_LIBRARY = torch.library.Library("platform", "FRAGMENT")
_LIBRARY.define(
    "multiply_scaled(Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, int[] scalings, ScalarType dtype) -> Tensor"
)


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
    if scalings := choose_scalings(a, b, dtype, powers):
        return multiply_by_kernel(a, b, dtype, scalings)
    # times a power of two, values fit in the compute type as they are
    exact = dtype if powers else torch.promote_types(dtype, torch.float32)
    return torch.matmul(a.decode(exact), b.decode(exact).mT).to(dtype)


def choose_scalings(a: ScaledMatrix, b: ScaledMatrix, dtype: torch.dtype, powers: bool) -> list[ScalingType] | None:
    """Return how a kernel of this GPU takes the scales of two matrices in 8 bits; None if it has none for them."""
    kernel = find_scaled_kernel((a.tile, b.tile), powers, find_capability(a.values.device))
    if kernel is None or find_cuda_version() < kernel.cuda or dtype not in (torch.bfloat16, torch.float32):
        return None
    scalings = [getattr(ScalingType, kernel.scalings[m.tile]) for m in (a, b)]
    # a kernel reads whole tiles, and blocks of weights beside rows of something else
    fits = all(n % max(KERNEL_SIDE, e) == 0 for m in (a, b) for n, e in zip(m.values.shape[-2:], m.tile, strict=True))
    fits &= scalings != [ScalingType.BlockWise128x128] * 2
    e4m3 = {a.values.dtype, b.values.dtype} == {torch.float8_e4m3fn}
    return scalings if fits and (e4m3 or not a.tile[1]) else None


def find_capability(device: torch.device) -> Version:
    """Return the compute capability of a GPU, which decides what it multiplies in 8 bits; (0, 0) of a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@cache
def find_cuda_version() -> Version:
    """Return the version of CUDA that torch is built with; (0, 0) without."""
    major, minor = (torch.version.cuda or "0.0").split(".")[:2]
    return int(major), int(minor)


def multiply_by_kernel(a: ScaledMatrix, b: ScaledMatrix, dtype: torch.dtype, scalings: list[ScalingType]) -> Tensor:
    """Return the products, in `dtype`, of matrices in 8 bits by a kernel, which takes their scales as `scalings`."""
    # of rows, the one type that it writes on GPUs
    narrow = torch.bfloat16 if ScalingType.RowWise in scalings and a.values.device.type != "cpu" else dtype
    scales = [arrange_scales(m, scaling) for m, scaling in zip((a, b), scalings, strict=True)]
    chosen = [scaling.value for scaling in scalings]
    return torch.ops.platform.multiply_scaled(a.values, b.values, *scales, chosen, narrow).to(dtype)


def arrange_scales(m: ScaledMatrix, scaling: ScalingType) -> Tensor:
    """Return the scales of matrices in 8 bits in the order of memory in which a kernel reads them (cuBLAS, "1D and 2D
    block scaling"): those along k row by row of another block, to four of them; of MX bytes of e8m0, in tiles."""
    if scaling == ScalingType.BlockWise1x128:
        return m.scales.mT.contiguous()
    if scaling == ScalingType.BlockWise128x128:
        return F.pad(m.scales, (0, -m.scales.shape[-1] % SCALES_ALONG_K))
    if scaling != ScalingType.BlockWise1x32:
        return m.scales
    *stack, rows, columns = m.scales.shape
    repeats = m.tile[0], m.tile[1] // MX_BLOCK
    exponents = (m.scales.view(torch.int32) >> SCALE_MANTISSA).to(torch.uint8)  # of a power of two: its e8m0
    exponents = exponents[..., :, None, :, None].expand(*stack, rows, repeats[0], columns, repeats[1])
    exponents = exponents.flatten(-4, -3).flatten(-2)
    high, wide = SCALE_GROUPS * SCALE_LANES, SCALES_ALONG_K
    exponents = F.pad(exponents, (0, -exponents.shape[-1] % wide, 0, -exponents.shape[-2] % high))
    tiles = exponents.reshape(
        *stack, exponents.shape[-2] // high, SCALE_GROUPS, SCALE_LANES, exponents.shape[-1] // wide, wide
    )
    return tiles.transpose(-4, -2).flatten(-5)


def _multiply(a, b, a_scales, b_scales, scalings, dtype):
    """Return products of matrices in 8 bits, one after another, by torch's kernel; scales as `arrange_scales` has."""
    if a.dim() > 2:
        stacks = zip(a, b, a_scales, b_scales, strict=True)
        return torch.stack([_multiply(*matrices, scalings, dtype) for matrices in stacks])
    left, right = map(ScalingType, scalings)
    if left == ScalingType.BlockWise1x32:
        a_scales, b_scales = (scales.view(torch.float8_e8m0fnu) for scales in (a_scales, b_scales))
    else:
        a_scales, b_scales = a_scales.t() if left in BLOCKS else a_scales, b_scales.t()
    swizzle = SwizzleType.SWIZZLE_32_4_4 if left == ScalingType.BlockWise1x32 else SwizzleType.NO_SWIZZLE
    return F.scaled_mm(a, b.t(), a_scales, left, b_scales, right, swizzle, swizzle, output_dtype=dtype)


def _multiply_fake(a, b, a_scales, b_scales, scalings, dtype):
    """Return tensors without numbers in the place of products of matrices in 8 bits."""
    return a.new_empty(*a.shape[:-1], b.shape[-2], dtype=dtype)


_LIBRARY.impl("multiply_scaled", _multiply, "CompositeExplicitAutograd")
torch.library.register_fake("platform::multiply_scaled", _multiply_fake, lib=_LIBRARY)

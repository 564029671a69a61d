"""Residual connections, x + dropout(y), with the norm of the sum, and the random numbers of dropout, jitter and initial
values. One function computes a connection each way, for compilation: one kernel reads x and y and writes both results.

The masks and factors of dropout and jitter are functions of keys and global elements: drawn in the forward pass, and
again in the backward pass, so that nothing is saved.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from platform.runtime.statistics import widen_dtype

# Random numbers as a pure function of (key, element): the same under every layout, microbatch and replica count.
#
# `key_` is an int from `derive_key`, which names the tensor drawn; an element is its global number in that tensor.

# elements drawn at once, so that initialisation needs little memory beyond the block, and on a GPU few launches
_SEEDING = Lock()  # torch's generators are the process's
RANDOM_DRAWN_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 22, "meta": 1 << 22}


def derive_key(*parts: object) -> int:
    """Derive the signed 64-bit key of a stream of random numbers from printable parts, such as (seed, "init", name)."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big", signed=True)


def _wrap_int64(number: int) -> int:
    """Return an integer as int64 tensors hold it: its last 64 bits, signed."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


_GOLDEN, _MIX1, _MIX2 = (_wrap_int64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def random_bits(key_: int, elements: Tensor) -> Tensor:
    """Generate 64 random bits (int64) per int64 element number by SplitMix64 (Steele, Lea, Flood 2014), counter-based:
    a pure function of the stream's key `key_` (see `derive_key`) and the element."""
    return _mix_bits_(elements * _GOLDEN + key_)


def _mix_bits_(z: Tensor) -> Tensor:
    """Turn SplitMix64's int64 states z, in place, into 64 random bits each; return z."""
    for shift, low, factor in ((30, 0x3FFFFFFFF, _MIX1), (27, 0x1FFFFFFFFF, _MIX2), (31, 0x1FFFFFFFF, 1)):
        z ^= (z >> shift).bitwise_and_(low)  # which makes the arithmetic shift of int64 a logical one
        if factor != 1:
            z *= factor
    return z


def element_numbers(
    block: Sequence[tuple[int, int]], strides: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """Compute the global element numbers of a block, int64 [extents of the block]: the sum of global index x stride
    over the dims. They are the counters from which random numbers are drawn.

    `block`: (offset, extent) per dim in the global tensor, whose `strides` are given in elements.
    """
    out = torch.zeros((), dtype=torch.int64, device=device)
    for (offset, extent), stride in zip(block, strides, strict=True):
        out = out.unsqueeze(-1) + torch.arange(offset, offset + extent, device=device) * stride
    return out


def random_counters(dim_positions: Sequence[Tensor], strides: Sequence[int]) -> list[Tensor]:
    """Return the counters from which a block's random numbers are drawn: one int64 tensor per dim, shaped to broadcast
    against the block, whose sum plus `start` is the state of SplitMix64 at every element; `dim_positions`: the global
    positions along each dim of the block, int64; `strides` as in `element_numbers`. They are the same in every step."""
    broadcast_states = []
    for i, (positions, stride) in enumerate(zip(dim_positions, strides, strict=True)):
        states = positions * _wrap_int64(stride * _GOLDEN)
        broadcast_states.append(states.view([len(positions) if j == i else 1 for j in range(len(dim_positions))]))
    return broadcast_states


def random_start(key_: int, first_element: int, device: torch.device | str) -> Tensor:
    """Return the offset to add to the counters of a block (`random_counters`), an int64 scalar tensor: the stream's key
    `key_`, and `first_element`, by which all element numbers are larger. A tensor, so that compiled code takes it as an
    argument."""
    return torch.full((), _wrap_int64(first_element * _GOLDEN + key_), dtype=torch.int64, device=device)


def random_starts(streams: Sequence[tuple[int, int]], device: torch.device) -> Sequence[Tensor]:
    """Return the `random_start` of each of the `streams`, (key, first element), sent to the device together."""
    # 16 bytes apart, as compiled code wants its arguments
    numbers = [(_wrap_int64(first * _GOLDEN + key), 0) for key, first in streams]
    on_host = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)[:, 0].unbind()


def draw_dropout_mask(counters: Sequence[Tensor], start: Tensor, rate: float) -> Tensor:
    """Draw the dropout mask of a block from `counters` and `start`, by half of each element's `random_bits`: True
    (kept) with probability 1 - `rate`."""
    return _random_halves(counters, start) >= int(rate * 2**32)


def draw_uniform(counters: Sequence[Tensor], start: Tensor) -> Tensor:
    """Draw an fp64 number of a block in [0, 1) from `counters` and `start`, by half of each element's `random_bits`."""
    return _random_halves(counters, start).double().mul_(2.0**-32)


def _random_halves(counters: Sequence[Tensor], start: Tensor) -> Tensor:
    """Return half of the random bits of each element of a block, int64 in [0, 2^32)."""
    z = start
    for states in counters:
        z = z + states
    return _mix_bits_(z).bitwise_and_(0xFFFFFFFF)


@contextmanager
def use_random_key(key_: int, device: torch.device) -> Iterator[None]:
    """Make torch's own kernels on `device` draw from the stream `key_` within the context, and leave torch's generators
    as they were. Their draws depend on the kernel and on the shape too."""
    with _SEEDING, torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(key_)
        yield


_ONE, _ROOT_HALF = 0x3FF0000000000000, 0x3FE6A09E667F3BCD  # fp64 as integers: 1 and sqrt(1/2)
_LN2 = 0.6931471805599453
_ATANH = tuple(1 / n for n in range(1, 23, 2))  # to 1e-19 where |x| < 0.172
_SINE = tuple((-1) ** (n // 2) / math.factorial(n) for n in range(1, 23, 2))  # to 2e-18 where |x| <= pi / 2


def _evaluate_odd_polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Evaluate the odd polynomial c0 x + c1 x^3 + c2 x^5 + ... of fp64 x, each product and sum rounded separately."""
    square = x * x
    total = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total.mul_(square).add_(c)
    return total.mul_(x)


def _square_root(x: Tensor) -> Tensor:
    """Compute sqrt(x) of positive fp64 x to the last digit or two by Heron's rule: four steps from half the exponent,
    within 6 %. Its bits are the same on every processor, which torch.sqrt does not promise."""
    root = (x.view(torch.int64) >> 1).add_(_ONE >> 1).view(torch.float64)
    for _ in range(4):
        root.add_(x / root).mul_(0.5)
    return root


def draw_normal(key_: int, elements_: Tensor) -> Tensor:
    """Draw an fp64 standard normal per global element number in `elements_`, a pure function of the stream's key `key_`
    and the element: sqrt(-2 ln u) cos(2 pi v) of two uniform numbers (Box, Muller 1958).

    Uses only integers and +, -, x and /, which IEEE 754 rounds correctly, so that the bits do not depend on the
    processor or on the place in a tensor. torch's log, cos and sqrt may: they are MKL's, with kernels per processor.
    """
    z = random_bits(key_, elements_)
    u = ((z >> 32) & 0xFFFFFFFF).double().add_(0.5).mul_(2.0**-32).view(torch.int64)
    u += _ONE - _ROOT_HALF
    exponent = (u >> 52).sub_(_ONE >> 52).double()
    mantissa = (u & ((1 << 52) - 1)).add_(_ROOT_HALF).view(torch.float64)  # in [sqrt(1/2), sqrt(2))
    ratio = (mantissa - 1).div_(mantissa + 1)  # ln mantissa = 2 atanh(ratio)
    square = exponent.mul_(-2 * _LN2).sub_(_evaluate_odd_polynomial(ratio, _ATANH).mul_(4))  # -2 ln u
    v = (z & 0xFFFFFFFF).sub_(1 << 31).abs_().sub_(1 << 30)  # cos is even: sine of a quarter turn less
    return _square_root(square).mul_(_evaluate_odd_polynomial(v.double().mul_(2 * math.pi * 2.0**-32), _SINE))


def draw_centred(key_: int, elements_: Tensor) -> Tensor:
    """Draw what `draw_normal` does, but an fp64 uniform number of mean 0 and deviation 1 per element."""
    halves = (random_bits(key_, elements_) >> 32).bitwise_and_(0xFFFFFFFF)
    return halves.double().add_(0.5 - 2.0**31).mul_(2.0**-31 * math.sqrt(3))


DRAWS = {"normal": draw_normal, "uniform": draw_centred}  # initial values by name


@torch.no_grad()
def fill_normal_(
    out: Tensor,
    key_: int,
    std: float,
    block: Sequence[tuple[int, int]],
    shape: Sequence[int],
    draw: Callable[[int, Tensor], Tensor] = draw_normal,
) -> None:
    """Fill `out`, a rank's block of a tensor of global `shape`, with normal numbers of mean 0 and deviation `std`, or
    what else `draw` gives; elements beyond `shape` (padding) become zero. A value depends on `key_` (the tensor's key,
    see `derive_key`) and its global position alone, so that a parameter starts alike under every plan. `block`:
    (offset, extent) of `out` per dim."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    row = max(1, math.prod(out.shape[1:]))
    rows = max(1, RANDOM_DRAWN_AT_ONCE[out.device.type] // row)
    offset, extent = block[0]
    for first in range(0, extent, rows):
        n = min(rows, extent - first)
        part = [(offset + first, n), *block[1:]]
        values = draw(key_, element_numbers(part, strides, out.device)).mul_(std)
        for dim, ((start, count), size) in enumerate(zip(part, shape, strict=True)):
            if start + count > size:
                values.narrow(dim, max(size - start, 0), count - max(size - start, 0)).zero_()
        out[first : first + n].copy_(values)


DRAWN_AT_ONCE = {"cpu": 1 << 15}  # elements whose integers stay in a core's cache
_MOST_AT_ONCE = 1 << 25  # on other devices, whose kernels take long to launch: half a GB of integers


class Drawing(NamedTuple):
    """Source of the mask of one dropout: `counters` and `start` as `random_counters` and `random_start` return them,
    and the `rate`, the probability that an element is dropped."""

    counters: Sequence[Tensor]
    start: Tensor
    rate: float


# `drop_elements`, `apply_draw_in_pieces`, or one of them compiled
Draw = Callable[[Tensor, Sequence[Tensor], Tensor, float], Tensor]


def drop_elements(x: Tensor, counters: Sequence[Tensor], start: Tensor, rate: float) -> Tensor:
    """Return dropout of the tensor x: dropped elements are 0, the others are scaled by 1 / (1 - rate)."""
    # The mask of `draw_dropout_mask`, by 32 bits: torch takes what is 8 times as small as its argument for a sum, which
    # a compiled block would keep in place of drawing it again.
    low = (_random_halves(counters, start) - 2**31).to(torch.int32)
    return torch.where(low >= int(rate * 2**32) - 2**31, x * (1 / (1 - rate)), 0)


def jitter_elements(x: Tensor, counters: Sequence[Tensor], start: Tensor, rate: float) -> Tensor:
    """Return the tensor x, each element times a uniform number in [1 - rate, 1 + rate) (Fedus et al. 2021)."""
    return draw_uniform(counters, start).mul_(2 * rate).add_(1 - rate).mul_(x).to(x.dtype)


def apply_draw_in_pieces(
    x: Tensor, counters: Sequence[Tensor], start: Tensor, rate: float, draw: Draw | None = None
) -> Tensor:
    """Return what `draw` makes of the tensor x, by default dropout, piece by piece, so that the random integers fit the
    cache."""
    out = torch.empty_like(x)
    for where in tile_pieces(x.shape, DRAWN_AT_ONCE.get(x.device.type, _MOST_AT_ONCE)):
        part, target, states = x, out, list(counters)
        for dim, (first, n) in enumerate(where):
            part, target = part.narrow(dim, first, n), target.narrow(dim, first, n)
            states[dim] = states[dim].narrow(dim, first, n)
        if draw:
            target.copy_(draw(part, states, start, rate))
        else:
            target.copy_(part).masked_fill_(~draw_dropout_mask(states, start, rate), 0).mul_(1 / (1 - rate))
    return out


def tile_pieces(shape: Sequence[int], max_elements: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield pieces of a rank's block of this `shape`, in which random numbers are drawn, as (offset, extent) along the
    leading dims that are cut; each has at most `max_elements` elements, or is a single one."""
    if prod(shape) <= max_elements or not shape:
        yield ()
        return
    rows = max(1, max_elements // prod(shape[1:]))
    for first in range(0, shape[0], rows):
        n = min(rows, shape[0] - first)
        for inner_piece in tile_pieces(shape[1:], max_elements // n):
            yield ((first, n), *inner_piece)


class _Dropout(torch.autograd.Function):
    """Product of x with random numbers by `draw`, whose backward pass draws them again for the gradient."""

    @staticmethod
    def forward(ctx, x, drawing, draw):
        """Apply dropout to x by `draw`; keep what the mask is drawn from, not the mask."""
        ctx.drawing, ctx.draw = drawing, draw
        return draw(x.detach(), *drawing)

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradient of x: dropout of `gradient` by the same mask, drawn again."""
        return ctx.draw(gradient, *ctx.drawing), None, None


def apply_jitter(x: Tensor, drawing: Drawing) -> Tensor:
    """Apply `jitter_elements` to x, a local block; nothing is saved for the backward pass."""
    return _Dropout.apply(x, drawing, partial(apply_draw_in_pieces, draw=jitter_elements))


def apply_dropout(x: Tensor, drawing: Drawing, draw: Draw) -> Tensor:
    """Apply dropout to x, a local block, by `draw`; nothing is saved for the backward pass."""
    return _Dropout.apply(x, drawing, draw)


Region = Callable[
    [Callable[..., Any]], Callable[..., Any]
]  # wraps a pure function: `platform.runtime.compilation.compile_region`


def _add_residual(x: Tensor, y: Tensor, drawing: Drawing | None) -> Tensor:
    """Return the residual sum x + dropout(y) of two local activations; no dropout without a `drawing`."""
    return x + (y if drawing is None else drop_elements(y, *drawing))


def _sum_and_norm(
    x: Tensor, y: Tensor, gain: Tensor, bias: Tensor | None, drawing: Drawing | None, centred: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return the residual sum, its norm over the last dim, and the statistics of each row that the gradient needs: the
    mean (of a LayerNorm, which is `centred`) and 1 / deviation."""
    total = _add_residual(x, y, drawing)
    wide = widen_dtype(total)
    mean = wide.mean(-1, keepdim=True) if centred else None
    wide = wide if mean is None else wide - mean
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out = wide * rstd * gain
    return total, (out if bias is None else out + bias).to(x.dtype), mean, rstd


def _sum_and_norm_gradients(
    dtotal: Tensor | None,
    dout: Tensor,
    total: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    gain: Tensor,
    biased: bool,
    drawing: Drawing | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, y, gain and bias from the gradients of the residual sum and of its norm."""
    dout, wide = widen_dtype(dout), widen_dtype(total)
    normal = (wide if mean is None else wide - mean) * rstd
    scaled = dout * gain
    inner = scaled - normal * (scaled * normal).mean(-1, keepdim=True)
    if mean is not None:
        inner = inner - scaled.mean(-1, keepdim=True)
    dx = (inner * rstd).to(total.dtype)
    dx = dx if dtotal is None else dtotal + dx
    dgain = (dout * normal).flatten(0, -2).sum(0).to(gain.dtype)
    dbias = dout.flatten(0, -2).sum(0).to(gain.dtype) if biased else None
    return dx, dx if drawing is None else drop_elements(dx, *drawing), dgain, dbias


class _ResidualSum(torch.autograd.Function):
    """Autograd function of x + dropout(y); the mask is drawn again in the backward pass."""

    @staticmethod
    def forward(ctx, x, y, drawing, region):
        """Return the residual sum x + dropout(y), keeping only what the mask is drawn from."""
        ctx.drawing, ctx.region = drawing, region
        return region(_add_residual)(x.detach(), y.detach(), drawing)

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of the residual sum: unchanged for x, by the same dropout for y."""
        return gradient, ctx.region(drop_elements)(gradient, *ctx.drawing), None, None


class _ResidualSumAndNorm(torch.autograd.Function):
    """Autograd function of a residual connection and the norm of its sum; saves the sum and two numbers per row."""

    @staticmethod
    def forward(ctx, x, y, gain, bias, drawing, centred, eps, region):
        """Return the residual sum x + dropout(y) and its norm, saving the sum and the norm's statistics."""
        ctx.set_materialize_grads(False)  # the sum is not used after a post-norm model's norm
        tensors = [t if t is None else t.detach() for t in (x, y, gain, bias)]
        total, out, mean, rstd = region(_sum_and_norm)(*tensors, drawing, centred, eps)
        ctx.save_for_backward(total, rstd, gain, *([] if mean is None else [mean]))
        ctx.drawing, ctx.region, ctx.biased = drawing, region, bias is not None
        return total, out

    @staticmethod
    def backward(ctx, dtotal, dout):
        """Return the gradients of x, y, gain and bias from the gradients of sum and norm."""
        total, rstd, gain, *mean = ctx.saved_tensors
        region, drawing = ctx.region(_sum_and_norm_gradients), ctx.drawing
        gradients = region(dtotal, dout, total, mean[0] if mean else None, rstd, gain, ctx.biased, drawing)
        return *gradients, None, None, None, None


def apply_residual(x: Tensor, y: Tensor, drawing: Drawing, region: Region) -> Tensor:
    """Return x + dropout(y), both local blocks of one shape, by functions that `region` compiles."""
    return _ResidualSum.apply(x, y, drawing, region)


def apply_residual_norm(
    x: Tensor,
    y: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    kind: str,
    eps: float,
    drawing: Drawing | None,
    region: Region,
) -> tuple[Tensor, Tensor]:
    """Return x + dropout(y) (no dropout without a `drawing`) and its LayerNorm or RMSNorm (`kind`) over the last dim,
    which is whole, by functions that `region` compiles; `eps` is added to the variance."""
    return _ResidualSumAndNorm.apply(x, y, gain, bias, drawing, kind == "layernorm", eps, region)

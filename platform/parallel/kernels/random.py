"""Random numbers as a pure function of (key, element): the same under every layout, microbatch and replica count.

`key_` is an int from `key`, which names the tensor drawn; an element is its global number in that tensor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor

# elements drawn at once, so that initialisation needs little memory beyond the block, and on a GPU few launches
_SEEDING = Lock()  # torch's generators are the process's
DRAWN_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 22, "meta": 1 << 22}


def key(*parts: object) -> int:
    """Derive the signed 64-bit key of a stream of random numbers from printable parts, such as (seed, "init", name)."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big", signed=True)


def _wrapped(number: int) -> int:
    """Return an integer as int64 tensors hold it: its last 64 bits, signed."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


_GOLDEN, _MIX1, _MIX2 = (_wrapped(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def bits(key_: int, elements: Tensor) -> Tensor:
    """Generate 64 random bits (int64) per int64 element number by SplitMix64 (Steele, Lea, Flood 2014), counter-based:
    a pure function of the stream's key `key_` (see `key`) and the element."""
    return _mix_(elements * _GOLDEN + key_)


def _mix_(z: Tensor) -> Tensor:
    """Turn SplitMix64's int64 states z, in place, into 64 random bits each; return z."""
    for shift, low, factor in ((30, 0x3FFFFFFFF, _MIX1), (27, 0x1FFFFFFFFF, _MIX2), (31, 0x1FFFFFFFF, 1)):
        z ^= (z >> shift).bitwise_and_(low)  # which makes the arithmetic shift of int64 a logical one
        if factor != 1:
            z *= factor
    return z


def elements(block: Sequence[tuple[int, int]], strides: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Compute the global element numbers of a block, int64 [extents of the block]: the sum of global index x stride
    over the dims. They are the counters from which random numbers are drawn.

    `block`: (offset, extent) per dim in the global tensor, whose `strides` are given in elements.
    """
    out = torch.zeros((), dtype=torch.int64, device=device)
    for (offset, extent), stride in zip(block, strides, strict=True):
        out = out.unsqueeze(-1) + torch.arange(offset, offset + extent, device=device) * stride
    return out


def counters(where: Sequence[Tensor], strides: Sequence[int]) -> list[Tensor]:
    """Return the counters from which a block's random numbers are drawn: one int64 tensor per dim, shaped to broadcast
    against the block, whose sum plus `start` is the state of SplitMix64 at every element; `where`: the global positions
    along each dim of the block, int64; `strides` as in `elements`. They are the same in every step."""
    found = []
    for i, (positions, stride) in enumerate(zip(where, strides, strict=True)):
        states = positions * _wrapped(stride * _GOLDEN)
        found.append(states.view([len(positions) if j == i else 1 for j in range(len(where))]))
    return found


def start(key_: int, first: int, device: torch.device | str) -> Tensor:
    """Return the offset to add to the random-number `counters` of a block, an int64 scalar tensor: the stream's key
    `key_`, and `first`, by which all element numbers are larger. A tensor, so that compiled code takes it as an
    argument."""
    return torch.full((), _wrapped(first * _GOLDEN + key_), dtype=torch.int64, device=device)


def kept(counters: Sequence[Tensor], start: Tensor, rate: float) -> Tensor:
    """Draw the dropout mask of a block from `counters` and `start`, by half of each element's `bits`: True (kept) with
    probability 1 - `rate`."""
    return _halves(counters, start) >= int(rate * 2**32)


def uniform(counters: Sequence[Tensor], start: Tensor) -> Tensor:
    """Draw an fp64 number of a block in [0, 1) from `counters` and `start`, by half of each element's `bits`."""
    return _halves(counters, start).double().mul_(2.0**-32)


def _halves(counters: Sequence[Tensor], start: Tensor) -> Tensor:
    """Return half of the random bits of each element of a block, int64 in [0, 2^32)."""
    z = start
    for states in counters:
        z = z + states
    return _mix_(z).bitwise_and_(0xFFFFFFFF)


@contextmanager
def seeded(key_: int, device: torch.device) -> Iterator[None]:
    """Make torch's own kernels on `device` draw from the stream `key_` within the context, and leave torch's generators
    as they were. Their draws depend on the kernel and on the shape too."""
    with _SEEDING, torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(key_)
        yield


_ONE, _ROOT_HALF = 0x3FF0000000000000, 0x3FE6A09E667F3BCD  # fp64 as integers: 1 and sqrt(1/2)
_LN2 = 0.6931471805599453
_ATANH = tuple(1 / n for n in range(1, 23, 2))  # to 1e-19 where |x| < 0.172
_SINE = tuple((-1) ** (n // 2) / math.factorial(n) for n in range(1, 23, 2))  # to 2e-18 where |x| <= pi / 2


def _odd(x: Tensor, coefficients: Sequence[float]) -> Tensor:
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


def normal(key_: int, elements_: Tensor) -> Tensor:
    """Draw an fp64 standard normal per global element number in `elements_`, a pure function of the stream's key `key_`
    and the element: sqrt(-2 ln u) cos(2 pi v) of two uniform numbers (Box, Muller 1958).

    Uses only integers and +, -, x and /, which IEEE 754 rounds correctly, so that the bits do not depend on the
    processor or on the place in a tensor. torch's log, cos and sqrt may: they are MKL's, with kernels per processor.
    """
    z = bits(key_, elements_)
    u = ((z >> 32) & 0xFFFFFFFF).double().add_(0.5).mul_(2.0**-32).view(torch.int64)
    u += _ONE - _ROOT_HALF
    exponent = (u >> 52).sub_(_ONE >> 52).double()
    mantissa = (u & ((1 << 52) - 1)).add_(_ROOT_HALF).view(torch.float64)  # in [sqrt(1/2), sqrt(2))
    ratio = (mantissa - 1).div_(mantissa + 1)  # ln mantissa = 2 atanh(ratio)
    square = exponent.mul_(-2 * _LN2).sub_(_odd(ratio, _ATANH).mul_(4))  # -2 ln u
    v = (z & 0xFFFFFFFF).sub_(1 << 31).abs_().sub_(1 << 30)  # cos is even: sine of a quarter turn less
    return _square_root(square).mul_(_odd(v.double().mul_(2 * math.pi * 2.0**-32), _SINE))


@torch.no_grad()
def fill_normal_(out: Tensor, key_: int, std: float, block: Sequence[tuple[int, int]], shape: Sequence[int]) -> None:
    """Fill `out`, a rank's block of a tensor of global `shape`, with normal numbers of mean 0 and deviation `std`;
    elements beyond `shape` (padding) become zero. A value depends on `key_` (the tensor's key, see `key`) and its
    global position alone, so that a parameter starts alike under every plan. `block`: (offset, extent) of `out` per
    dim."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    row = max(1, math.prod(out.shape[1:]))
    rows = max(1, DRAWN_AT_ONCE[out.device.type] // row)
    offset, extent = block[0]
    for first in range(0, extent, rows):
        n = min(rows, extent - first)
        part = [(offset + first, n), *block[1:]]
        values = normal(key_, elements(part, strides, out.device)).mul_(std)
        for dim, ((start, count), size) in enumerate(zip(part, shape, strict=True)):
            if start + count > size:
                values.narrow(dim, max(size - start, 0), count - max(size - start, 0)).zero_()
        out[first : first + n].copy_(values)

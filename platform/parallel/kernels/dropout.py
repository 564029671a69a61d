"""Dropout and jitter, whose masks and factors are functions of keys and global elements: drawn in the forward pass, and
again in the backward pass, so that nothing is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from platform.parallel.kernels import random

DRAWN_AT_ONCE = {"cpu": 1 << 15}  # elements whose integers stay in a core's cache
_MOST_AT_ONCE = 1 << 25  # on other devices, whose kernels take long to launch: half a GB of integers


class Drawing(NamedTuple):
    """Source of the mask of one dropout: `counters` and `start` of `platform.parallel.kernels.random`, and the
    `rate`, the probability that an element is dropped."""

    counters: Sequence[Tensor]
    start: Tensor
    rate: float


Draw = Callable[[Tensor, Sequence[Tensor], Tensor, float], Tensor]  # `dropped`, `in_pieces`, or one of them compiled


def dropped(x: Tensor, counters: Sequence[Tensor], start: Tensor, rate: float) -> Tensor:
    """Return dropout of the tensor x: dropped elements are 0, the others are scaled by 1 / (1 - rate)."""
    return torch.where(random.kept(counters, start, rate), x * (1 / (1 - rate)), 0)


def jittered(x: Tensor, counters: Sequence[Tensor], start: Tensor, rate: float) -> Tensor:
    """Return the tensor x, each element times a uniform number in [1 - rate, 1 + rate) (Fedus et al. 2021)."""
    return random.uniform(counters, start).mul_(2 * rate).add_(1 - rate).mul_(x).to(x.dtype)


def in_pieces(x: Tensor, counters: Sequence[Tensor], start: Tensor, rate: float, draw: Draw | None = None) -> Tensor:
    """Return what `draw` makes of the tensor x, by default dropout, piece by piece, so that the random integers fit the
    cache."""
    out = torch.empty_like(x)
    for where in pieces(x.shape, DRAWN_AT_ONCE.get(x.device.type, _MOST_AT_ONCE)):
        part, target, states = x, out, list(counters)
        for dim, (first, n) in enumerate(where):
            part, target = part.narrow(dim, first, n), target.narrow(dim, first, n)
            states[dim] = states[dim].narrow(dim, first, n)
        if draw:
            target.copy_(draw(part, states, start, rate))
        else:
            target.copy_(part).masked_fill_(~random.kept(states, start, rate), 0).mul_(1 / (1 - rate))
    return out


def pieces(shape: Sequence[int], most: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield pieces that tile a tensor of this `shape`, as (offset, extent) along the leading dims that are cut;
    each has at most `most` elements, or is a single one."""
    if prod(shape) <= most or not shape:
        yield ()
        return
    rows = max(1, most // prod(shape[1:]))
    for first in range(0, shape[0], rows):
        n = min(rows, shape[0] - first)
        for rest in pieces(shape[1:], most // n):
            yield ((first, n), *rest)


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


def jitter(x: Tensor, drawing: Drawing) -> Tensor:
    """Apply `jittered` to x, a local block; nothing is saved for the backward pass."""
    return _Dropout.apply(x, drawing, partial(in_pieces, draw=jittered))


def dropout(x: Tensor, drawing: Drawing, draw: Draw) -> Tensor:
    """Apply dropout to x, a local block, by `draw`; nothing is saved for the backward pass."""
    return _Dropout.apply(x, drawing, draw)

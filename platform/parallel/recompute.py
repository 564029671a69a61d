"""Recomputation: a stretch of the forward pass that keeps its arguments alone and runs again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.parallel.sharding.share import gather, scatter


class _Recomputed(torch.autograd.Function):
    """`restore` makes the run as it was in the forward pass (dropout depends on where in the run it is).

    All ranks of a stage run the same backward pass in the same order, so the collectives of the second forward pass are
    issued in one order on all of them.
    """

    @staticmethod
    def forward(ctx, communicator, function, restore, axes, elements, x, *more):
        ctx.communicator, ctx.function, ctx.restore, ctx.axes, ctx.shape = (
            communicator,
            function,
            restore,
            axes,
            x.shape,
        )
        ctx.tensors = [i for i, other in enumerate(more) if other is not None]
        ctx.count = len(more)
        ctx.save_for_backward(scatter(communicator, x, axes, elements), *(more[i] for i in ctx.tensors))
        return function(x, *more)

    @staticmethod
    def backward(ctx, gradient):
        part, *saved = ctx.saved_tensors
        more: list[Any] = [None] * ctx.count
        for i, other in zip(ctx.tensors, saved, strict=True):
            more[i] = other.detach().requires_grad_(ctx.needs_input_grad[6 + i])
        x = gather(ctx.communicator, part, ctx.axes, ctx.shape).detach().requires_grad_(ctx.needs_input_grad[5])
        with torch.enable_grad(), ctx.restore():
            out = ctx.function(x, *more)
        torch.autograd.backward(out, gradient)
        return None, None, None, None, None, x.grad, *(other if other is None else other.grad for other in more)


def recomputed(
    communicator: Communicator,
    function: Callable[..., Tensor],
    restore: Callable[[], Any],
    axes: tuple[str, ...],
    elements: int,
    x: Tensor,
    *more: Tensor | None,
) -> Tensor:
    """function(x, *more), of which the backward pass computes the inside again.

    x is kept in parts of `elements` over `axes`, which replicate it. `restore`: a context in which `function` computes
    what it does now.
    """
    return _Recomputed.apply(communicator, function, restore, axes, elements, x, *more)

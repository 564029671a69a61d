"""Activation recomputation: a stretch of the forward pass saves only its arguments and runs again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.parallel.kept.offload import Offload
from platform.parallel.sharding.convert import absent
from platform.parallel.sharding.share import gather_parts, keep_part


class _Recomputed(torch.autograd.Function):
    """Autograd function behind `recomputed`. `restore()` is entered around the second forward pass and restores the
    position in the run, on which dropout masks depend.

    All ranks of a stage run the same backward pass in the same order, so they also issue the collectives of the second
    forward pass in the same order.
    """

    @staticmethod
    def forward(ctx, communicator, function, restore, axes, elements, offload, x, *more):
        """Return the activation function(x, *more) without its graph, saving the arguments: of x one part per rank,
        which with `offload` leaves for host memory while `function` is computed."""
        ctx.communicator, ctx.function, ctx.restore = communicator, function, restore
        ctx.axes, ctx.shape = axes, x.shape
        ctx.tensors = [i for i, other in enumerate(more) if other is not None]
        ctx.count = len(more)
        part, others = keep_part(communicator, x, axes, elements), [more[i] for i in ctx.tensors]
        ctx.away = None
        if offload is None or absent(part):
            ctx.save_for_backward(part, *others)
            return function(x, *more)
        ctx.away, left = offload.leave(part)
        ctx.save_for_backward(*others)
        out = function(x, *more)
        left()
        return out

    @staticmethod
    def backward(ctx, *gradients):
        """Recompute the activations from their saved arguments, now with autograd; return the arguments' gradients."""
        saved = list(ctx.saved_tensors)
        part = ctx.away.take_back()() if ctx.away else saved.pop(0)
        more: list[Any] = [None] * ctx.count
        for i, other in zip(ctx.tensors, saved, strict=True):
            more[i] = other.detach().requires_grad_(ctx.needs_input_grad[7 + i])
        x = gather_parts(ctx.communicator, part, ctx.axes, ctx.shape).detach().requires_grad_(ctx.needs_input_grad[6])
        with torch.enable_grad(), ctx.restore():
            out = ctx.function(x, *more)
        torch.autograd.backward(out, gradients)
        return None, None, None, None, None, None, x.grad, *(other if other is None else other.grad for other in more)


def recomputed(
    communicator: Communicator,
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    restore: Callable[[], Any],
    axes: tuple[str, ...],
    elements: int,
    offload: Offload | None,
    x: Tensor,
    *more: Tensor | None,
) -> Any:
    """Return function(x, *more), an activation or several, saving only the arguments for the backward pass, which calls
    `function` again to recompute the tensors between.

    The ranks along `axes` hold equal x and save one part of so many `elements` each, gathered again in the backward
    pass; `more` is saved whole. `restore`: returns a context in which `function` computes the same as now (dropout
    masks included); `offload`: takes the saved part of x to host memory until then, if it is given.
    """
    return _Recomputed.apply(communicator, function, restore, axes, elements, offload, x, *more)

"""Residual connections of local blocks, x + dropout(y), and the norm of the sum, in one function each way, for
compilation: one kernel reads x and y and writes both results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from platform.parallel.kernels.dropout import Drawing, dropped
from platform.parallel.kernels.statistics import widened

Region = Callable[[Callable[..., Any]], Callable[..., Any]]  # wraps a pure function: `compiled.region`


def _sum(x: Tensor, y: Tensor, drawing: Drawing | None) -> Tensor:
    """Return the residual sum x + dropout(y) of two local activations; no dropout without a `drawing`."""
    return x + (y if drawing is None else dropped(y, *drawing))


def _sum_and_norm(
    x: Tensor, y: Tensor, gain: Tensor, bias: Tensor | None, drawing: Drawing | None, centred: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return the residual sum, its norm over the last dim, and the statistics of each row that the gradient needs: the
    mean (of a LayerNorm, which is `centred`) and 1 / deviation."""
    total = _sum(x, y, drawing)
    wide = widened(total)
    mean = wide.mean(-1, keepdim=True) if centred else None
    wide = wide if mean is None else wide - mean
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out = wide * rstd * gain
    return total, (out if bias is None else out + bias).to(x.dtype), mean, rstd


def _gradients(
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
    dout, wide = widened(dout), widened(total)
    normal = (wide if mean is None else wide - mean) * rstd
    scaled = dout * gain
    inner = scaled - normal * (scaled * normal).mean(-1, keepdim=True)
    if mean is not None:
        inner = inner - scaled.mean(-1, keepdim=True)
    dx = (inner * rstd).to(total.dtype)
    dx = dx if dtotal is None else dtotal + dx
    dgain = (dout * normal).flatten(0, -2).sum(0).to(gain.dtype)
    dbias = dout.flatten(0, -2).sum(0).to(gain.dtype) if biased else None
    return dx, dx if drawing is None else dropped(dx, *drawing), dgain, dbias


class _Sum(torch.autograd.Function):
    """Autograd function of x + dropout(y); the mask is drawn again in the backward pass."""

    @staticmethod
    def forward(ctx, x, y, drawing, region):
        """Return the residual sum x + dropout(y), keeping only what the mask is drawn from."""
        ctx.drawing, ctx.region = drawing, region
        return region(_sum)(x.detach(), y.detach(), drawing)

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of the residual sum: unchanged for x, by the same dropout for y."""
        return gradient, ctx.region(dropped)(gradient, *ctx.drawing), None, None


class _SumAndNorm(torch.autograd.Function):
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
        region, drawing = ctx.region(_gradients), ctx.drawing
        found = region(dtotal, dout, total, mean[0] if mean else None, rstd, gain, ctx.biased, drawing)
        return *found, None, None, None, None


def residual(x: Tensor, y: Tensor, drawing: Drawing, region: Region) -> Tensor:
    """Return x + dropout(y), both local blocks of one shape, by functions that `region` compiles."""
    return _Sum.apply(x, y, drawing, region)


def residual_norm(
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
    return _SumAndNorm.apply(x, y, gain, bias, drawing, kind == "layernorm", eps, region)

"""Position encodings, relative position buckets and attention masks, all computed from global positions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from platform.parallel.kernels.statistics import widened


def angles(length: Tensor, d_kv: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [length, d_kv] of the angles of rotary position embedding (RoFormer; half-split pairs, so
    that both halves are equal; base `theta`) at the global positions `length`, computed in fp64."""
    frequency = theta ** (-torch.arange(0, d_kv, 2, device=length.device, dtype=torch.float64) / d_kv)
    angle = length.double().outer(frequency).repeat(1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


class _Rotate(torch.autograd.Function):
    """Rotation of pairs, whose adjoint is the rotation back; it keeps nothing of x."""

    @staticmethod
    def forward(ctx, x, cos, sin, turn):
        ctx.angles, ctx.turn = (cos, sin), turn
        return turn(x.detach(), cos, sin, 1)

    @staticmethod
    def backward(ctx, gradient):
        cos, sin = ctx.angles
        return ctx.turn(gradient, cos, sin, -1), None, None, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    """Apply the angles to the pairs of x, forth (`way` 1) or back (-1)."""
    wide, half = widened(x), x.shape[-1] // 2
    out = wide * cos
    out[..., :half].addcmul_(wide[..., half:], sin[..., :half], value=-way)
    out[..., half:].addcmul_(wide[..., :half], sin[..., :half], value=way)
    return out.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, turn: Callable[..., Tensor] = rotated) -> Tensor:
    """Apply rotary position embedding to x, a local block of queries or keys [..., d_kv], by `angles` of a shape that
    broadcasts against it. `turn`: `rotated`, perhaps compiled."""
    return _Rotate.apply(x, cos, sin, turn)


def sinusoid(length: Tensor, d_model: Tensor, size: int) -> Tensor:
    """Return the sinusoidal position table, fp64 [length, d_model]: sin(position / 10000^(2i / size)) at column 2i, cos
    of the same at 2i + 1 ("Attention Is All You Need", 3.5). `length`, `d_model`: the global positions and columns of
    this rank's block; `size`: the global d_model."""
    angle = length.double().outer(10000.0 ** (-(d_model - d_model % 2).double() / size))
    return torch.where(d_model % 2 == 0, angle.sin(), angle.cos())


def relative_bucket(offset: Tensor, buckets: int, distance: int, bidirectional: bool) -> Tensor:
    """Return the bucket (index into the table of relative biases) of every offset = memory position - position in T5
    (Raffel et al. 2020, 2.1); int64, shaped as `offset`.

    Half of the `buckets` hold one offset each, the rest widen logarithmically up to `distance`; all offsets beyond it
    share the last. If `bidirectional`, positive offsets get the second half of the buckets; otherwise all of them share
    bucket 0.
    """
    ahead = torch.zeros_like(offset)
    if bidirectional:
        buckets //= 2
        ahead, offset = (offset > 0) * buckets, -offset.abs()
    back = (-offset).clamp_min(0)
    exact = buckets // 2
    # fp64 plus 1e-9: an exact power on a bucket border rounds to the same bucket on every device
    growth = torch.log(back.clamp_min(exact).double() / exact) / math.log(distance / exact)
    wide = exact + (growth * (buckets - exact) + 1e-9).long()
    return ahead + torch.where(back < exact, back, wide.clamp_max(buckets - 1))


def padding_mask(tokens: Tensor) -> Tensor:
    """Return bool [batch, 1, 1, memory_length], broadcast against attention scores, that is True where the local block
    `tokens` [memory_length, batch] is padding (negative)."""
    return (tokens < 0).t()[:, None, None]


def attention_mask(q: Tensor, k: Tensor, causal: bool, padding: Tensor | None, bias: Tensor | None) -> Tensor:
    """Combine causality, padding and bias into one mask for scaled_dot_product_attention of q [batch, heads, length,
    d_kv] and k: without a `bias`, bool (True: attended to); with one, the bias with q's dtype minimum where masked.
    `padding`: True where a key is padding, as `padding_mask` returns it, or None.

    The dtype's minimum is used, not -inf, so that a sequence of padding alone does not become NaN.
    """
    unseen = torch.zeros((), dtype=torch.bool, device=q.device) if padding is None else padding
    if causal:
        unseen = unseen | torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    if bias is None:
        return ~unseen
    return bias.to(q.dtype).masked_fill(unseen, torch.finfo(q.dtype).min)

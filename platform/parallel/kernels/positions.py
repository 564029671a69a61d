"""What attention and embeddings know of positions, always from global positions: encodings, relative buckets, masks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from platform.parallel.kernels.statistics import accumulate


def rotate(x: Tensor, length: Tensor, shape: Sequence[int], theta: float) -> Tensor:
    """Rotary embedding of x [..., d_kv] (RoFormer; half-split pairs) at the positions `length`; `shape` is that of an
    angle per position and pair, broadcast to x."""
    wide, d_kv = accumulate(x), x.shape[-1]
    frequency = theta ** (-torch.arange(0, d_kv, 2, device=x.device, dtype=torch.float64) / d_kv)
    angle = length.double().outer(frequency)
    cos, sin = angle.cos().to(wide.dtype).view(shape), angle.sin().to(wide.dtype).view(shape)
    a, b = wide.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def sinusoid(length: Tensor, d_model: Tensor, size: int) -> Tensor:
    """fp64 [length, d_model]: sin(position / 10000^(2i / size)) at column 2i, cos of the same at 2i + 1 ("Attention Is
    All You Need", 3.5)."""
    angle = length.double().outer(10000.0 ** (-(d_model - d_model % 2).double() / size))
    return torch.where(d_model % 2 == 0, angle.sin(), angle.cos())


def relative_bucket(offset: Tensor, buckets: int, distance: int, bidirectional: bool) -> Tensor:
    """T5's bucket of every offset, which is memory position - position (Raffel et al. 2020, 2.1).

    Half of the buckets are single offsets, the rest widen logarithmically up to `distance`, beyond which all share the
    last. Bidirectional: offsets ahead have the second half of the buckets; else they share bucket 0.
    """
    ahead = torch.zeros_like(offset)
    if bidirectional:
        buckets //= 2
        ahead, offset = (offset > 0) * buckets, -offset.abs()
    back = (-offset).clamp_min(0)
    exact = buckets // 2
    # fp64, and a hair to the right: an exact power at a border falls into the same bucket on every device
    growth = torch.log(back.clamp_min(exact).double() / exact) / math.log(distance / exact)
    wide = exact + (growth * (buckets - exact) + 1e-9).long()
    return ahead + torch.where(back < exact, back, wide.clamp_max(buckets - 1))


def hidden(tokens: Tensor) -> Tensor:
    """bool [batch, 1, 1, memory_length] of token ids [memory_length, batch]: where they are padding."""
    return (tokens < 0).t()[:, None, None]


def attention_mask(q: Tensor, k: Tensor, causal: bool, padding: Tensor | None, bias: Tensor | None) -> Tensor:
    """One mask for scaled_dot_product_attention of q [batch, heads, length, d_kv] and k: bool (True: seen) without a
    bias, else the bias with the type's least number where hidden.

    The least number and not -inf: a sequence of padding alone must not become NaN.
    """
    unseen = torch.zeros((), dtype=torch.bool, device=q.device) if padding is None else padding
    if causal:
        unseen = unseen | torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    if bias is None:
        return ~unseen
    return bias.to(q.dtype).masked_fill(unseen, torch.finfo(q.dtype).min)

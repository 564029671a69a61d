"""Position encodings, relative position buckets and attention masks, all computed from global positions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from platform.plan.model_types import RotaryScaling
from platform.runtime.statistics import widen_dtype


def rotary_angles(
    positions: Tensor,
    d_kv: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RotaryScaling | None = None,
    pair_layout: str = "halves",
    tokens: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [length, d_kv] of the angles of rotary position embedding (RoFormer; base `theta`) at the
    global positions `positions`, computed in fp64; with `scaling`, of the scaled angles, times its magnitude.
    `pair_layout`: the two elements of a pair lie in two halves, or are neighbours; `tokens`: the sequence's length."""
    frequency = theta ** (-torch.arange(0, d_kv, 2, device=positions.device, dtype=torch.float64) / d_kv)
    if scaling:
        frequency = _scale_frequencies(frequency, theta, scaling, tokens)
    angle, magnitude = positions.double().outer(frequency), scaling.magnitude if scaling else 1.0
    angle = angle.repeat(1, 2) if pair_layout == "halves" else angle.repeat_interleave(2, 1)
    return (angle.cos() * magnitude).to(dtype), (angle.sin() * magnitude).to(dtype)


def _scale_frequencies(frequency: Tensor, theta: float, scaling: RotaryScaling, tokens: int) -> Tensor:
    """Return the rotary frequencies [pairs], radians per token, changed by `scaling` for contexts longer than the
    original; `tokens`: the sequence's length, by which dynamic and longrope go."""
    if scaling.kind == "linear":
        return frequency / scaling.factor
    pairs = len(frequency)
    if scaling.kind == "proportional":
        turns = torch.arange(pairs, device=frequency.device) < int(scaling.share * pairs)
        return frequency / scaling.factor * turns
    if scaling.kind == "longrope":
        divisors = torch.empty_like(frequency)
        for one, divisor in zip(divisors.split(1), _choose_divisors(scaling, tokens), strict=True):
            one.fill_(divisor)  # on the device, which would wait for a copy of a tensor of the host's
        return frequency / divisors
    if scaling.kind == "dynamic":
        growth = scaling.factor * max(1.0, tokens / scaling.original_length) - (scaling.factor - 1)
        return frequency * growth ** (-torch.arange(pairs, device=frequency.device).double() / max(1, pairs - 1))
    if scaling.kind == "llama3":
        turns = scaling.original_length * frequency / (2 * math.pi)
        kept_share = (turns - scaling.low) / (scaling.high - scaling.low)
    else:

        def pair_number(turns: float) -> float:
            """Return the number, not whole, of the rotary pair that turns so often within the original length."""
            return pairs * math.log(scaling.original_length / (turns * 2 * math.pi)) / math.log(theta)

        first, last = pair_number(scaling.high), pair_number(scaling.low)
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        number = torch.arange(pairs, device=frequency.device, dtype=torch.float64)
        kept_share = 1 - (number - first) / (last - first if last != first else 0.001)
    kept_share = kept_share.clamp(0, 1)
    return frequency * (kept_share + (1 - kept_share) / scaling.factor)


def _choose_divisors(scaling: RotaryScaling, tokens: int) -> tuple[float, ...]:
    """Return what longrope divides the frequency of each rotary pair by, in sequences of so many `tokens`."""
    return scaling.long if tokens > scaling.original_length else scaling.short


class _Rotate(torch.autograd.Function):
    """Rotation of pairs, whose adjoint is the rotation back; it keeps nothing of x."""

    @staticmethod
    def forward(ctx, x, cos, sin, pairs, leading, turn):
        """Turn the pairs of x by the rotary angles, which alone are kept."""
        ctx.angles, ctx.place, ctx.turn = (cos, sin), (pairs, leading), turn
        return turn(x.detach(), cos, sin, 1, pairs, leading)

    @staticmethod
    def backward(ctx, gradient):
        """Turn the gradient back by the same rotary angles."""
        cos, sin = ctx.angles
        return ctx.turn(gradient, cos, sin, -1, *ctx.place), None, None, None, None, None


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor, sign: int, pair_layout: str, leading: bool) -> Tensor:
    """Turn the pairs of x [..., d_kv], or of its last (or, `leading`, its first) elements if there are fewer angles, by
    the angles of rotary position embedding, forth (`sign` 1) or back (-1). `pair_layout`: see `rotary_angles`."""
    turned, half = cos.shape[-1], cos.shape[-1] // 2
    unturned = x.shape[-1] - turned
    halves = slice(None, half), slice(half, None)
    first, second = halves if pair_layout == "halves" else (slice(0, None, 2), slice(1, None, 2))
    wide = widen_dtype(x[..., :turned] if leading else x[..., unturned:])
    out = wide * cos
    out[..., first].addcmul_(wide[..., second], sin[..., first], value=-sign)
    out[..., second].addcmul_(wide[..., first], sin[..., first], value=sign)
    out = out.to(x.dtype)
    if not unturned:
        return out
    return torch.cat((out, x[..., turned:]) if leading else (x[..., :unturned], out), -1)


def sign_sines(sin: Tensor, pair_layout: str) -> Tensor:
    """Return sines of rotary angles with the sign by which a pair's other element is added."""
    shape, dim = _split_pairs(sin, pair_layout)
    first, second = sin.unflatten(-1, shape).unbind(dim)
    return torch.stack((-first, second), dim).flatten(-2)


def turn_pairs_traced(x: Tensor, cos: Tensor, signed: Tensor, pair_layout: str, leading: bool = False) -> Tensor:
    """Turn the pairs of x forth by `sign_sines`, so that a compiler makes one kernel of the gradient too; the others
    are as in `apply_rotary`."""
    turned, (shape, dim) = cos.shape[-1], _split_pairs(cos, pair_layout)
    split = [turned, x.shape[-1] - turned] if leading else [x.shape[-1] - turned, turned]
    parts = list(x.split(split, -1))
    wide = widen_dtype(parts[0 if leading else 1])
    out = (wide * cos + wide.unflatten(-1, shape).flip(dim).flatten(-2) * signed).to(x.dtype)
    if turned == x.shape[-1]:
        return out
    return torch.cat((out, parts[1]) if leading else (parts[0], out), -1)


def _split_pairs(angles: Tensor, pair_layout: str) -> tuple[tuple[int, int], int]:
    """Return the shape into which the pairs of the last dim split it, and the dim of that along which a pair lies."""
    pairs = angles.shape[-1] // 2
    return ((2, pairs), -2) if pair_layout == "halves" else ((pairs, 2), -1)


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    pair_layout: str,
    leading: bool = False,
    rotate: Callable[..., Tensor] = turn_pairs,
) -> Tensor:
    """Apply rotary position embedding to x, a local block of queries or keys [..., d_kv], by `rotary_angles` of
    `pair_layout`, of a shape that broadcasts against its last, or, `leading`, its first, elements. `rotate`:
    `turn_pairs`, perhaps compiled."""
    return _Rotate.apply(x, cos, sin, pair_layout, leading, rotate)


def sinusoid_table(positions: Tensor, columns: Tensor, size: int) -> Tensor:
    """Return the sinusoidal position table, fp64 [length, d_model]: sin(position / 10000^(2i / size)) at column 2i, cos
    of the same at 2i + 1 ("Attention Is All You Need", 3.5). `positions`, `columns`: the global positions and columns
    of this rank's block; `size`: the global d_model."""
    angle = positions.double().outer(10000.0 ** (-(columns - columns % 2).double() / size))
    return torch.where(columns % 2 == 0, angle.sin(), angle.cos())


def relative_bucket(offset: Tensor, num_buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """Return the bucket (index into the table of relative biases) of every offset = memory position - position in T5
    (Raffel et al. 2020, 2.1); int64, shaped as `offset`.

    Half of the `num_buckets` hold one offset each, the rest widen logarithmically up to `max_distance`; all offsets
    beyond it share the last. If `bidirectional`, positive offsets get the second half of the buckets; otherwise all of
    them share bucket 0."""
    ahead = torch.zeros_like(offset)
    if bidirectional:
        num_buckets //= 2
        ahead, offset = (offset > 0) * num_buckets, -offset.abs()
    back = (-offset).clamp_min(0)
    exact = num_buckets // 2
    # fp64 plus 1e-9: an exact power on a bucket border rounds to the same bucket on every device
    growth = torch.log(back.clamp_min(exact).double() / exact) / math.log(max_distance / exact)
    wide = exact + (growth * (num_buckets - exact) + 1e-9).long()
    return ahead + torch.where(back < exact, back, wide.clamp_max(num_buckets - 1))


def mask_padded_keys(tokens: Tensor) -> Tensor:
    """Return bool [batch, 1, 1, memory_length], True where `tokens` [memory_length, batch] is padding (negative)."""
    return (tokens < 0).t()[:, None, None]


def unseen_mask(query_positions: Tensor, key_positions: Tensor, window: int, document_starts: Tensor | None) -> Tensor:
    """Return the attention mask, bool [length, memory_length], True where a query at the global positions
    `query_positions` must not see the key at `key_positions`: keys ahead of it, and with a `window` keys that far back.
    With `document_starts` [length, batch], the positions at which documents begin, keys of earlier documents are hidden
    too: bool [batch, 1, length, memory_length]."""
    at = query_positions.unsqueeze(1)
    hidden = key_positions > at
    if window:
        hidden |= key_positions <= at - window
    return hidden if document_starts is None else hidden | (key_positions < document_starts.t()[:, None, :, None])


def additive_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the attention mask added to scores, shaped as the bool `hidden`: -inf where it is True, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def attention_mask(q: Tensor, is_unseen: Tensor | None, padding: Tensor | None, bias: Tensor | None) -> Tensor:
    """Combine the `unseen_mask` keys (`is_unseen`, None without causality), padding and bias into one mask for
    scaled_dot_product_attention of q [batch, heads, length, d_kv]: without a `bias`, bool (True: attended to); with
    one, the bias with -inf where masked. `padding`: True where a key is padding, as `mask_padded_keys`
    returns it, or None.
    """
    hidden = torch.zeros((), dtype=torch.bool, device=q.device) if padding is None else padding
    if is_unseen is not None:
        hidden = hidden | is_unseen
    if bias is None:
        return ~hidden
    return bias.to(q.dtype).masked_fill(hidden, -torch.inf)

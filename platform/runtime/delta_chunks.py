"""The gated delta rule (Yang et al. 2025), chunk by chunk of a sequence, and the short convolution before it.

Each head has a state S [d_key, d_value], a memory of pairs, which begins at 0 where a document does. A token decays it,
writes a part of what its key does not yet read there, and reads it by its query:

    S = exp(decay) S;    S += k (strength (v - k S));    out = q S

Within a chunk these writes are one triangular system (Yang et al. 2024, section 3), so that only states between chunks
follow one another. The backward pass computes the states again, then each chunk, from the last one on: nothing but
the arguments is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.plan.operations.delta_rule import CHUNK
from platform.runtime.statistics import widen_dtype

_EPS = 1e-6  # what the norms of queries and keys add to the sum of squares, as published code does


class TokenPlaces(NamedTuple):
    """Places of the tokens of delta rules and convolutions: the position of the `first`, and `begins` [length, batch],
    the positions at which their documents begin, None where each sequence is one."""

    first: int
    begins: Tensor | None = None

    def part(self, first: int, size: int) -> TokenPlaces:
        """Return the places of `size` tokens from number `first` on."""
        begins = None if self.begins is None else self.begins.narrow(0, first, size)
        return TokenPlaces(self.first + first, begins)

    def hidden_pairs(self, size: int, device: torch.device) -> Tensor:
        """Return where a token, in its row, does not read what another of these `size` tokens writes, in its column."""
        at = torch.arange(self.first, self.first + size, device=device)
        hidden = at > at[:, None]
        return hidden if self.begins is None else hidden | (at < self.begins.t()[:, None, :, None])


def _compute_chunk(arguments: Sequence[Tensor], state: Tensor, places: TokenPlaces) -> tuple[Tensor, Tensor]:
    """Return the delta rule's results [length, batch, heads, d_value] for the tokens of one chunk, and the state after
    it; `state`: before it [batch, heads, d_key, d_value], in the type of statistics, as all of this is."""
    q, k, v, strength, decay = (widen_dtype(x).transpose(0, 1).transpose(1, 2) for x in arguments[:5])
    rate, shift = (widen_dtype(x)[:, None] for x in arguments[5:])
    group = v.shape[1] // k.shape[1]
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS) for x in (q, k))
    q, k = ((x if group == 1 else x.repeat_interleave(group, 1)) for x in (q * q.shape[-1] ** -0.5, k))
    strength, total = strength.sigmoid(), (-rate.exp() * F.softplus(decay + shift)).cumsum(-1)
    hidden = places.hidden_pairs(q.shape[2], q.device)
    pairs = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(hidden, -torch.inf).exp()
    carried = total.exp().unsqueeze(-1)
    if places.begins is not None:  # a document that begins within reads no state from before
        carried = carried.masked_fill((places.begins >= places.first).t()[:, None, :, None], 0)
    system = (k * strength.unsqueeze(-1)) @ k.mT * pairs
    wanted = strength.unsqueeze(-1) * (v - carried * (k @ state))
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = carried * (q @ state) + (q @ k.mT * pairs) @ written
    state = carried[..., -1:, :] * state + (k * pairs[..., -1, :, None]).mT @ written
    return out.transpose(1, 2).transpose(0, 1), state


class _DeltaRule(torch.autograd.Function):
    """Autograd function of `apply_delta_rule`."""

    @staticmethod
    def forward(ctx, places, state, *arguments):
        """Return the results of all tokens, and the state after them, saving the arguments alone: a pass that learns
        begins without a `state`."""
        ctx.places, state = places, _empty_state(arguments) if state is None else state
        ctx.save_for_backward(*arguments)
        value = arguments[2]
        out = torch.empty_like(value, memory_format=torch.contiguous_format)
        for first in range(0, len(value), CHUNK):
            chunk = _chunk_of(arguments, first)
            part, state = _compute_chunk(chunk, state, places.part(first, len(chunk[0])))
            out[first : first + CHUNK] = part
        ctx.mark_non_differentiable(state)
        return out, state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient, _):
        """Return the gradients of the arguments: each chunk's by autograd, from the last chunk on."""
        arguments, places = ctx.saved_tensors, ctx.places
        firsts, states = range(0, len(arguments[0]), CHUNK), [_empty_state(arguments)]
        for first in firsts[:-1]:
            chunk = _chunk_of(arguments, first)
            states.append(_compute_chunk(chunk, states[-1], places.part(first, CHUNK))[1])
        sums = [torch.zeros_like(x) for x in arguments]
        of_state = torch.zeros_like(states[0])
        for first in reversed(firsts):
            leaves = [x.detach().requires_grad_() for x in (states.pop(), *_chunk_of(arguments, first))]
            with torch.enable_grad():
                results = _compute_chunk(leaves[1:], leaves[0], places.part(first, len(leaves[1])))
            gradients = widen_dtype(gradient[first : first + CHUNK]), of_state
            of_state, *parts = torch.autograd.grad(results, leaves, gradients)
            for total, part in zip(sums[:5], parts, strict=False):
                total[first : first + CHUNK] = part
            for total, part in zip(sums[5:], parts[5:], strict=True):
                total += part
        return None, None, *sums


def _empty_state(arguments: Sequence[Tensor]) -> Tensor:
    """Return the state of the delta rule before a sequence, zeros [batch, heads, d_key, d_value]."""
    q, _, v = arguments[:3]
    return widen_dtype(v[:0]).new_zeros(*v.shape[1:3], q.shape[-1], v.shape[-1])


def _chunk_of(arguments: Sequence[Tensor], first: int) -> list[Tensor]:
    """Return the arguments of the delta rule for the chunk of tokens that begins at number `first`."""
    return [*(x[first : first + CHUNK] for x in arguments[:5]), *arguments[5:]]


def apply_delta_rule(
    arguments: Sequence[Tensor], places: TokenPlaces, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the results of a gated delta rule [length, batch, heads, d_value], and the states [batch, heads, d_key,
    d_value] after the last token. `arguments`: queries and keys [length, batch, key heads, d_key], each of which heads
    next to each other share, values, the logits of strengths and what makes decays [length, batch, heads], and the
    logarithmic rates and shifts of decays [heads]; `state`: before the first token, None: 0."""
    return _DeltaRule.apply(places, state, *arguments)


def convolve(x: Tensor, taps: Tensor, before: Tensor, places: TokenPlaces) -> Tensor:
    """Return SiLU of the convolution of x [length, batch, heads, width] along length with `taps` [heads, width, count]
    of each element: a token reads itself, by the last tap, and the tokens before it, down to its document's beginning.
    `before`: the tokens of the sequence that the first one reads before itself."""
    count, size = taps.shape[-1], len(x)
    padded = widen_dtype(torch.cat((before, x)))
    total = padded.new_zeros(())
    at = torch.arange(places.first, places.first + size, device=x.device)
    for tap in range(count):
        part, back = padded[tap : tap + size] * widen_dtype(taps[..., tap]), count - 1 - tap
        if places.begins is not None and back:
            part = part.masked_fill((at[:, None] - back < places.begins)[..., None, None], 0)
        total = total + part
    return F.silu(total).to(x.dtype)

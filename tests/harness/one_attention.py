"""Attention as one kernel, of which nothing but the shapes is known."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


@torch.library.custom_op("budget::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise AssertionError("only on meta")


@torch.library.custom_op("budget::attention_backward", mutates_args=())
def attention_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    raise AssertionError("only on meta")


@attention.register_fake
def _(q, k, v):
    if v.shape[-1] == q.shape[-1]:
        return torch.empty_like(q)
    batch, heads, length, _ = q.shape  # values of another width, as in latent attention
    return q.new_empty((batch, length, heads, v.shape[-1])).transpose(1, 2)


@attention_backward.register_fake
def _(g, q, k, v, out):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


attention.register_autograd(
    lambda ctx, g: tuple(attention_backward(g, *ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
)


@torch.library.custom_op("budget::biased_attention", mutates_args=())
def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    raise AssertionError("only on meta")


@torch.library.custom_op("budget::biased_attention_backward", mutates_args=())
def biased_attention_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    raise AssertionError("only on meta")


@biased_attention.register_fake
def _(q, k, v, bias):
    return torch.empty_like(q)


@biased_attention_backward.register_fake
def _(g, q, k, v, bias, out):
    return tuple(map(torch.empty_like, (q, k, v, bias)))


biased_attention.register_autograd(
    lambda ctx, g: tuple(biased_attention_backward(g, *ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
)


class OneAttention(TorchFunctionMode):
    """Attention as one kernel, as flash attention is, whatever torch would choose for fake tensors."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            biased = len(args) > 3 and args[3] is not None and args[3].requires_grad  # not a mask
            return biased_attention(*args[:4]) if biased else attention(*args[:3])
        return function(*args, **(kwargs or {}))

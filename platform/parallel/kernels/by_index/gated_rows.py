"""Gated activations of experts' rows, which are not compiled, as each pass has another number of them: few tensors are
made and kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class _GatedSilu(torch.autograd.Function):
    """Autograd function of `gated_silu`, which keeps its arguments and computes SiLU again in the backward pass."""

    @staticmethod
    def forward(ctx, gate, x):
        """Return x times SiLU of its gate."""
        ctx.save_for_backward(gate, x)
        return F.silu(gate).mul_(x)

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of the gate and of x."""
        gate, x = ctx.saved_tensors
        of_gate = gradient * x
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return of_gate, F.silu(gate).mul_(gradient)


def gated_silu(gate: Tensor, x: Tensor) -> Tensor:
    """Multiply x by SiLU of its gate (SwiGLU, Shazeer 2020): of both alone memory is kept for the backward pass."""
    return _GatedSilu.apply(gate, x)

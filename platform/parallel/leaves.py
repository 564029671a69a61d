"""Gradients of leaves, which are kept and added into in place."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulate(leaf: Tensor, gradient: Tensor) -> None:
    """Add a gradient to `leaf.grad`, which owns its storage: later ones are added in place, and what computed the first
    may be a slice or a view of anything."""
    leaf.grad = _copied(leaf, gradient) if leaf.grad is None else leaf.grad.add_(gradient)


def _copied(leaf: Tensor, gradient: Tensor) -> Tensor:
    """Copy a gradient into new memory that is laid out as the leaf: fused optimizers read both in the order of memory,
    whatever their strides."""
    return torch.empty_like(leaf, requires_grad=False).copy_(gradient)

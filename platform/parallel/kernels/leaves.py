"""Gradients of autograd leaves that kernels compute themselves, outside of a backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from platform.parallel.sharding.flat import bucket_of


def add_gradient(w: Tensor, gradient: Tensor) -> None:
    """Add `gradient`, which may be a view of other memory, to the sum of the gradients of the autograd leaf w: in its
    bucket, or `grad` if it has none."""
    if found := bucket_of(w):
        bucket, name = found
        bucket.add(name, gradient)
    elif w.grad is None:
        w.grad = torch.empty_like(w, requires_grad=False).copy_(gradient)
    else:
        w.grad.add_(gradient)

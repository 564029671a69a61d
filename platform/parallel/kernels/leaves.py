"""Gradients of leaves, which are kept and added into in place: each owns its storage."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor


def leaf(w: Tensor) -> Tensor:
    """Return a parameter to differentiate by: w itself, whose `grad` owns its storage.

    Autograd keeps the first gradient that arrives, be it a view of what others read later (that of a bias, where a rank
    has one token), and adds the next ones into it.
    """
    w.requires_grad_()
    of = ref(w)  # the hook is the parameter's own

    def arrived(gradient: Tensor | None) -> Tensor | None:
        w = of()
        assert w is not None
        return None if gradient is None or w.grad is not None else _copied(w, gradient)  # None: as it came, or deferred

    w.register_hook(arrived)
    return w


def accumulate(w: Tensor, gradient: Tensor) -> None:
    """Add a gradient to that of a leaf, as autograd does: what computed it may be a slice or a view of anything."""
    w.grad = _copied(w, gradient) if w.grad is None else w.grad.add_(gradient)


def _copied(w: Tensor, gradient: Tensor) -> Tensor:
    """Copy a gradient into new memory that is laid out as w: fused optimizers read both in the order of memory,
    whatever their strides."""
    return torch.empty_like(w, requires_grad=False).copy_(gradient)

"""Gradients of autograd leaves: each owns its storage, since gradients are kept and accumulated in place."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor


def leaf(w: Tensor) -> Tensor:
    """Make w, a parameter's compute copy, a leaf that requires a gradient and whose `grad` owns its storage; return w
    itself.

    Autograd alone would keep the first gradient that arrives, even a view of memory that others read later (a bias's,
    where a rank has one token), and add the next gradients into it.
    """
    w.requires_grad_()
    of = ref(w)  # weak: the parameter owns the hook, and a strong reference would be a cycle

    def arrived(gradient: Tensor | None) -> Tensor | None:
        """Return to autograd, as a hook of the parameter's compute copy w, a copy of the first gradient that
        arrives, which it then keeps as `w.grad`, so that w owns its storage; None for later ones, which are added."""
        w = of()
        assert w is not None
        return None if gradient is None or w.grad is not None else _copied(w, gradient)  # None: keep the gradient as is

    w.register_hook(arrived)
    return w


def add_gradient(w: Tensor, gradient: Tensor) -> None:
    """Add `gradient`, which may be a view of other memory, to the `grad` of the autograd leaf w outside a backward
    pass, as autograd would: for deferred weight gradients."""
    w.grad = _copied(w, gradient) if w.grad is None else w.grad.add_(gradient)


def _copied(w: Tensor, gradient: Tensor) -> Tensor:
    """Copy a gradient of w into new memory with the strides of w: fused optimizers read parameter and gradient in
    memory order and ignore strides."""
    return torch.empty_like(w, requires_grad=False).copy_(gradient)

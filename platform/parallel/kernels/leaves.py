"""Gradients of autograd leaves: each owns its storage, since gradients are kept and accumulated in place.

Where a kernel computes the gradient of a leaf itself, it adds it to `grad` on the spot, in the matrix product if it
can: no temporary of the parameter's size, no further pass over it. Autograd then gets None.
"""

from __future__ import annotations

from collections.abc import Callable
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


def accumulates(w: Tensor | None) -> bool:
    """Return True if w is a leaf whose gradient a kernel may add to `grad` itself: not while a graph is traced, which
    cannot change it."""
    return not torch.compiler.is_compiling() and w is not None and w.requires_grad and w.is_leaf


def add_gradient(w: Tensor, gradient: Tensor) -> None:
    """Add `gradient`, which may be a view of other memory, to the `grad` of the autograd leaf w, as autograd would."""
    w.grad = _copied(w, gradient) if w.grad is None else w.grad.add_(gradient)


def add_computed(w: Tensor, compute: Callable[[Tensor | None], Tensor]) -> None:
    """Add a gradient to the `grad` of the autograd leaf w: compute(grad) adds it in place and returns `grad`, and
    compute(None) returns it in new memory, that nobody else reads."""
    found = compute(w.grad)
    if w.grad is None:
        alone = found.untyped_storage().nbytes() == w.nbytes and found.stride() == w.stride()
        w.grad = found if alone else _copied(w, found)


def arrived(w: Tensor) -> None:
    """Run the hooks that wait for gradients of the autograd leaf w (register_post_accumulate_grad_hook), after a kernel
    has added one in a backward pass, as autograd does when it adds one."""
    for hook in (w._post_accumulate_grad_hooks or {}).values():
        hook(w)


def _copied(w: Tensor, gradient: Tensor) -> Tensor:
    """Copy a gradient of w into new memory with the strides of w: fused optimizers read parameter and gradient in
    memory order and ignore strides."""
    return torch.empty_like(w, requires_grad=False).copy_(gradient)

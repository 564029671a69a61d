"""Gradients of autograd leaves that kernels compute themselves: added where they stay, in the matrix product if it can,
with no temporary of the parameter's size and no further pass over it. Autograd then gets None."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from platform.parallel.sharding.flat import bucket_of

# (memory, True if what is there does not count) -> the gradient, in that memory; (None, ...) -> in new memory
Compute = Callable[[Tensor | None, bool], Tensor]


def accumulates(w: Tensor | None) -> bool:
    """Return True if a kernel may add the gradient of the tensor w itself: an autograd leaf, outside of tracing."""
    return not torch.compiler.is_compiling() and w is not None and w.requires_grad and w.is_leaf


def add_computed(w: Tensor, compute: Compute) -> None:
    """Compute a gradient of the parameter w, an autograd leaf, and add it to the sum of its gradients in w's bucket,
    else in `w.grad`. `compute(memory, fresh)` adds the gradient to `memory`, overwrites it if `fresh`, or returns it in
    new memory if `memory` is None."""
    if found := bucket_of(w):
        bucket, name = found
        if bucket.here:
            memory, fresh = bucket.sum_of(name)
            compute(memory.view(w.shape), fresh)
            bucket.came(name)
    elif w.grad is None:
        w.grad = torch.empty_like(w, requires_grad=False).copy_(compute(None, True))
    else:
        compute(w.grad, False)


def add_total(w: Tensor, total: Callable[..., Tensor]) -> None:
    """Add to the leaf w's gradient a small tensor that `total(dtype=...)` computes, such as a bias's row sum."""
    if found := bucket_of(w):
        bucket, name = found
        if bucket.here:
            bucket.add(name, total(dtype=bucket.adds_in))
    else:
        w.grad = total(dtype=w.dtype) if w.grad is None else w.grad.add_(total(dtype=w.dtype))


def add_gradient(w: Tensor, gradient: Tensor) -> None:
    """Add `gradient`, which may be a view of other memory, to the sum of the gradients of the autograd leaf w."""

    def compute(into: Tensor | None, fresh: bool) -> Tensor:
        """Add the gradient to the memory `into`, or overwrite it if `fresh`; return it as it is without `into`."""
        return gradient if into is None else into.copy_(gradient) if fresh else into.add_(gradient)

    add_computed(w, compute)


AddPart = Callable[[Callable[[Tensor, bool], None]], None]


@contextmanager
def in_parts(w: Tensor) -> Iterator[AddPart]:
    """Yield a function that adds a part of one gradient of the parameter w, an autograd leaf, as `compute(memory,
    fresh)` of `add_computed` does; the gradient counts as computed when the context ends."""
    found = bucket_of(w)
    memory, fresh = found[0].sum_of(found[1]) if found else (w.grad, False)
    if memory is None:
        memory, fresh = torch.empty_like(w, requires_grad=False), True
    memory = memory.view(w.shape)

    def add(compute: Callable[[Tensor, bool], None]) -> None:
        """Add the part of the gradient that `compute` computes."""
        nonlocal fresh
        compute(memory, fresh)
        fresh = False

    yield add
    if found:
        found[0].came(found[1])
    else:
        w.grad = memory

"""The planned einsum: one group's conversions and local products as a single differentiable function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.parallel.kernels.leaves import accumulates, add_computed
from platform.parallel.kernels.products import local_einsum
from platform.parallel.kernels.summa import summa
from platform.parallel.sharding.convert import Pending, absent, apply, convert
from platform.plan.communication.planned import Einsum, EinsumGroup

Deferred = list[Callable[[], None]]  # each computes and accumulates gradients of parameters when called
Tensors = Sequence[Tensor | None]


class _Einsums(torch.autograd.Function):
    """Autograd function of one planned group of einsums that share x. Forward: issues the gathers of x and all
    operands, multiplies, adds the biases (one per operand, or none at all), converts the outputs.

    Backward: the gradient of x is computed first, and its reduction overlaps the computation of the operands'
    gradients. Tensors marked `regathered` in the plan are saved only as stored and gathered again while the output
    gradients are converted. Gradients of leaves are added to their sums here, and autograd gets None for them.
    `deferred`: a list that receives the function computing the gradients of operands and biases (zero bubble); they are
    then leaves.
    """

    @staticmethod
    def forward(ctx, communicator, group: EinsumGroup, deferred: Deferred | None, x: Tensor, *tensors: Tensor):
        operands, biases = tensors[: len(group.einsums)], tensors[len(group.einsums) :]
        ctx.communicator, ctx.group, ctx.deferred = communicator, group, deferred
        ctx.leaves = [t if accumulates(t) else None for t in tensors]
        regathered = [group.regathered, *(e.regathered for e in group.einsums)]
        stored = (x, *operands)
        coming = [convert(communicator, w, e.operand.forward) for w, e in zip(operands, group.einsums, strict=True)]
        x = convert(communicator, x, group.x.forward).wait()
        local = [c.wait() for c in coming]
        leaving = [
            convert(communicator, local_einsum(e.x_dims, e.dims, e.out_dims)(x, w, b), e.output.forward, owned=True)
            for w, b, e in zip(local, biases or [None] * len(local), group.einsums, strict=True)
        ]
        ctx.save_for_backward(*(s if again else t for s, t, again in zip(stored, (x, *local), regathered, strict=True)))
        return tuple(c.wait() for c in leaving)

    @staticmethod
    def backward(ctx, *gradients):
        x, *operands = ctx.saved_tensors
        communicator, group = ctx.communicator, ctx.group
        coming = [convert(communicator, g, e.output.backward) for g, e in zip(gradients, group.einsums, strict=True)]
        regathered = [
            convert(communicator, w, e.operand.forward if e.regathered else ())
            for w, e in zip(operands, group.einsums, strict=True)
        ]
        if group.regathered:
            x = convert(communicator, x, group.x.forward).wait()
        operands = [c.wait() for c in regathered]
        local = [c.wait().contiguous() for c in coming]  # read twice; that of a query is not in attention's order
        dx = None
        if ctx.needs_input_grad[3]:
            total: Any = None
            for g, w, e in zip(local, operands, group.einsums, strict=True):
                total = local_einsum(e.out_dims, e.dims, e.x_dims)(g, w, into=total)
            dx = convert(communicator, total, group.x.backward, owned=True)
        rest = partial(_operand_gradients, communicator, group, ctx.leaves, ctx.needs_input_grad[4:], x, local)
        if ctx.deferred is None:
            found = rest()
            return None, None, None, dx and dx.wait(), *found
        ctx.deferred.append(torch.no_grad()(rest))
        return None, None, None, dx and dx.wait(), *(None for _ in ctx.leaves)


def _operand_gradients(
    communicator: Communicator,
    group: EinsumGroup,
    leaves: Tensors,
    needed: Sequence[bool],
    x: Tensor,
    gradients: Sequence[Tensor],
) -> Tensors:
    """Compute the gradients of a group's operands, then of its biases if there are any, from the local x and the local
    `gradients` of the outputs, and reduce them as planned. Those of `leaves` are added to their sums (then None in
    the result); of the others, those `needed` are returned."""
    count = len(group.einsums)
    pending: list[Pending | None] = []
    for e, g, w, n in zip(group.einsums, gradients, leaves, needed, strict=False):
        product = partial(local_einsum(e.x_dims, e.out_dims, e.dims), x, g, None)
        if w is not None and not e.operand.backward:
            add_computed(w, product)
            pending.append(None)
        else:
            pending.append(convert(communicator, product(), e.operand.backward, owned=True) if n else None)
    sums = [
        _bias_gradient(e, g) if n and not absent(g) else None
        for e, g, n in zip(group.einsums, gradients, needed[count:], strict=False)
    ]
    found: list[Tensor | None] = []
    for t, computed in zip(leaves, [*(c.wait() if c else None for c in pending), *sums], strict=True):
        if t is not None and computed is not None:
            add_computed(t, partial(_plus, computed))
        found.append(computed if t is None else None)
    return found


def _bias_gradient(e: Einsum, gradient: Tensor) -> Tensor:
    """Sum the gradient of an einsum's output over the dims that its bias lacks: those of x."""
    return gradient.sum([i for i, d in enumerate(e.out_dims) if d not in e.dims])


def _plus(gradient: Tensor, into: Tensor | None, fresh: bool) -> Tensor:
    """Add a gradient to the sum `into`, if there is one."""
    return gradient if into is None else into.copy_(gradient) if fresh else into.add_(gradient)


def einsums(
    communicator: Communicator,
    group: EinsumGroup,
    x: Tensor,
    operands: Sequence[Tensor],
    biases: Sequence[Tensor] = (),
    *,
    deferred: Deferred | None = None,
) -> Sequence[Tensor]:
    """Compute the outputs (local blocks) of a planned group of einsums of x with several operands, in the group's
    order, with the conversions that the plan lists. A group whose outputs are not converted may add `biases`, one per
    operand, in the product. `deferred`: a list to which the backward pass appends the computation of weight gradients
    instead of running it (zero bubble; None: it runs); groups with panels (SUMMA) ignore it."""
    if group.panels:
        assert not biases
        return summa(communicator, group, apply(communicator, x, group.x), operands)
    if group.local and not any(w.is_leaf for w in operands):  # activations
        triples = zip(operands, group.einsums, biases or [None] * len(operands), strict=True)  # type: ignore[list-item]
        return [local_einsum(e.x_dims, e.dims, e.out_dims)(x, w, bias) for w, e, bias in triples]
    return _Einsums.apply(communicator, group, deferred, x, *operands, *biases)

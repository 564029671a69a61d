"""The planned einsum: one group's conversions and local products as a single differentiable function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.parallel.kernels.leaves import add_gradient
from platform.parallel.kernels.products import local_einsum
from platform.parallel.kernels.summa import summa
from platform.parallel.sharding.convert import Pending, apply, convert
from platform.plan.communication.planned import Einsum, EinsumGroup

Deferred = list[Callable[[], None]]  # each computes and accumulates gradients of parameters when called


class _Einsums(torch.autograd.Function):
    """Autograd function of one planned group of einsums that share x. Forward: issues the gathers of x and all
    operands, multiplies, converts the outputs.

    Backward: the gradient of x is computed first, and its reduction overlaps the computation of the operands'
    gradients. Tensors marked `regathered` in the plan are saved only as stored and gathered again while the output
    gradients are converted. `deferred`: a list that receives the function computing the operands' gradients (zero
    bubble); the operands are then parameters.
    """

    @staticmethod
    def forward(ctx, communicator, group: EinsumGroup, deferred: Deferred | None, x: Tensor, *operands: Tensor):
        ctx.communicator, ctx.group, ctx.deferred = communicator, group, deferred
        ctx.leaves = operands if deferred is not None else ()
        regathered = [group.regathered, *(e.regathered for e in group.einsums)]
        stored = (x, *operands)
        coming = [convert(communicator, w, e.operand.forward) for w, e in zip(operands, group.einsums, strict=True)]
        x = convert(communicator, x, group.x.forward).wait()
        local = [c.wait() for c in coming]
        leaving = [
            convert(communicator, local_einsum(e.x_dims, e.dims, e.out_dims)(x, w), e.output.forward)
            for w, e in zip(local, group.einsums, strict=True)
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
        local = [c.wait() for c in coming]
        products = (
            local_einsum(e.out_dims, e.dims, e.x_dims)(g, w)
            for g, w, e in zip(local, operands, group.einsums, strict=True)
        )
        dx = convert(communicator, _sum(products), group.x.backward) if ctx.needs_input_grad[3] else None

        def gradient(e: Einsum, g: Tensor) -> Pending:
            return convert(communicator, local_einsum(e.x_dims, e.out_dims, e.dims)(x, g), e.operand.backward)

        needed = ctx.needs_input_grad[4:]
        if ctx.deferred is not None:

            @torch.no_grad()
            def compute() -> None:
                """Compute the operands' gradients, reduce them as planned, and add them to `grad`: the deferred half of
                backward."""
                dws = [gradient(e, g) for g, e in zip(local, group.einsums, strict=True)]
                for leaf, dw in zip(ctx.leaves, dws, strict=True):
                    add_gradient(leaf, dw.wait())

            ctx.deferred.append(compute)
            return None, None, None, dx and dx.wait(), *(None for _ in needed)
        dws = [gradient(e, g) if n else None for g, e, n in zip(local, group.einsums, needed, strict=True)]
        return None, None, None, dx and dx.wait(), *(dw and dw.wait() for dw in dws)


def _sum(parts) -> Tensor:
    total = next(parts)
    for part in parts:
        total = total + part
    return total


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
    order, with the conversions that the plan lists. A group without conversions is plain local products, which may add
    `biases`, one per operand. `deferred`: a list to which the backward pass appends the computation of weight gradients
    instead of running it (zero bubble; None: it runs); groups with panels (SUMMA) ignore it."""
    if group.panels:
        return summa(communicator, group, apply(communicator, x, group.x), operands)
    if deferred is None and group.local:
        triples = zip(operands, group.einsums, biases or [None] * len(operands), strict=True)  # type: ignore[list-item]
        return [local_einsum(e.x_dims, e.dims, e.out_dims)(x, w, bias) for w, e, bias in triples]
    assert not biases
    return _Einsums.apply(communicator, group, deferred, x, *operands)

"""The planned einsum: one group's conversions and local products as a single differentiable function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.parallel.kernels.leaves import accumulate
from platform.parallel.kernels.products import local_einsum
from platform.parallel.kernels.summa import summa
from platform.parallel.sharding.convert import Pending, apply, convert
from platform.plan.communication.planned import Group, GroupMember

Deferred = list[Callable[[], None]]  # each computes and accumulates gradients of parameters when called


class _Einsums(torch.autograd.Function):
    """Autograd function of a group. Forward: issues the gathers of x and all operands, multiplies, converts results.

    Backward: the gradient of x is computed first, and its reduction overlaps the computation of the operands'
    gradients. Tensors marked `again` in the plan are saved only as stored and gathered again while the output gradients
    are converted. `deferred`: a list that receives the function computing the operands' gradients (zero bubble); the
    operands are then parameters.
    """

    @staticmethod
    def forward(ctx, communicator, group: Group, deferred: Deferred | None, x: Tensor, *operands: Tensor):
        ctx.communicator, ctx.group, ctx.deferred = communicator, group, deferred
        ctx.leaves = operands if deferred is not None else ()
        again = [group.again, *(m.again for m in group.members)]
        stored = (x, *operands)
        coming = [convert(communicator, w, m.operand.forward) for w, m in zip(operands, group.members, strict=True)]
        x = convert(communicator, x, group.x.forward).wait()
        local = [c.wait() for c in coming]
        leaving = [
            convert(communicator, local_einsum(m.x_dims, m.dims, m.out_dims)(x, w), m.output.forward)
            for w, m in zip(local, group.members, strict=True)
        ]
        ctx.save_for_backward(*(s if a else t for s, t, a in zip(stored, (x, *local), again, strict=True)))
        return tuple(c.wait() for c in leaving)

    @staticmethod
    def backward(ctx, *gradients):
        x, *operands = ctx.saved_tensors
        communicator, members = ctx.communicator, ctx.group.members
        coming = [convert(communicator, g, m.output.backward) for g, m in zip(gradients, members, strict=True)]
        regathered = [
            convert(communicator, w, m.operand.forward if m.again else ())
            for w, m in zip(operands, members, strict=True)
        ]
        if ctx.group.again:
            x = convert(communicator, x, ctx.group.x.forward).wait()
        operands = [c.wait() for c in regathered]
        local = [c.wait() for c in coming]
        products = (
            local_einsum(m.out_dims, m.dims, m.x_dims)(g, w) for g, w, m in zip(local, operands, members, strict=True)
        )
        dx = convert(communicator, _sum(products), ctx.group.x.backward) if ctx.needs_input_grad[3] else None

        def gradient(m: GroupMember, g: Tensor) -> Pending:
            return convert(communicator, local_einsum(m.x_dims, m.out_dims, m.dims)(x, g), m.operand.backward)

        needed = ctx.needs_input_grad[4:]
        if ctx.deferred is not None:

            @torch.no_grad()
            def compute() -> None:
                dws = [gradient(m, g) for g, m in zip(local, members, strict=True)]
                for leaf, dw in zip(ctx.leaves, dws, strict=True):
                    accumulate(leaf, dw.wait())

            ctx.deferred.append(compute)
            return None, None, None, dx and dx.wait(), *(None for _ in needed)
        dws = [gradient(m, g) if n else None for g, m, n in zip(local, members, needed, strict=True)]
        return None, None, None, dx and dx.wait(), *(dw and dw.wait() for dw in dws)


def _sum(parts) -> Tensor:
    total = next(parts)
    for part in parts:
        total = total + part
    return total


def einsums(
    communicator: Communicator,
    group: Group,
    x: Tensor,
    operands: Sequence[Tensor],
    biases: Sequence[Tensor] = (),
    *,
    deferred: Deferred | None = None,
) -> Sequence[Tensor]:
    """Compute the outputs of a group, in the order of its members. A group without conversions is plain local products,
    which may add `biases`. `deferred`: see `_Einsums`; groups with panels (SUMMA) ignore it."""
    if group.panels:
        return summa(communicator, group, apply(communicator, x, group.x), operands)
    conversions = [group.x, *(c for m in group.members for c in (m.operand, m.output))]
    if deferred is None and not any(c.forward or c.backward for c in conversions):
        triples = zip(operands, group.members, biases or [None] * len(operands), strict=True)  # type: ignore[list-item]
        return [local_einsum(m.x_dims, m.dims, m.out_dims)(x, w, bias) for w, m, bias in triples]
    assert not biases
    return _Einsums.apply(communicator, group, deferred, x, *operands)

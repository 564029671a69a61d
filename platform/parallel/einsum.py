"""The planned einsum: conversions and local products of one group of einsums as one differentiable function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod

import torch
from torch import Tensor

from platform.parallel.convert import convert
from platform.parallel.groups import Communicator
from platform.plan.collectives import Group

Dims = tuple[str, ...]


@cache
def local_einsum(a: Dims, b: Dims, out: Dims) -> Callable[..., Tensor]:
    """A function (x, y, bias=None) of two local tensors with dims `a` and `b` that gives dims `out`; the bias has the
    dims of y that are in `out`.

    One matrix product of views where the dims fall into contiguous runs (rows, contracted, columns), else torch.einsum.
    """
    contracted = tuple(d for d in a if d in b)
    rows, columns = tuple(d for d in a if d not in b), tuple(d for d in b if d not in a)
    a_first, b_first = a == rows + contracted, b == contracted + columns
    simple = (
        (a_first or a == contracted + rows)
        and (b_first or b == columns + contracted)
        and out in (rows + columns, columns + rows)
        and contracted
    )
    if not simple:
        names = {d: chr(ord("a") + i) for i, d in enumerate(dict.fromkeys(a + b))}
        equation = "{},{}->{}".format(*("".join(names[d] for d in dims) for dims in (a, b, out)))
        return lambda x, y, bias=None: torch.einsum(equation, x, y) + (0 if bias is None else bias)
    na, nb, nc = len(rows), len(columns), len(contracted)

    def product(x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
        if a_first:
            row_shape, x = x.shape[:na], x.reshape(prod(x.shape[:na]), -1)
        else:
            row_shape, x = x.shape[nc:], x.reshape(prod(x.shape[:nc]), -1).t()
        if b_first:
            column_shape, y = y.shape[nc:], y.reshape(prod(y.shape[:nc]), -1)
        else:
            column_shape, y = y.shape[:nb], y.reshape(prod(y.shape[:nb]), -1).t()
        if out == rows + columns:
            z = x @ y if bias is None else torch.addmm(bias.reshape(-1), x, y)
            return z.view(*row_shape, *column_shape)
        assert bias is None
        return (y.t() @ x.t()).view(*column_shape, *row_shape)

    return product


class _Einsums(torch.autograd.Function):
    """Forward: gather x and the operands (all issued first), multiply, convert the results as they come.

    Backward: the gradient of x is computed first and its reduction runs while the operands' gradients are computed.
    """

    @staticmethod
    def forward(ctx, communicator, group: Group, x: Tensor, *operands: Tensor):
        coming = [convert(communicator, w, m.operand.forward) for w, m in zip(operands, group.members, strict=True)]
        x = convert(communicator, x, group.x.forward).wait()
        local = [c.wait() for c in coming]
        leaving = [
            convert(communicator, local_einsum(m.x_dims, m.dims, m.out_dims)(x, w), m.output.forward)
            for w, m in zip(local, group.members, strict=True)
        ]
        ctx.communicator, ctx.group = communicator, group
        ctx.save_for_backward(x, *local)
        return tuple(c.wait() for c in leaving)

    @staticmethod
    def backward(ctx, *gradients):
        x, *operands = ctx.saved_tensors
        communicator, members = ctx.communicator, ctx.group.members
        coming = [convert(communicator, g, m.output.backward) for g, m in zip(gradients, members, strict=True)]
        local = [c.wait() for c in coming]
        products = (
            local_einsum(m.out_dims, m.dims, m.x_dims)(g, w) for g, w, m in zip(local, operands, members, strict=True)
        )
        dx = convert(communicator, _sum(products), ctx.group.x.backward) if ctx.needs_input_grad[2] else None
        dws = [
            convert(communicator, local_einsum(m.x_dims, m.out_dims, m.dims)(x, g), m.operand.backward)
            if needed
            else None
            for g, m, needed in zip(local, members, ctx.needs_input_grad[3:], strict=True)
        ]
        return None, None, dx and dx.wait(), *(dw and dw.wait() for dw in dws)


def _sum(parts) -> Tensor:
    total = next(parts)
    for part in parts:
        total = total + part
    return total


def einsums(
    communicator: Communicator, group: Group, x: Tensor, operands: Sequence[Tensor], biases: Sequence[Tensor] = ()
) -> Sequence[Tensor]:
    """The results of a group, in the order of its members. Without any conversion, plain local products, which may add
    biases."""
    conversions = [group.x, *(c for m in group.members for c in (m.operand, m.output))]
    if not any(c.forward or c.backward for c in conversions):
        triples = zip(operands, group.members, biases or [None] * len(operands), strict=True)  # type: ignore[list-item]
        return [local_einsum(m.x_dims, m.dims, m.out_dims)(x, w, bias) for w, m, bias in triples]
    assert not biases
    return _Einsums.apply(communicator, group, x, *operands)

"""`convert`: the one place where a tensor changes its layout, asynchronously and, as `Convert`, differentiably."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from platform.parallel import shards
from platform.parallel.groups import Communicator, Handle
from platform.parallel.traced import Arrived
from platform.plan.rule import Conversion, Step


class Pending:
    """A tensor on its way to another layout; `wait` where the value is used."""

    def __init__(self, communicator: Communicator, x: Tensor, steps: Sequence[Step], owned: bool):
        self._communicator, self._owned = communicator, owned
        self._x, self._steps = x, steps
        self._handle: Handle | Arrived | None = None
        self._advance()

    def _advance(self) -> None:
        """Takes free steps until a collective is under way or nothing is left."""
        self._handle = None
        for i, step in enumerate(self._steps):
            if step.op == "slice":
                extent = self._x.shape[step.dim] // self._communicator.mesh.extent(step.axes)
                self._x = self._x.narrow(step.dim, self._communicator.index(step.axes) * extent, extent)
            elif step.op == "pad":
                extent = self._x.shape[step.dim]
                shape = list(self._x.shape)
                shape[step.dim] *= self._communicator.mesh.extent(step.axes)
                whole = self._x.new_zeros(shape)
                whole.narrow(step.dim, self._communicator.index(step.axes) * extent, extent).copy_(self._x)
                self._x = whole
            elif step.op == "flatten":
                self._x = shards.flatten(self._x, self._communicator.mesh.extent(step.axes))
            elif step.op == "unflatten":
                self._x = shards.unflatten(self._x, step.shape)
            else:
                launch = self._communicator.launch
                self._handle = launch(step.op, self._x, step.axes, step.dim, step.joined, owned=self._owned)
                self._steps = self._steps[i + 1 :]
                return
        self._steps = ()

    def proceed(self) -> None:
        """Waits for the collective that is under way, if any, and issues the next."""
        if self._handle:
            self._x = self._handle.wait()
            self._advance()

    def wait(self) -> Tensor:
        while self._handle:
            self.proceed()
        return self._x


def convert(communicator: Communicator, x: Tensor, steps: Sequence[Step], *, owned: bool = False) -> Pending:
    """Starts the moves `steps` of a local tensor: the first collective is issued at once. `owned`: reductions may
    work in it."""
    return Pending(communicator, x, steps, owned)


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, communicator, conversion):
        ctx.communicator, ctx.conversion = communicator, conversion
        out = convert(communicator, x, conversion.forward).wait()
        return out.view_as(out) if out is x else out

    @staticmethod
    def backward(ctx, gradient):
        return convert(ctx.communicator, gradient, ctx.conversion.backward).wait(), None, None


def apply(communicator: Communicator, x: Tensor, conversion: Conversion) -> Tensor:
    """A differentiable conversion: `forward` moves the value, `backward` its gradient."""
    if not conversion.forward and not conversion.backward:
        return x
    return _Convert.apply(x, communicator, conversion)

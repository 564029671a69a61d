"""SUMMA (van de Geijn and Watts 1997; the 2-D baseline of 3-D tensor parallelism, Bian et al. 2021): products of split
matrices panel by panel.

With x [rows, k] and w [k, columns], k split over one axis in x and over another in w, and neither operand ever whole:

    AB    y    = sum over panels t of  broadcast(x_t) broadcast(w_t)
    AB^T  dx_t = reduce to its owner of  dy broadcast(w_t)^T
    A^TB  dw_t = reduce to its owner of  broadcast(x_t)^T dy
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.parallel.kernels.products import local_einsum
from platform.parallel.sharding.convert import absent, convert
from platform.plan.communication.planned import Einsum, EinsumGroup, Panels


class _Split:
    """Operand of a SUMMA product: the `local` block, cut into panels along the contracted dim (at position `dim`),
    which is split over `axes`."""

    def __init__(self, communicator: Communicator, panels: Panels, axes: Sequence[str], local: Tensor, dim: int):
        """Cut `local`, a rank's block of an operand of SUMMA, along `dim` into the panels that it owns on `axes`."""
        self.communicator, self.axes, self.local, self.dim = communicator, axes, local, dim
        self.per_owner = panels.count // communicator.mesh.extent(axes)
        self.extent = local.shape[dim] // self.per_owner
        self.index = communicator.index(axes)

    def mine(self, t: int, of: Tensor) -> Tensor | None:
        """Return the view of SUMMA panel `t` in `of`, laid out as this operand; None if another rank owns the panel."""
        owner, place = divmod(t, self.per_owner)
        return of.narrow(self.dim, place * self.extent, self.extent) if owner == self.index else None

    def broadcast(self, t: int) -> Callable[[], Tensor]:
        """Start the broadcast of this operand's SUMMA panel number t from the rank that owns it along the split's axes;
        the returned function waits for it and returns the panel."""
        mine = self.mine(t, self.local)
        if not self.axes:
            assert mine is not None
            return lambda: mine
        shape = list(self.local.shape)
        shape[self.dim] = self.extent
        panel = self.local.new_empty(shape) if mine is None else mine
        return self.communicator.launch("broadcast", panel, self.axes, root=t // self.per_owner).wait

    def reduce(self, t: int, part: Tensor, into: Tensor) -> Callable[[], None]:
        """Start summing `part`, every rank's contribution to panel number t of this operand's gradient, to the rank
        that owns the panel; the returned function waits, and on the owner writes the sum into its gradient block
        `into`."""
        handle = None
        if self.axes:
            handle = self.communicator.launch("reduce", part, self.axes, root=t // self.per_owner, owned=True)
        mine = self.mine(t, into)

        def finish() -> None:
            """Wait for the panel's sum; write it into this rank's gradient if it owns the panel."""
            total = handle.wait() if handle else part
            if mine is not None:
                mine.copy_(total)

        return finish


def _splits(communicator: Communicator, group: EinsumGroup, x: Tensor, operands: Sequence[Tensor]) -> list[_Split]:
    """Return x and the operands of a SUMMA group, in this order, as `_Split`s along the contracted dim."""
    panels = group.panels
    assert panels is not None
    split = [_Split(communicator, panels, panels.x_axes, x, group.x_dims.index(panels.dim))]
    for e, w in zip(group.einsums, operands, strict=True):
        split.append(_Split(communicator, panels, panels.operand_axes, w, e.dims.index(panels.dim)))
    return split


def _panels_in_turn(splits: Sequence[_Split], count: int):
    """Yield (t, panel t of every SUMMA operand) for t < `count`; broadcasts of panel t + 1 overlap the use of t."""
    coming = [s.broadcast(0) for s in splits]
    for t in range(count):
        here = [wait() for wait in coming]
        coming = [s.broadcast(t + 1) for s in splits] if t + 1 < count else []
        yield t, here


class _Summa(torch.autograd.Function):
    """Autograd function of a planned group's products with panels: AB forward, AB^T (gradient of x) and A^TB (gradients
    of the operands) backward."""

    @staticmethod
    def forward(ctx, communicator, group: EinsumGroup, x: Tensor, *operands: Tensor):
        """Return the products of x with the operands, summed over panels that their owners broadcast in turn."""
        ctx.communicator, ctx.group = communicator, group
        local = _enter(communicator, group.einsums, operands)
        kept = (w if e.regathered else here for w, here, e in zip(operands, local, group.einsums, strict=True))
        ctx.save_for_backward(x, *kept)
        assert group.panels is not None
        out: list[Tensor] = []
        for _, (xt, *ws) in _panels_in_turn(_splits(communicator, group, x, local), group.panels.count):
            pairs = zip(group.einsums, ws, strict=True)
            products = [local_einsum(e.x_dims, e.dims, e.out_dims)(xt, w) for e, w in pairs]
            out = [y.add_(p) for y, p in zip(out, products, strict=True)] if out else products
        return tuple(out)

    @staticmethod
    def backward(ctx, *gradients):
        """Return the gradients of x and operands, panel by panel, each summed to the rank that owns the panel."""
        x, *operands = ctx.saved_tensors
        group = ctx.group
        if any(e.regathered for e in group.einsums):  # then all einsums: their operands are parameters
            operands = _enter(ctx.communicator, group.einsums, operands)
        splits = _splits(ctx.communicator, group, x, operands)
        dx, *dws = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, *operands))
        finish = []
        for t, (xt, *ws) in _panels_in_turn(splits, group.panels.count):
            triples = list(zip(group.einsums, gradients, ws, strict=True))
            parts = [local_einsum(e.out_dims, e.dims, e.x_dims)(g, w) for e, g, w in triples]
            finish.append(splits[0].reduce(t, torch.stack(parts).sum(0) if len(parts) > 1 else parts[0], dx))
            for split, (e, g, _), dw in zip(splits[1:], triples, dws, strict=True):
                finish.append(split.reduce(t, local_einsum(e.x_dims, e.out_dims, e.dims)(xt, g), dw))
        for done in finish:
            done()
        leaving = [convert(ctx.communicator, w, e.operand.backward) for w, e in zip(dws, group.einsums, strict=True)]
        return None, None, dx, *(c.wait() for c in leaving)


def _enter(communicator: Communicator, einsums: Sequence[Einsum], operands: Sequence[Tensor]) -> Sequence[Tensor]:
    """Convert a SUMMA group's operands to the operation's layout, except along the contracted dim, cut into panels."""
    coming = [convert(communicator, w, e.operand.forward) for w, e in zip(operands, einsums, strict=True)]
    return [c.wait() for c in coming]


def summa(communicator: Communicator, group: EinsumGroup, x: Tensor, operands: Sequence[Tensor]) -> Sequence[Tensor]:
    """Compute the outputs of a planned group of einsums by SUMMA, panel by panel of the contracted dim, from the local
    block of x (already converted) and the operands as stored. Outputs of an absent (empty) x are absent."""
    if absent(x):
        return [x + w for w in operands]
    return _Summa.apply(communicator, group, x, *operands)

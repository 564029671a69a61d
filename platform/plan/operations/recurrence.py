"""Gated linear recurrence over length (the core of RG-LRU, De et al. 2024, and of minGRU, Feng et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from platform.plan.operations.op import BlockOp, Value
from platform.plan.scheme import ModelMistake


class RecurrenceOp(BlockOp):
    """Activation h of type `spec` [.. length ..] with h[t] = gate[t] * h[t - 1] + x[t] along length, element by
    element, and h[-1] = 0. Where length is split, it is gathered first: step t needs all before it."""

    def record_operation(self, ops, name, gate, x, spec):
        if "length" not in spec.dims:
            raise ModelMistake(name, f"a recurrence goes along length, which {spec} lacks")
        if ops.cache:
            raise ModelMistake(name, "a recurrence does not see the passes before")
        return ops.record_operation(self.kind, name, [gate, x], [spec, spec], [spec])

    def whole_dims(self, operation) -> Sequence[str]:
        """Return length, which a rank needs whole, as each step needs all before it."""
        return ("length",)

    def run_on_blocks(self, ops, planned, name, gate, x, spec):
        """Compute the gated linear recurrence along length of this rank's blocks, in the type of statistics."""
        widened = ops.kernels.statistics.widen_dtype
        return _scan_function().apply(widened(gate), widened(x), spec.dims.index("length")).to(x.dtype)

    def meter_memory(self, ops, planned, name, gate, x, spec) -> Value:
        """Count the bytes of a gated linear recurrence: it keeps gates and result, in the type of statistics."""
        n, narrow = x.elements, ops.wide != ops.plan.itemsize["compute"]
        wide, kept_result = ops.widened(gate.storage, n), ops.new(n, ops.wide)
        ops.new(2 * n, ops.wide)  # while it scans: products of gates, and one product more
        out = ops.tensor(n) if narrow else Value(kept_result, n)
        # a scan again, of the gradient; or later, where they are cast, both gradients in the type of statistics
        return ops.plain(out, [gate, x], (wide, kept_result), 2 * n if narrow else n, ops.wide)


@cache
def _scan_function() -> Any:
    """Return the autograd function of the recurrence operation, called as apply(gate, x, dim)."""
    import torch

    def scan_recurrence(gate, x, dim, way=1):
        """Compute the recurrence operation's h[t] = gate[t] h[t-1] + x[t] along `dim` in log2(length) rounds, in which
        each step takes in twice as many before it (Hillis, Steele 1986); `way` -1: from the last step to the first."""
        h, products, n, reach = x.clone(), gate.clone(), x.shape[dim], 1
        while reach < n:
            late, early = (reach, 0) if way > 0 else (0, reach)
            decay = products.narrow(dim, late, n - reach)
            h.narrow(dim, late, n - reach).add_(decay * h.narrow(dim, early, n - reach))
            decay.copy_(decay * products.narrow(dim, early, n - reach))
            reach *= 2
        return h

    class Scan(torch.autograd.Function):
        """Keeps gates and result: dx[t] = g[t] + gate[t + 1] * dx[t + 1], dgate[t] = dx[t] * h[t - 1]."""

        @staticmethod
        def forward(ctx, gate, x, dim):
            """Return the recurrence operation's h: h[t] = gate[t] h[t-1] + x[t] along `dim`, from 0 on."""
            h = scan_recurrence(gate, x, dim)
            ctx.save_for_backward(gate, h)
            ctx.dim = dim
            return h

        @staticmethod
        def backward(ctx, gradient):
            """Return the recurrence operation's gradients of gate and x, by a recurrence from the last step on."""
            (gate, h), dim = ctx.saved_tensors, ctx.dim
            dx = scan_recurrence(gate.roll(-1, dim), gradient, dim, -1)  # what rolls to the end is never read
            before = torch.zeros_like(h)
            n = h.shape[dim] - 1
            torch.mul(dx.narrow(dim, 1, n), h.narrow(dim, 0, n), out=before.narrow(dim, 1, n))
            return before, dx, None

    return Scan

"""Squared distance to a target."""

from __future__ import annotations

from platform.plan.operations.op import Op, planned, reading


class SquaredErrorOp(Op):
    """Loss half the sum of (y - target)^2 over this rank's elements; the target takes no gradient. Positions at which
    the data tensor `ids` is padding do not count."""

    def record(self, ops, name, y, target, spec, ids):
        ops.check(target, spec)
        return ops.record(self.kind, name, [y], [spec], [], [ids])

    def plan(self, planner, operation):
        """Plan the squared-error loss: ranks sum their own elements, and losses add up over axes that split them."""
        spec = operation.inputs[0]
        layout = planner.layout(spec)
        return planned(planner, operation, layout, **reading(planner, spec, layout))

    def run(self, ops, name, y, target, spec, ids):
        """Compute the sum of squared errors of this rank's elements whose label is not padding."""
        padding, widened = ids[self.kind, name] < 0, ops.kernels.statistics.widened
        error = widened(y) - widened(target.detach())
        if not ops.absent(y):
            kept = [d for d in spec.dims if d in ("length", "batch")]
            rows = padding if kept == ["length", "batch"] else padding.t()
            shape = dict(zip(spec.dims, y.shape, strict=True))
            error = error.masked_fill(rows.reshape([shape[d] if d in kept else 1 for d in spec.dims]), 0)
        return error.square().double().sum() / 2

    def meter(self, ops, name, y, target, spec, ids):
        """Count the bytes of the squared-error loss: the errors, kept for the backward pass, and their squares."""
        n = y.elements
        error, square = ops.new(n, ops.wide), ops.new(n, ops.wide)
        ops.new(n, 8)  # the squares, as they are summed
        del square
        return ops.plain(ops.tensor(1), [y], (error,), 3 * n, ops.wide)

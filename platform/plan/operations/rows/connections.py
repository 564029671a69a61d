"""Dropout, jitter, and residual connections with dropout of the added activation."""

from __future__ import annotations

from platform.plan.language.functions import EPS
from platform.plan.operations.op import BlockOp, Op
from platform.plan.operations.storages import INTEGER

_PIECE = 1 << 15  # elements whose mask is drawn at once, as platform.parallel.kernels.dropout.DRAWN_AT_ONCE


class DropoutOp(BlockOp):
    """Activation of which elements are dropped with probability `dropout_rate`, by masks that do not depend on the
    plan."""

    def record(self, ops, name, x, spec):
        if not ops.dropout_rate:
            ops.check(x, spec)
            return x
        return ops.record(self.kind, name, [x], [spec], [spec])

    def run(self, ops, found, name, x, spec):
        """Apply dropout to this rank's block of x, by the mask of this step and microbatch; x itself if none drops."""
        drawing, kernel = ops.drawing(name, spec, x.device), ops.kernels.dropout
        draw = ops.region(kernel.dropped) if ops.compiles else kernel.in_pieces
        return kernel.dropout(x, drawing, draw) if drawing else x

    def meter(self, ops, found, name, x, spec):
        """Count the bytes of dropout: its result, and the random integers that draw one piece of the mask."""
        if not ops.dropout_rate:
            return x
        drawn = 2 * min(x.elements, _PIECE)  # the states of the random numbers of a piece, before and after a shift
        out = ops.block(spec)
        ops.integers(drawn)
        return ops.plain(out, [x], (), drawn, INTEGER)


class JitterOp(BlockOp):
    """Activation of which each element is multiplied by a uniform number in [1 - `rate`, 1 + `rate`) in training, the
    same under every plan."""

    def record(self, ops, name, x, spec, rate):
        if not rate or ops.cache:
            ops.check(x, spec)
            return x
        return ops.record(self.kind, name, [x], [spec], [spec], rate=rate)

    def run(self, ops, found, name, x, spec, rate):
        """Multiply this rank's block of x by the numbers of this step and microbatch."""
        drawing = ops.drawing(name, spec, x.device, self.kind, rate)
        return ops.kernels.dropout.jitter(x, drawing) if drawing else x

    def meter(self, ops, found, name, x, spec, rate):
        """Count the bytes of the product, and of the random numbers that draw one piece of it."""
        if not rate or ops.cache:
            return x
        drawn, out = 2 * min(x.elements, _PIECE), ops.block(spec)
        ops.integers(drawn)
        return ops.plain(out, [x], (), drawn, INTEGER)


class ResidualOp(Op):
    """x plus y, both of type `spec`, with dropout `name` of y: a residual connection."""

    def compose(self, ops, name, x, y, spec):
        """Compose the residual connection x + dropout(y) from the model's operations add and dropout."""
        return ops.pointwise("add", x, ops.dropout(name, y, spec))

    def run(self, ops, name, x, y, spec):
        """Compute the residual sum x + dropout(y), in one kernel if compiled."""
        drawing = None if ops.absent(x) or not ops.compiles else ops.drawing(name, spec, x.device)
        return (
            ops.kernels.residual.residual(x, y, drawing, ops.region) if drawing else self.compose(ops, name, x, y, spec)
        )


class ResidualNormOp(Op):
    """The `residual` of x and y, and the `norm` of it, which the next layer reads."""

    def compose(self, ops, name, x, y, spec, kind, gain, bias, eps=EPS):
        """Compose the residual connection and its norm from the model's operations residual and norm."""
        total = ops.residual(name, x, y, spec)
        return total, ops.norm(total, spec, kind, gain, bias, eps)

    def run(self, ops, name, x, y, spec, kind, gain, bias, eps=EPS):
        """Compute the residual sum x + dropout(y) and its norm, in one kernel if compiled and the dim is whole."""
        found = ops.planned("norm", gain.name)
        if ops.absent(x) or not ops.compiles or found.over:
            return self.compose(ops, name, x, y, spec, kind, gain, bias, eps)
        first, *second = ops.converted(found)
        drawing = ops.drawing(name, spec, x.device)
        last = second[0] if bias else None
        return ops.kernels.residual.residual_norm(x, y, first, last, kind, eps, drawing, ops.region)

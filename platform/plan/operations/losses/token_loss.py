"""Losses of tokens, such as of experts' uneven load, added to the loss of their labels."""

from __future__ import annotations

from platform.plan.language.functions import LABEL_WEIGHTS
from platform.plan.operations.op import Op, planned, reading


class TokenLossOp(Op):
    """Loss plus, in training, the sum over this rank's tokens of x, of type `spec` [length batch], where the data
    tensor `labels` has a label: one times as much as the label counts. So it is divided by what the labels' loss is."""

    def record(self, ops, name, loss, x, spec, labels):
        reads = [labels, LABEL_WEIGHTS if ops.loss.weighted else None]
        return ops.record(self.kind, name, [x], [spec], [], reads)

    def plan(self, planner, operation):
        """Plan a loss that each rank computes of its own tokens."""
        spec = operation.inputs[0]
        layout = planner.layout(spec)
        return planned(planner, operation, layout, **reading(planner, spec, layout))

    def run(self, ops, name, loss, x, spec, labels):
        """Add the sum of this rank's losses of tokens to the loss of their labels."""
        if ops.absent(x) or not ops.position.training:
            return loss + x.sum() * 0.0
        targets = ops.targets(ops.planned(self.kind, name), labels)
        counts = (targets.labels >= 0).to(loss.dtype)
        if targets.weights is not None:
            counts = counts * targets.weights.abs()
        return loss + (x.flatten().to(loss.dtype) * counts).sum()

    def meter(self, ops, name, loss, x, spec, labels):
        """Count the memory of what each token counts, which is kept."""
        n = x.elements
        ops.new(2 * n, 8)
        return ops.plain(ops.tensor(1), [loss, x], (ops.new(n, 8),))

"""Cross-entropy of logits, or what a run names in its place."""

from __future__ import annotations

from math import prod

from platform.plan.communication.loss_chunks import chunk_rows
from platform.plan.language.functions import CROSS_ENTROPY, LABEL_WEIGHTS
from platform.plan.operations.op import Op, planned, reading


class CrossEntropyOp(Op):
    """Sum over this rank's tokens of -log softmax(logits)[label] over vocab; never gathers logits. In training the plan
    may name another loss, and weights of labels. Padding in the data tensor `labels` does not count. `smoothing`: the
    share of the target spread evenly over vocab, in training (Szegedy et al. 2016)."""

    def record(self, ops, name, logits, spec, labels, smoothing=0.0):
        reads, more = [labels, LABEL_WEIGHTS if ops.loss.weighted else None], {"loss": ops.loss.name}
        return ops.record(self.kind, name, [logits], [spec], [], reads, smoothing=smoothing, **more)

    def plan(self, planner, operation):
        """Plan a loss that, over a split vocab, all-reduces the maximum and then the sums of each row; it reads the
        labels, and their weights if they have any."""
        spec = operation.inputs[0]
        layout, shape = planner.layout(spec), planner.shape(spec)
        over = layout["vocab"]
        rows = prod(shape) // shape[spec.dims.index("vocab")]
        sums = 3 if operation["smoothing"] or operation["loss"] != CROSS_ENTROPY else 2
        cuts = planner.cuts_of(spec, layout, [d for d in spec.dims if d != "vocab"])
        found = [
            *planner.statistics(over, layout.only, rows, "forward", cuts=cuts),
            *planner.statistics(over, layout.only, sums * rows, "forward", cuts=cuts),
        ]
        labels = reading(planner, spec, layout.restrict([d for d in spec.dims if d != "vocab"]))
        return planned(planner, operation, layout, statistics=found, over=over, **labels)

    def run(self, ops, name, logits, spec, labels, smoothing=0.0):
        """Compute the loss of this rank's logits, of which ranks may split the vocab, summed over its tokens."""
        found = ops.planned(self.kind, name)
        if ops.absent(logits):
            return logits.sum()
        targets, classes = ops.targets(found, labels), ops.classes(found, spec, smoothing)
        return ops.kernels.loss.cross_entropy(logits, targets, ops.communicator, classes)

    def meter(self, ops, name, logits, spec, labels, smoothing=0.0):
        """Count the memory of the logits' gradient, made in the forward pass, and of one chunk's statistics."""
        loss = ops.tensor(1)
        if not logits.elements:
            return ops.plain(loss, [logits])
        *rows, columns = ops.plan.local_shape(spec)
        gradient = ops.new(logits.elements)
        meter_statistics(ops, prod(rows), columns)
        return ops.plain(loss, [logits], (gradient,))


def meter_statistics(ops, rows: int, columns: int) -> None:
    """Count the memory that the loss of one chunk of tokens takes for the logarithms of its probabilities, and before,
    if the compute type is another, for the logits in the type of statistics."""
    elements = chunk_rows(rows, columns) * columns
    wide = ops.widened(None, elements)  # noqa: F841  (until the logarithms are allocated)
    ops.new(elements, ops.wide)

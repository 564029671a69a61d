"""Means over the tokens of a sequence, for the tokens of another: of a source, for its target."""

from __future__ import annotations

from platform.plan.operations.op import Op, planned, reading


class SequenceMeanOp(Op):
    """Mean of x, of type `spec` [length batch], over the tokens of each sequence that are no padding in the data tensor
    `tokens`, where x is 0: for each token of type `out` [length batch], whose length is another."""

    def record(self, ops, name, x, spec, tokens, out):
        return ops.record(self.kind, name, [x], [spec], [out], [tokens])

    def plan(self, planner, operation):
        """Plan the mean of whole sequences, which is split again along their new length."""
        (spec,), (out,) = operation.inputs, operation.outputs
        layout = planner.layout(spec).restrict(("batch",))
        conversions = [planner.enter(spec, layout, layout.axes), planner.split(out, layout)]
        return planned(planner, operation, layout, conversions, **reading(planner, spec, layout))

    def run(self, ops, name, x, spec, tokens, out):
        """Take the mean, in the type of statistics, of this rank's sequences."""
        enter, leave = ops.planned(self.kind, name).conversions
        x = ops.apply(x, enter)
        if ops.absent(x):
            return ops.apply(x, leave)
        count = (tokens[self.kind, name] >= 0).sum(0).clamp_min(1)
        mean = (ops.kernels.statistics.widened(x).sum(0) / count).to(x.dtype)
        return ops.apply(mean.expand(ops.shape_before(leave)), leave)

    def meter(self, ops, name, x, spec, tokens, out):
        """Count the memory of the means; of the tokens their number is kept."""
        found = ops.planned(self.kind, name)
        enter, leave = found.conversions
        x = ops.apply(x, enter)
        if ops.absent(x):
            return ops.apply(x, leave)
        n = x.elements
        mean = ops.inner(found, leave)
        ops.note([mean], [x], (), lambda gs, _: [ops.new(n)])
        return ops.apply(mean, leave)

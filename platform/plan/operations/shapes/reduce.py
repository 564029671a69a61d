"""Sums, means and maxima over dims."""

from __future__ import annotations

from math import inf, prod

from platform.plan.operations.op import BlockOp, planned
from platform.plan.operations.storages import Saved


class ReduceOp(BlockOp):
    """Sum, mean or max (`function`) of activation x over the dims that `out`, the result's type, lacks; the other dims
    may be reordered and the region may change. If a reduced dim is split over ranks, their partial results are combined
    as an einsum's are. Elements that share the maximum share its gradient equally."""

    def record(self, ops, name, function, x, spec, out):
        return ops.record(self.kind, name, [x], [spec], [out], function=function)

    def plan(self, planner, operation):
        """Plan an einsum of one operand. A maximum over split dims is all-reduced like a statistic, as is the number of
        elements that share it, which its gradient needs; after that every rank has the result."""
        spec, out = operation.inputs[0], operation.outputs[0]
        c = planner.contraction((spec,), out)
        over = tuple(a for d in spec.dims if d not in out.dims for a in c.compute[d])
        leaving, found = c.output, []
        if operation["function"] == "max":
            leaving = planner.split(out, c.compute.restrict(out.dims))
            cuts = planner.cuts_of(out, c.compute.restrict(out.dims), out.dims)
            found = planner.statistics(over, c.compute.only, prod(leaving.before), "forward", cuts=cuts) * 2
        return planned(planner, operation, c.compute, (*c.inputs, leaving), found, over=over)

    def run(self, ops, found, name, function, x, spec, out):
        """Compute the sum, mean or maximum of this rank's block of x; a maximum over split dims is all-reduced."""
        gone = [d for d in spec.dims if d not in out.dims]
        x = ops.without_padding(x, spec, gone, -inf if function == "max" else 0)
        places, kept = [spec.dims.index(d) for d in gone], [d for d in spec.dims if d in out.dims]
        if function == "max":
            y = ops.kernels.statistics.maximum(x, places, ops.communicator, found.over)
        else:
            y = x.sum(places) if gone else x
        if function == "mean":
            y = y / prod(n for d, n in zip(spec.dims, ops.plan.global_shape(spec), strict=True) if d in gone)
        return y.permute([kept.index(d) for d in out.dims])

    def meter(self, ops, found, name, function, x, spec, out):
        """Count the bytes of a sum, mean or maximum of an activation; a maximum keeps what its gradient needs."""
        y = ops.inner(found, found.conversions[-1])
        saved: Saved = ()
        if function == "max":
            # each element's share of the gradient where a reduced dim is split, else input and result
            saved = (ops.new(x.elements, ops.wide),) if found.over else (x.storage, y.storage)
        return ops.plain(y, [x], saved)

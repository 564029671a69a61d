"""Sums of an activation and a parameter."""

from __future__ import annotations

from platform.plan.operations.op import BlockOp, with_vectors


class ShiftOp(BlockOp):
    """Activation plus a parameter (a bias, a position table), broadcast over the dims that the parameter lacks; the sum
    is in the activation's type. Of a table with the dim positions, a sequence takes as many rows as it has tokens. Rows
    of experts have `counts`: each is added the vector of its expert."""

    wide = "inputs", "outputs"

    def record(self, ops, x, spec, parameter, counts=None):
        of_rows = {} if counts is None else {"layer": counts}
        return ops.record(self.kind, parameter.name, [x], [spec, parameter], [spec], **of_rows)

    def plan(self, planner, operation):
        """Plan adding a parameter, such as a bias, in its activation's layout, to which it is converted."""
        return with_vectors(planner, operation)

    def run(self, ops, found, x, spec, parameter, counts=None):
        """Add the parameter, a bias or a table of positions, to this rank's block of x."""
        if counts is not None:
            return x + ops.kernels.products.vectors_of_rows(counts, parameter)
        (dims,) = (p.dims for p in found.operation.parameters)
        if dims[0] == "positions":
            from torch import cat

            rows = [parameter.narrow(0, first, n) for first, n in ops.stretches(spec, "length")]
            parameter, dims = cat(rows) if len(rows) > 1 else rows[0], ("length", *dims[1:])
        assert tuple(d for d in spec.dims if d in dims) == dims
        for i, d in enumerate(spec.dims):
            if d not in dims:
                parameter = parameter.unsqueeze(i)
        return x + parameter

    def meter(self, ops, found, x, spec, parameter, counts=None):
        """Count the memory of the sum of an activation and a parameter, of which nothing is kept."""
        vectors = ops.new(x.elements if counts is not None else 0)  # noqa: F841  (until they are added)
        return ops.sum(ops.block(spec), [x, parameter])

"""Sums of an activation and a parameter."""

from __future__ import annotations

from platform.plan.operations.op import BlockOp, with_vectors


class ShiftOp(BlockOp):
    """Activation plus a parameter (a bias, a position table), broadcast over the dims that the parameter lacks; the sum
    is in the activation's type."""

    wide = "inputs", "outputs"

    def record(self, ops, x, spec, parameter):
        return ops.record(self.kind, parameter.name, [x], [spec, parameter], [spec])

    def plan(self, planner, operation):
        """Plan adding a parameter, such as a bias, in its activation's layout, to which it is converted."""
        return with_vectors(planner, operation)

    def run(self, ops, found, x, spec, parameter):
        """Add the parameter, a bias or a table of positions, to this rank's block of x."""
        (dims,) = (p.dims for p in found.operation.parameters)
        assert tuple(d for d in spec.dims if d in dims) == dims
        for i, d in enumerate(spec.dims):
            if d not in dims:
                parameter = parameter.unsqueeze(i)
        return x + parameter

    def meter(self, ops, found, x, spec, parameter):
        """Count the memory of the sum of an activation and a parameter, of which nothing is kept."""
        return ops.sum(ops.block(spec), [x, parameter])

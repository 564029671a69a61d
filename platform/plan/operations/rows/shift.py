"""Sums of an activation and a parameter."""

from __future__ import annotations

from platform.plan.operations.op import Op, where_present, with_vectors


class ShiftOp(Op):
    """Activation plus a parameter (a bias, a position table), broadcast over the dims that the parameter lacks."""

    def record(self, ops, x, spec, parameter):
        return ops.record(self.kind, parameter.name, [x], [spec, parameter], [spec])

    def plan(self, planner, operation):
        return with_vectors(planner, operation)

    @where_present
    def run(self, ops, x, spec, parameter):
        (p,) = ops.converted(ops.planned(self.kind, parameter.name))
        assert tuple(d for d in spec.dims if d in parameter.dims) == parameter.dims
        for i, d in enumerate(spec.dims):
            if d not in parameter.dims:
                p = p.unsqueeze(i)
        return x + p

    @where_present
    def meter(self, ops, x, spec, parameter):
        (p,) = ops.converted(ops.planned(self.kind, parameter.name))
        out, size = ops.block(spec), p.elements
        ops.note([out], [x, p], (), lambda gs, _: [gs[0], ops.new(size)])
        return out

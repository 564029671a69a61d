"""Normalisation over the last dim, or the last dims together."""

from __future__ import annotations

from math import prod

from platform.plan.language.functions import EPS
from platform.plan.operations.op import BlockOp, with_vectors
from platform.plan.operations.storages import Value


class NormOp(BlockOp):
    """Normalisation `kind`, LayerNorm or RMSNorm, of an activation over the dims of the parameters `gain` and `bias`,
    its last: d_model, d_kv, or the heads and d_kv of a token's query together. `eps` is added to the variance."""

    def record(self, ops, x, spec, kind, gain, bias, eps=EPS):
        parameters = [gain] if bias is None else [gain, bias]
        return ops.record(self.kind, gain.name, [x], [spec, *parameters], [spec], norm=kind, eps=eps)

    def plan(self, planner, operation):
        """Plan LayerNorm or RMSNorm: its statistics are merged by collectives over the axes that split its dims."""
        spec, dims = operation.inputs[0], operation.parameters[0].dims
        have = planner.layout(spec)
        over, rows = tuple(a for d in dims for a in have[d]), prod(planner.shape(spec)[: -len(dims)])
        cuts = planner.cuts_of(spec, have, spec.dims[: -len(dims)])
        op, merged = ("all_gather", 2 * rows) if operation["norm"] == "layernorm" else ("all_reduce", rows)
        found = [
            *planner.statistics(over, have.only, merged, "forward", op, cuts),
            *planner.statistics(over, have.only, merged, "backward", cuts=cuts),
        ]
        return with_vectors(planner, operation, found, over=over)

    def run(self, ops, found, x, spec, kind, gain, bias, eps=EPS):
        """Compute LayerNorm or RMSNorm of this rank's block of x, merging statistics over a split dim."""
        statistics = ops.kernels.statistics
        if ops.compiles and kind == "rmsnorm" and not found.over:  # LayerNorm is one kernel as it is
            return ops.region(statistics.rms_norm)(x, gain, eps)
        widths = ops.widths(spec, len(found.operation.parameters[0].dims), found.over) if found.over else ()
        return statistics.norm(x, gain, bias, kind, eps, ops.communicator, found.over, widths)

    def meter(self, ops, found, x, spec, kind, gain, bias, eps=EPS):
        """Count the bytes of LayerNorm or RMSNorm: kept normalised rows and deviations, and temporaries."""
        vectors, dims = [v for v in (gain, bias) if v], found.operation.parameters[0].dims
        n, rows = x.elements, prod(ops.plan.local_shape(spec)[: -len(dims)])
        if not found.over and kind == "layernorm":
            saved = (x.storage, ops.new(rows, ops.wide), ops.new(rows, ops.wide), *(v.storage for v in vectors))
            return ops.plain(ops.block(spec), [x, *vectors], saved)
        if not found.over and ops.device == "cpu" and ops.wide == ops.plan.itemsize["compute"]:
            return ops.plain(ops.block(spec), [x, *vectors], (x.storage, ops.new(rows), gain.storage), n)
        wide = ops.widened(x.storage, n)
        if not found.over:
            normal, rstd = ops.new(n, ops.wide), ops.new(rows, ops.wide)
            return ops.plain(ops.block(spec), [x, *vectors], (wide, normal, rstd, gain.storage), n, ops.wide)
        centred = ops.new(n, ops.wide) if kind == "layernorm" else wide
        normal, rstd = ops.new(n, ops.wide), ops.new(rows, ops.wide)
        result = ops.new(n, ops.wide)
        if bias:
            result = ops.new(n, ops.wide)
        out = Value(ops.widened(result, n) and (result if wide is x.storage else ops.new(n)), n)
        del centred, result, wide
        return ops.plain(out, [x, *vectors], (normal, rstd, gain.storage), 3 * n, ops.wide)

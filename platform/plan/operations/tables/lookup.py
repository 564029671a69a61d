"""Lookup of a table's rows by token ids, as an embedding does."""

from __future__ import annotations

from platform.plan.communication.rule import Contraction
from platform.plan.language.layout import offset_of
from platform.plan.language.ops import Spec
from platform.plan.operations.op import BlockOp, planned, reading


class LookupOp(BlockOp):
    """Rows of the parameter `table` [vocab, ...] that the data tensor `tokens` [length, batch] of ids selects: `out`
    [length batch ...], an einsum with a one-hot that is never materialised, over the table's first dim, of any name. At
    negative ids, which are padding, a row is finite."""

    def record(self, ops, name, table, tokens, out):
        return ops.record(self.kind, name, [], [table], [out], [tokens])

    def contraction(self, planner, operation) -> Contraction:
        """Return the planned contraction of a one-hot of the ids with the table. The one-hot is never materialised, so
        its layout is free: rows split as the table's are, tokens whole."""
        table, out = operation.parameters[0], operation.outputs[0]
        row, layout = table.dims[0], planner.layout(table)
        token_dims = tuple(d for d in out.dims if d not in table.dims)
        one_hot = Spec(out.region, (*token_dims, row), (*out.sizes, *table.sizes))
        return planner.contraction((one_hot, table), out, layout.restrict((row,)))

    def plan(self, planner, operation):
        """Plan the conversions of the table and of the result, partial over the axes that split the table's rows."""
        table, out = operation.parameters[0], operation.outputs[0]
        c = self.contraction(planner, operation)
        conversions = planner.parameter_conversion(operation, table, c.inputs[1]), c.output
        tokens = c.compute.restrict([d for d in out.dims if d not in table.dims])
        over = c.compute[table.dims[0]]
        return planned(planner, operation, c.compute, conversions, over=over, **reading(planner, out, tokens))

    def computes_on(self, planner, operation):
        """Return the mesh axes that split the iteration space of a lookup: the axes of the rows looked up."""
        return [self.contraction(planner, operation).axes]

    def run(self, ops, found, name, table, tokens, out):
        """Look up the embedding rows of `tokens` in this rank's block of the table; another rank's rows give zeros."""
        tokens = tokens[self.kind, name]
        rows = ops.kernels.table_rows.rows
        if found.over:  # a token whose row another rank holds gives zeros: the sum over `over` completes the lookup
            planner, (p,) = ops.plan.planner, found.operation.parameters
            size, blocks = planner.sizes_of(p)[p.dims[0]], planner.mesh.extent(found.over)
            row = tokens.clamp_min(0) - offset_of(ops.communicator.index(found.over), size, blocks)
            mine = (row >= 0) & (row < table.shape[0])
            x = rows(table, row.clamp(0, table.shape[0] - 1))
            return x * mine.view(*mine.shape, *(1 for _ in table.shape[1:])).to(table.dtype)
        return rows(table, tokens.clamp_min(0))

    def meter(self, ops, found, name, table, tokens, out):
        """Count the memory of the rows looked up; the ids are kept, and a mask where ranks split the table's rows."""
        leave, count = found.conversions[-1], found.token_count
        x = ops.plain(ops.inner(found, leave), [table], (ops.integers(count),))
        if found.over:  # the mask of this rank's rows
            x = ops.plain(ops.inner(found, leave), [x], (ops.new(count),))
        return x

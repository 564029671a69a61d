"""Activations and biases that are made of ids or positions: a table's rows by token ids, as an embedding looks them up;
one-hot vectors and features of ids; learned biases of relative positions (T5)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

from platform.plan.layout import block_offset
from platform.plan.model_types import Spec
from platform.plan.operation_plan import PlannedOperation
from platform.plan.operations.adapted import add_rows_of_adapter
from platform.plan.operations.op import BlockOp, Op, Value, assemble_plan, plan_with_vectors, token_fields
from platform.plan.rule import Contraction


class LookupOp(BlockOp):
    """Rows of the parameter `table` [vocab, ...] that the data tensor `tokens` [length, batch] of ids selects: `out`
    [length batch ...], an einsum with a one-hot that is never materialised, over the table's first dim, of any name. At
    negative ids, which are padding, a row is finite."""

    def record_operation(self, ops, name, table, tokens, out):
        def record(name, table, tokens, out):
            return ops.record_operation(self.kind, name, [], [table], [out], [tokens])

        return add_rows_of_adapter(record, ops, name, table, tokens, out)

    def bind_computation(self, ops, compute):
        return partial(add_rows_of_adapter, super().bind_computation(ops, compute), ops)

    def one_hot_contraction(self, planner, operation) -> Contraction:
        """Return the planned contraction of a one-hot of the ids with the table. The one-hot is never materialised, so
        its layout is free: rows split as the table's are, tokens whole."""
        table, out = operation.parameters[0], operation.outputs[0]
        row, layout = table.dims[0], planner.layout(table)
        token_dims = tuple(d for d in out.dims if d not in table.dims)
        one_hot = Spec(out.region, (*token_dims, row), (*out.sizes, *table.sizes))
        return planner.plan_contraction((one_hot, table), out, layout.restrict_dims((row,)))

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan the conversions of the table and of the result, partial over the axes that split the table's rows."""
        table, out = operation.parameters[0], operation.outputs[0]
        c = self.one_hot_contraction(planner, operation)
        conversions = planner.parameter_conversion(operation, table, c.inputs[1]), c.output
        read = token_fields(planner, out, c.compute.restrict_dims([d for d in out.dims if d not in table.dims]))
        return assemble_plan(planner, operation, c.compute, conversions, over=c.compute[table.dims[0]], **read)

    def parameter_compute_axes(self, planner, operation) -> list[Sequence[str]]:
        """Return the mesh axes that split the iteration space of a lookup: the axes of the rows looked up."""
        return [self.one_hot_contraction(planner, operation).axes]

    def run_on_blocks(self, ops, planned, name, table, tokens, out):
        """Look up the embedding rows of `tokens` in this rank's block of the table; another rank's rows give zeros."""
        tokens = tokens[self.kind, name]
        rows = ops.kernels.expert_rows.look_up_rows
        if planned.over:  # a token whose row another rank holds gives zeros: the sum over `over` completes the lookup
            planner, (p,) = ops.plan.planner, planned.operation.parameters
            size, blocks = planner.tensor_sizes(p)[p.dims[0]], planner.mesh.count_ranks(planned.over)
            row = tokens.clamp_min(0) - block_offset(ops.communicator.group_index(planned.over), size, blocks)
            mine = (row >= 0) & (row < table.shape[0])
            x = rows(table, row.clamp(0, table.shape[0] - 1))
            return x * mine.view(*mine.shape, *(1 for _ in table.shape[1:])).to(table.dtype)
        return rows(table, tokens.clamp_min(0))

    def meter_memory(self, ops, planned, name, table, tokens, out) -> Value:
        """Count the memory of the rows looked up; the ids are kept, and a mask where ranks split the table's rows."""
        leave, count = planned.conversions[-1], planned.token_count
        x = ops.plain(ops.inner(planned, leave), [table], (ops.integers(count),))
        if planned.over:  # the mask of this rank's rows
            x = ops.plain(ops.inner(planned, leave), [x], (ops.new(count),))
        return x


# Activations that are made of a data tensor of ids alone: every rank makes its block from its own block of the ids,
# and nothing moves. Like every activation of a plan they take a gradient, as if there were layers below.

_DRAWN = 11  # 64-bit numbers per element alive while normal ones are drawn (platform.runtime.residual)


class OneHotOp(Op):
    """Activation `out` [length batch dim] that is 1 where the index along `dim` equals the data tensor `ids` [length,
    batch], else 0; where `ids` is padding it is 0 everywhere. An einsum with it selects rows of an activation; `lookup`
    does so of a parameter without materialising it."""

    def record_operation(self, ops, name, ids, out):
        return ops.record_operation(self.kind, name, [], [], [out], [ids])

    def run_on_blocks(self, ops, name, ids, out):
        """Compute the one-hot activation of this rank's token ids: 1 at the index that equals the id."""
        return _compute_from_ids(ops, ids[self.kind, name], out, lambda ids, column: ids == column)

    def meter_memory(self, ops, name, ids, out) -> Value:
        """Count the memory of a one-hot activation of token ids."""
        return ops.block(out)


class FeaturesOp(Op):
    """Activation `out` [length, batch, one dim] of standard normal numbers, fixed by the ids in the data tensor `ids`
    [length, batch] and not learned: an input for models without an embedding table."""

    def record_operation(self, ops, name, ids, out):
        return ops.record_operation(self.kind, name, [], [], [out], [ids])

    def run_on_blocks(self, ops, name, ids, out):
        """Draw standard normal features for this rank's token ids, a function of the id alone, alike on all ranks."""
        random = ops.kernels.residual
        size, key = ops.plan.sizes[out.dims[-1]], random.derive_key("features", name)
        return _compute_from_ids(ops, ids[self.kind, name], out, lambda i, j: random.draw_normal(key, i * size + j))

    def meter_memory(self, ops, name, ids, out) -> Value:
        """Count the bytes of features drawn for token ids, and of the random integers that they are drawn from."""
        ops.integers(prod(ops.plan.local_shape(out)) * ops.plan.has_block(out, ops.at) * _DRAWN)
        return ops.block(out)


def _compute_from_ids(ops, ids, out, compute):
    """Make an activation of token ids: return compute(ids [length, batch, 1], global positions along the last dim of
    `out`) on this rank's block, in the parameters' dtype."""
    dtype = next(iter(ops.tensors.values())).dtype
    if not ops.absent(ids):
        ids = compute(ids.unsqueeze(-1), ops.global_positions(out, out.dims[-1], ids.device))
    return ids.to(dtype).requires_grad_()


class RelativeBiasOp(BlockOp):
    """T5's learned position bias of `table` [buckets, heads], which any number of layers add to scores. It has the dims
    of `scores` without batch; the scores' axes leave the table's gradient partial. All offsets memory_length - length
    of one bucket share an entry, and the buckets widen up to `distance`."""

    def record_operation(self, ops, table, scores, *, bidirectional, distance):
        attributes = {"bidirectional": bidirectional, "distance": distance}
        return ops.record_operation(self.kind, table.name, [], [scores, table], [scores], **attributes)

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan the relative position bias in the layout of the attention scores; its table is converted to that."""
        return plan_with_vectors(planner, operation)

    def run_on_blocks(self, ops, planned, table, scores, *, bidirectional, distance):
        """Look up the position bias of each query and key offset in this rank's block of the table of biases."""
        from torch.nn.functional import embedding

        length, memory = (ops.global_positions(scores, d, table.device) for d in ("length", "memory_length"))
        offsets = memory - length.unsqueeze(1)
        bucket = ops.kernels.positions.relative_bucket(offsets, ops.plan.sizes["buckets"], distance, bidirectional)
        return embedding(bucket, table).permute(2, 0, 1)  # [heads, length, memory_length]

    def meter_memory(self, ops, planned, table, scores, *, bidirectional, distance) -> Value:
        """Count the bytes of the relative position bias of all offsets, whose bucket numbers are kept."""
        shape = dict(zip(scores.dims, ops.plan.local_shape(scores), strict=True))
        positions = shape["length"] * shape["memory_length"]
        n = positions * shape["heads"]
        return ops.plain(ops.tensor(n), [table], (ops.integers(positions),), n)

"""Learned biases of relative positions (T5)."""

from __future__ import annotations

from platform.plan.operations.op import BlockOp, with_vectors


class RelativeBiasOp(BlockOp):
    """T5's learned position bias of `table` [buckets, heads], which any number of layers add to scores. It has the dims
    of `scores` without batch; the scores' axes leave the table's gradient partial. All offsets memory_length - length
    of one bucket share an entry, and the buckets widen up to `distance`."""

    def record(self, ops, table, scores, *, bidirectional, distance):
        more = {"bidirectional": bidirectional, "distance": distance}
        return ops.record(self.kind, table.name, [], [scores, table], [scores], **more)

    def plan(self, planner, operation):
        """Plan the relative position bias in the layout of the attention scores; its table is converted to that."""
        return with_vectors(planner, operation)

    def run(self, ops, found, table, scores, *, bidirectional, distance):
        """Look up the position bias of each query and key offset in this rank's block of the table of biases."""
        from torch.nn.functional import embedding

        length, memory = (ops.positions(scores, d, table.device) for d in ("length", "memory_length"))
        offsets = memory - length.unsqueeze(1)
        bucket = ops.kernels.positions.relative_bucket(offsets, ops.plan.sizes["buckets"], distance, bidirectional)
        return embedding(bucket, table).permute(2, 0, 1)  # [heads, length, memory_length]

    def meter(self, ops, found, table, scores, *, bidirectional, distance):
        """Count the bytes of the relative position bias of all offsets, whose bucket numbers are kept."""
        shape = dict(zip(scores.dims, ops.plan.local_shape(scores), strict=True))
        positions = shape["length"] * shape["memory_length"]
        n = positions * shape["heads"]
        return ops.plain(ops.tensor(n), [table], (ops.integers(positions),), n)

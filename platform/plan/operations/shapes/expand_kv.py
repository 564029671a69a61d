"""Heads of keys and values for grouped queries."""

from __future__ import annotations

from platform.plan.communication.rule import Conversion, Step
from platform.plan.language.layout import prefix
from platform.plan.operations.op import BlockOp, planned


class ExpandKvOp(BlockOp):
    """Keys or values of grouped-query attention repeated from kv_heads to heads, so that every rank has the KV heads to
    which its query heads attend. `grouped`: True for a kernel that repeats them itself; a rank that has whole groups of
    heads then passes its KV heads on as they are. The gradients of both may stay partial."""

    open = {"inputs": "gradient", "outputs": "gradient"}

    def record(self, ops, name, x, spec, out, *, grouped=False):
        return ops.record(self.kind, name, [x], [spec], [out], grouped=grouped)

    def plan(self, planner, operation):
        """Plan the repetition of key and value heads for query heads, which needs no collective forward; the gradient
        is all-reduced over the mesh axes that split heads but not kv_heads. Raises ValueError if kv_heads are not split
        over a prefix of the axes of heads."""
        spec, out = operation.inputs[0], operation.outputs[0]
        have, goal = planner.layout(spec), planner.layout(out)
        if prefix(have["kv_heads"], goal["heads"]) != have["kv_heads"]:
            raise ValueError(
                f"kv_heads ({have['kv_heads']}) must be split over a prefix of the axes of heads {goal['heads']}"
            )
        partial = (*goal["heads"][len(have["kv_heads"]) :], *goal.gradient)
        lacking = tuple(a for a in partial if a not in have.gradient)
        backward = (Step("all_reduce", lacking, only=goal.only),) if lacking else ()
        return planned(planner, operation, goal, [planner.shaped(Conversion((), backward), spec, have, have)])

    def run(self, ops, found, name, x, spec, out, *, grouped=False):
        """Repeat each head of keys or values for its group of queries' heads on this rank."""
        dim = out.dims.index("heads")
        first_head, heads = ops.blocks[out][dim]
        per_group = ops.plan.sizes["heads"] // ops.plan.sizes["kv_heads"]
        if first_head % per_group == 0 and heads == x.shape[dim] * per_group:  # whole groups: a plain repeat
            return x if grouped or per_group == 1 else x.repeat_interleave(per_group, dim)
        have, _ = ops.blocks[spec][dim]
        return x.index_select(dim, ops.positions(out, "heads", x.device) // per_group - have)

    def meter(self, ops, found, name, x, spec, out, *, grouped=False):
        """Count the memory of repeated keys or values; none where they are passed on as they are."""
        dim, per_group = out.dims.index("heads"), ops.plan.sizes["heads"] // ops.plan.sizes["kv_heads"]
        have, wanted = (ops.plan.local_shape(t)[dim] for t in (spec, out))
        if wanted == have * per_group and (grouped or per_group == 1):
            return x
        return ops.plain(ops.block(out), [x])

"""Operations that move or rearrange an activation: to another region, joined with others, split or merged in its dims,
with heads of keys and values repeated for grouped queries; and reduced over dims, by sum, mean or maximum, or to the
means of a sequence's tokens, for the tokens of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod

from platform.plan.layout import Layout, common_prefix
from platform.plan.model_types import Spec
from platform.plan.operation_plan import PlannedOperation
from platform.plan.operations.op import BlockOp, Op, Saved, Value, assemble_plan, token_fields
from platform.plan.rule import Conversion, RelayoutStep
from platform.plan.scheme import ModelMistake


class RelayoutOp(BlockOp):
    """Activation x in another region, hence another layout, or with renamed dims (length -> memory_length), matched by
    position; `out`: its new type. Its gradient may come partial, and is summed as it moves back."""

    open = {"outputs": "gradient"}
    memory_accesses = (0, 0)
    keeps_nothing = True

    def record_operation(self, ops, name, x, spec, out):
        if spec == out:
            ops.check_activation(x, spec)
            return x
        return ops.record_operation(self.kind, name, [x], [spec], [out])

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan the conversion of an activation from its own layout, its dims renamed, to the output's layout."""
        spec, out = operation.inputs[0], operation.outputs[0]
        renamed = dict(zip(spec.dims, out.dims, strict=True))
        have, goal = planner.layout(spec), planner.layout(out)
        if apart := [d for d in have if planner.cut_units.get(d, 1) != planner.cut_units.get(renamed[d], 1)]:
            raise ValueError(f"{apart[0]} is cut into blocks of whole groups, {renamed[apart[0]]} is not")
        source = Layout.build_canonical({renamed[d]: axes for d, axes in have.items()}, have.only)
        conversion = planner.operand_conversion(out, goal, (*goal.axes, *goal.gradient), source=source)
        if planner.scheme.slice_via == "all_gather":
            conversion = _replace_all_to_all(conversion, planner.scheme.branches)
        return assemble_plan(planner, operation, goal, [conversion], only=tuple(a for a in goal.only if a in have.only))

    def run_on_blocks(self, ops, planned, name, x, spec, out):
        """Return the activation x, which planned conversions before and after bring to the output's layout."""
        return x

    meter_memory = run_on_blocks


class RelayoutTogetherOp(Op):
    """Activations that move to other regions together, each a `relayout` with these arguments (name, x, spec, out): all
    their collectives are launched before the first is waited for."""

    def compose_operation(self, ops, *moves):
        return [ops.relayout(*move) for move in moves]

    def run_on_blocks(self, ops, *moves):
        """Return the activations, converted together to the layouts of their outputs."""
        names, blocks, _, _ = zip(*moves, strict=True)
        plans = [ops.plan.operations.get(("relayout", name)) for name in names]
        return ops.convert_blocks(blocks, [plan.conversions[0] if plan else Conversion() for plan in plans])


def _replace_all_to_all(conversion: Conversion, axes: Sequence[str]) -> Conversion:
    """Replace each all-to-all over the branch axes `axes` in the conversion of a relayout operation by an all-gather
    and a slice, as SUPER (Jain et al.) computes (`branch.slice_via=all_gather`); return the new conversion."""

    def replace_steps(steps: Sequence[RelayoutStep]) -> tuple[RelayoutStep, ...]:
        """Return a relayout operation's steps with each all-to-all over the branch `axes` an all-gather and a slice."""
        out: list[RelayoutStep] = []
        for s in steps:
            if s.op == "all_to_all" and s.axes[0] in axes:
                out.append(RelayoutStep("all_gather", s.axes, s.joined, only=s.only, cuts=s.cuts))
                out.append(RelayoutStep("slice", s.axes, s.dim, only=s.only, cuts=s.cuts))
            else:
                out.append(s)
        return tuple(out)

    return replace(conversion, forward=replace_steps(conversion.forward), backward=replace_steps(conversion.backward))


class ConcatenateOp(Op):
    """Activations joined along `dim`, whose size in `out` is the sum of theirs. A split `dim` is gathered first and the
    result is split again: blocks of the parts are not blocks of the result. A part that lacks dims of the result is
    the same all along them, as the rotary key of multi-head latent attention is for all heads."""

    def record_operation(self, ops, name, x, specs, out, dim):
        if len(x) != len(specs):
            raise ModelMistake(name, f"concatenates {len(x)} activations of {len(specs)} declared types")
        return ops.record_operation(self.kind, name, x, specs, [out], dim=dim)

    def whole_dims(self, operation) -> Sequence[str]:
        """Return the joined dim, which a rank needs whole in all parts and in the result."""
        dim = operation["dim"]
        assert dim != "vocab", "vocab may be padded: its parts would not lie side by side"
        dims = operation.outputs[0].dims
        assert all(t.dims == tuple(d for d in dims if d in t.dims) for t in operation.inputs), "dims in one order"
        return (dim,)

    def run_on_blocks(self, ops, name, x, specs, out, dim):
        """Join this rank's blocks of activations along `dim`, which is whole on the rank, into one activation."""
        import torch

        *into, leave = ops.operation_plan(self.kind, name).conversions
        parts = ops.convert_blocks(x, into)
        if ops.absent(parts[0]):
            return ops.convert_block(torch.cat([part.flatten() for part in parts]), leave)
        joined_shape = dict(zip(out.dims, ops.shape_before(leave), strict=True)) | {dim: -1}
        for i, spec in enumerate(specs):
            where = tuple(slice(None) if d in spec.dims else None for d in out.dims)
            parts[i] = parts[i][where].expand(*joined_shape.values())
        return ops.convert_block(torch.cat(parts, out.dims.index(dim)), leave)

    def meter_memory(self, ops, name, x, specs, out, dim) -> Value:
        """Count the bytes of concatenated activations, and of the conversions of the parts between layouts."""
        planned = ops.operation_plan(self.kind, name)
        *into, leave = planned.conversions
        parts = ops.convert_blocks(x, into)
        joined, alike = ops.inner(planned, leave), [spec.dims != out.dims for spec in specs]
        sizes = list(zip(alike, [part.elements for part in parts], strict=True))
        ops.note_operation([joined], parts, (), lambda gs, _: [ops.new(n) if summed else gs[0] for summed, n in sizes])
        return ops.convert_block(joined, leave)


class SplitBranchesOp(Op):
    """Activation x of type `spec`, whole on each sub-grid, for branches that are not alike, of type `outs` in each."""

    memory_accesses = (0, 0)
    keeps_nothing = True
    joins_branches = True

    def record_operation(self, ops, name, x, spec, outs):
        _check_branches(name, [spec, *outs])
        return ops.record_operation(self.kind, name, [x], [spec], outs)

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan the gather of an activation from all sub-grids, and the sum over them of what branches give back."""
        axes = planner.branch_axes
        whole = planner.layout(operation.outputs[0]).drop_axes(axes)
        conversion = planner.operand_conversion(operation.inputs[0], whole, (*whole.axes, *axes))
        return assemble_plan(planner, operation, whole, [conversion])

    def run_on_blocks(self, ops, name, x, spec, outs):
        """Return x for each branch of this rank's sub-grid, and for others an empty one with a gradient of zeros."""
        whole = ops.convert_block(x, ops.operation_plan(self.kind, name).conversions[0])
        whole = whole.contiguous()  # a join of blocks of one index has gaps: each branch would copy it
        coordinates = ops.communicator.coordinates
        return tuple(whole if ops.plan.has_block(out, coordinates) else whole.flatten()[:0] for out in outs)

    def meter_memory(self, ops, name, x, spec, outs):
        """Count the bytes of the gathered activation, which the branches of the metered worker share."""
        whole = ops.convert_block(x, ops.operation_plan(self.kind, name).conversions[0])
        return tuple(whole if ops.plan.has_block(out, ops.at) else ops.tensor(0) for out in outs)


class SumBranchesOp(Op):
    """Sum of the results x, of types `specs`, of branches that are not alike, in `out`."""

    memory_accesses = (2, 1)
    keeps_nothing = True
    joins_branches = True

    def record_operation(self, ops, name, x, specs, out):
        _check_branches(name, [out, *specs])
        return ops.record_operation(self.kind, name, x, specs, [out])

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan the sum over the sub-grids, each of which has the sum of its own branches."""
        whole = planner.layout(operation.inputs[0]).drop_axes(planner.branch_axes)
        conversion = planner.result_conversion(operation.outputs[0], replace(whole, partial=planner.branch_axes))
        return assemble_plan(planner, operation, whole, [conversion])

    def run_on_blocks(self, ops, name, x, specs, out):
        """Return the sum of the branches of this rank's sub-grid, zeros without one, summed over the sub-grids."""
        (conversion,) = ops.operation_plan(self.kind, name).conversions
        results, others = ([y for y in x if ops.absent(y) is absent] for absent in (False, True))
        total = sum(results[1:], results[0]) if results else x[0].new_zeros(ops.shape_before(conversion))
        return ops.convert_block(total + sum(y.sum() for y in others), conversion)

    def meter_memory(self, ops, name, x, specs, out):
        """Count the bytes of the sum of the metered worker's branches."""
        planned = ops.operation_plan(self.kind, name)
        (conversion,) = planned.conversions
        results = [y for y in x if not ops.absent(y)]
        return ops.convert_block(ops.sum(ops.inner(planned, conversion), results), conversion)


def _check_branches(name: str, specs: Sequence[Spec]) -> None:
    """Raise ModelMistake unless of `specs` the first is of the whole model, and the others are its type in branches,
    two or more, each with a place of its own."""
    stream, *inside = specs
    places = [spec.place for spec in inside]
    if stream.place or len(places) < 2 or None in places or len({*places}) < len(places):
        raise ModelMistake(name, f"two branches or more have a place each, the stream has none, unlike {specs}")
    if different := [spec for spec in inside if (spec.dims, spec.sizes) != (stream.dims, stream.sizes)]:
        raise ModelMistake(str(different[0]), f"a branch begins and ends as the stream, in {name}", [str(stream)])
    if len({(spec.region, spec.place.costs) for spec in inside if spec.place}) > 1:
        raise ModelMistake(name, "branches of one layer are in one region, and are dealt by the same costs")


class ExpandKvOp(BlockOp):
    """Keys or values of grouped-query attention repeated from kv_heads to heads, so that every rank has the KV heads to
    which its query heads attend. `grouped`: True for a kernel that repeats them itself; a rank that has whole groups of
    heads then passes its KV heads on as they are. The gradients of both may stay partial."""

    open = {"inputs": "gradient", "outputs": "gradient"}
    memory_accesses = (0, 0)
    keeps_nothing = True

    def record_operation(self, ops, name, x, spec, out, *, grouped=False):
        return ops.record_operation(self.kind, name, [x], [spec], [out], grouped=grouped)

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan the repetition of key and value heads for query heads, which needs no collective forward; the gradient
        is all-reduced over the mesh axes that split heads but not kv_heads. Raises ValueError if kv_heads are not split
        over a prefix of the axes of heads."""
        spec, out = operation.inputs[0], operation.outputs[0]
        have, goal = planner.layout(spec), planner.layout(out)
        kv_axes, axes = have["kv_heads"], goal["heads"]
        if common_prefix(kv_axes, axes) != kv_axes:
            raise ValueError(f"kv_heads ({kv_axes}) must be split over a prefix of the axes of heads {axes}")
        partial = (*axes[len(kv_axes) :], *goal.gradient)
        lacking = tuple(a for a in partial if a not in have.gradient)
        backward = (RelayoutStep("all_reduce", lacking, only=goal.only),) if lacking else ()
        conversion = planner.fill_shapes(Conversion((), backward), spec, have, have)
        return assemble_plan(planner, operation, goal, [conversion])

    def run_on_blocks(self, ops, planned, name, x, spec, out, *, grouped=False):
        """Repeat each head of keys or values for its group of queries' heads on this rank."""
        dim = out.dims.index("heads")
        first_head, heads = ops.blocks[out][dim]
        per_group = ops.plan.planner.count_group_heads(spec)
        if first_head % per_group == 0 and heads == x.shape[dim] * per_group:  # whole groups: a plain repeat
            return x if grouped or per_group == 1 else x.repeat_interleave(per_group, dim)
        have, _ = ops.blocks[spec][dim]
        return x.index_select(dim, ops.global_positions(out, "heads", x.device) // per_group - have)

    def meter_memory(self, ops, planned, name, x, spec, out, *, grouped=False) -> Value:
        """Count the memory of repeated keys or values; none where they are passed on as they are."""
        dim, per_group = out.dims.index("heads"), ops.plan.planner.count_group_heads(spec)
        kv_heads, heads = (ops.plan.local_shape(t)[dim] for t in (spec, out))
        if heads == kv_heads * per_group and (grouped or per_group == 1):
            return x
        return ops.plain(ops.block(out), [x])


class ReduceOp(BlockOp):
    """Sum, mean or max (`function`) of activation x over the dims that `out`, the result's type, lacks; the other dims
    may be reordered and the region may change. If a reduced dim is split over ranks, their partial results are combined
    as an einsum's are. Elements that share the maximum share its gradient equally."""

    def record_operation(self, ops, name, function, x, spec, out):
        return ops.record_operation(self.kind, name, [x], [spec], [out], function=function)

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan an einsum of one operand. A maximum over split dims is all-reduced like a statistic, as is the number of
        elements that share it, which its gradient needs; after that every rank has the result."""
        spec, out = operation.inputs[0], operation.outputs[0]
        c = planner.plan_contraction((spec,), out)
        over = tuple(a for d in spec.dims if d not in out.dims for a in c.compute[d])
        leaving, statistics = c.output, []
        if operation["function"] == "max":
            leaving = planner.result_conversion(out, c.compute.restrict_dims(out.dims))
            cuts = planner.cuts_among_dims(out, c.compute.restrict_dims(out.dims), out.dims)
            n = prod(leaving.before)
            statistics = planner.statistics_collectives(over, c.compute.only, n, "forward", cuts=cuts) * 2
        return assemble_plan(planner, operation, c.compute, (*c.inputs, leaving), statistics, over=over)

    def run_on_blocks(self, ops, planned, name, function, x, spec, out):
        """Compute the sum, mean or maximum of this rank's block of x; a maximum over split dims is all-reduced."""
        reduced_dims = [d for d in spec.dims if d not in out.dims]
        x = ops.fill_padding(x, spec, reduced_dims, -inf if function == "max" else 0)
        places, remaining_dims = [spec.dims.index(d) for d in reduced_dims], [d for d in spec.dims if d in out.dims]
        if function == "max":
            y = ops.kernels.statistics.max_over_dims(x, places, ops.communicator, planned.over)
        else:
            y = x.sum(places) if reduced_dims else x
        if function == "mean":
            y = y / prod(n for d, n in zip(spec.dims, ops.plan.global_shape(spec), strict=True) if d in reduced_dims)
        return y.permute([remaining_dims.index(d) for d in out.dims])

    def meter_memory(self, ops, planned, name, function, x, spec, out) -> Value:
        """Count the bytes of a sum, mean or maximum of an activation; a maximum keeps what its gradient needs."""
        y = ops.inner(planned, planned.conversions[-1])
        saved: Saved = ()
        if function == "max":
            # each element's share of the gradient where a reduced dim is split, else input and result
            saved = (ops.new(x.elements, ops.wide),) if planned.over else (x.storage, y.storage)
        return ops.plain(y, [x], saved)


class ReshapeOp(BlockOp):
    """Activation with one dim split into two adjacent dims, the major one first, or with two adjacent dims merged into
    one; `out`, its new type, decides which. Axes that cut the major dim into equal blocks need not be gathered, nor the
    minor's if a block's extent along the major is 1."""

    def record_operation(self, ops, name, x, spec, out):
        return ops.record_operation(self.kind, name, [x], [spec], [out])

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan a layout whose blocks are the same in both shapes, so that reshaping moves nothing: the merged dim is
        split over the major dim's axes, then over the minor's if a block's extent along the major is 1. A conversion
        before and one after it do the rest."""
        spec, out = operation.inputs[0], operation.outputs[0]
        merges = len(spec.dims) > len(out.dims)
        fine, coarse = (spec, out) if merges else (out, spec)
        (merged,) = (d for d in coarse.dims if d not in fine.dims)
        major, minor = (d for d in fine.dims if d not in coarse.dims)
        assert "vocab" not in (merged, major, minor), "vocab may be padded"
        i = coarse.dims.index(merged)
        assert fine.dims == (*coarse.dims[:i], major, minor, *coarse.dims[i + 1 :]), "two neighbours, in place of one"
        have = planner.layout(fine)
        if dict(planner.find_cuts(fine, have)).get(fine.dims.index(major)):
            have = Layout.build_canonical({d: axes for d, axes in have.items() if d != major}, have.only)
        alone = planner.mesh.count_ranks(have[major]) == planner.tensor_sizes(fine)[major]
        common = Layout.build_canonical({**have, minor: have[minor] if alone else ()}, have.only)
        rules = {d: axes for d, axes in common.items() if d not in (major, minor)}
        joint = Layout.build_canonical({**rules, merged: (*common[major], *common[minor])}, common.only)
        if merges:
            steps = (spec, planner.layout(spec), common), (out, joint, planner.layout(out))
        else:
            steps = (spec, planner.layout(spec), joint), (out, common, planner.layout(out))
        conversions = [planner.operand_conversion(t, target, target.axes, source=source) for t, source, target in steps]
        return assemble_plan(planner, operation, common, conversions)

    def run_on_blocks(self, ops, planned, name, x, spec, out):
        """Merge or split the dims of this rank's block of x, which moves nothing."""
        i = next(i for i, (a, b) in enumerate(zip(spec.dims, out.dims, strict=False)) if a != b)
        return x.flatten(i, i + 1) if len(spec.dims) > len(out.dims) else x.unflatten(i, (ops.blocks[out][i][1], -1))

    def meter_memory(self, ops, planned, name, x, spec, out) -> Value:
        """Return x: a reshaped activation takes no new memory."""
        return x


class SequenceMeanOp(Op):
    """Mean of x, of type `spec` [length batch], over the tokens of each sequence that are no padding in the data tensor
    `tokens`, where x is 0: for each token of type `out` [length batch], whose length is another."""

    def record_operation(self, ops, name, x, spec, tokens, out):
        return ops.record_operation(self.kind, name, [x], [spec], [out], [tokens])

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan the mean of whole sequences, which is split again along their new length."""
        (spec,), (out,) = operation.inputs, operation.outputs
        layout = planner.layout(spec).restrict_dims(("batch",))
        conversions = [planner.operand_conversion(spec, layout, layout.axes), planner.result_conversion(out, layout)]
        return assemble_plan(planner, operation, layout, conversions, **token_fields(planner, spec, layout))

    def run_on_blocks(self, ops, name, x, spec, tokens, out):
        """Take the mean, in the type of statistics, of this rank's sequences."""
        enter, leave = ops.operation_plan(self.kind, name).conversions
        x = ops.convert_block(x, enter)
        if ops.absent(x):
            return ops.convert_block(x, leave)
        count = (tokens[self.kind, name] >= 0).sum(0).clamp_min(1)
        mean = (ops.kernels.statistics.widen_dtype(x).sum(0) / count).to(x.dtype)
        return ops.convert_block(mean.expand(ops.shape_before(leave)), leave)

    def meter_memory(self, ops, name, x, spec, tokens, out) -> Value:
        """Count the memory of the means; of the tokens their number is kept."""
        planned = ops.operation_plan(self.kind, name)
        enter, leave = planned.conversions
        x = ops.convert_block(x, enter)
        if ops.absent(x):
            return ops.convert_block(x, leave)
        n = x.elements
        mean = ops.inner(planned, leave)
        ops.note_operation([mean], [x], (), lambda gs, _: [ops.new(n)])
        return ops.convert_block(mean, leave)

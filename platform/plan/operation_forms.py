"""Forms of operations: which dims an operation reads, joins and sums, as far as it matters which axes split them.

Every operation computes over a space of dims, like a product: its result is a sum over the dims that the result lacks,
and the gradient of an operand one over the dims that the operand lacks. Only a dim of statistics is no such sum, as the
ranks that split it exchange them.

A `Spread` is how a tensor lies along each mesh axis; `apply_step` is the one way in which a step of a conversion
changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from math import prod
from typing import NamedTuple

from platform.plan.layout import Layout, base_axis
from platform.plan.model_types import Parameter, Spec
from platform.plan.operation_plan import Collective, EinsumGroup, Panels, PlannedOperation
from platform.plan.plan import Plan
from platform.plan.quantisation import ScaledProducts
from platform.plan.rule import COLLECTIVES, LENDING, Conversion, RelayoutStep

SPLIT, PARTIAL, ALONE, WHOLE = "split", "partial", "at index 0 alone", "whole"

# step -> (what its axes are for the tensor before, what they are after)
BECOMES = {
    "all_gather": (SPLIT, WHOLE),
    "reduce_scatter": (PARTIAL, SPLIT),
    "all_reduce": (PARTIAL, WHOLE),
    "all_to_all": (SPLIT, SPLIT),
    "all_to_allv": (SPLIT, SPLIT),
    "slice": (WHOLE, SPLIT),
    "pad": (SPLIT, PARTIAL),
    "broadcast": (ALONE, WHOLE),
    "reduce": (PARTIAL, ALONE),
    "scatter": (ALONE, SPLIT),
    "gather": (SPLIT, ALONE),
    "drop": (WHOLE, ALONE),
}


Sizes = Mapping[str, tuple[int, int]]  # dim -> its global size, and the unit in which it is cut


class Unsound(Exception):
    """Error of a plan by which ranks would compute another number than one process, or hang, as a line of text."""


class Spread(NamedTuple):
    """Spread of a tensor over the ranks along every mesh axis: an axis in `split` splits one of its dims, each dim over
    its axes major to minor; along one in `partial` ranks hold summands of it; along one in `only` index 0 alone has it;
    along any other it is whole, the same on every rank."""

    split: Mapping[str, tuple[str, ...]]
    partial: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()

    @classmethod
    def build_from_layout(cls, dims: Iterable[str], layout: Layout) -> Spread:
        """Return the spread of a tensor with dims `dims` in `layout`."""
        return cls({d: layout[d] for d in dims}, frozenset(layout.partial), frozenset(layout.only))

    @property
    def axes(self) -> set[str]:
        """Return the mesh axes that split some dim of the tensor."""
        return {a for axes in self.split.values() for a in axes}

    def state_along_axis(self, axis: str) -> str:
        """Return what the tensor is along a mesh axis: split, partial, at index 0 alone, or whole."""
        if base_axis(axis) in self.partial:
            return PARTIAL
        if axis in self.only:
            return ALONE
        return SPLIT if base_axis(axis) in self.axes else WHOLE

    def describe_axis(self, axis: str) -> str:
        """Return in words what the tensor is along a mesh axis, with the dim that the axis splits."""
        return next((f"split along {d}" for d, axes in self.split.items() if axis in axes), self.state_along_axis(axis))

    def longest_extent(self, dim: str, sizes: Sizes, extents: Mapping[str, int]) -> int:
        """Return the extent of the longest block of `dim`, of global `sizes`, where mesh axes have these `extents`."""
        size, unit = sizes[dim]
        return -(-size // unit // prod(extents[a] for a in self.split[dim])) * unit

    def count_elements(self, sizes: Sizes, extents: Mapping[str, int]) -> int:
        """Return the elements of a rank's longest block; arguments as of `longest_extent`."""
        return prod(self.longest_extent(d, sizes, extents) for d in self.split)

    def average_share(self, dims: Iterable[str], sizes: Sizes, extents: Mapping[str, int]) -> Fraction:
        """Return how much of the longest block along `dims` ranks have on average; arguments as of `longest_extent`."""
        blocks = {d: prod(extents[a] for a in self.split[d]) for d in dims}
        padded_size = prod(n * self.longest_extent(d, sizes, extents) for d, n in blocks.items())
        return Fraction(prod(sizes[d][0] for d in blocks), padded_size)


PACKED = "experts", "batch", "length"  # what the dim rows stands for: pairs of an expert and a token


def spread_dims(tensor: Spec | Parameter) -> tuple[str, ...]:
    """Return the dims of a tensor whose spread is followed: of rows, experts and batch in their place."""
    return (*PACKED, *tensor.dims[1:]) if tensor.dims[0] == "rows" else tensor.dims


def sort_axes(spread: Spread, dims: Sequence[str] = PACKED) -> Spread:
    """Return the spread with the axes of `dims` in one order: which rank has which rows, their exchange says."""
    return spread._replace(split={d: tuple(sorted(a)) if d in dims else a for d, a in spread.split.items()})


def apply_step(spread: Spread, step: RelayoutStep) -> Spread:
    """Return the spread of a tensor after a step of a conversion. Raises Unsound for a step that takes something else
    than there is, such as a gather of a whole tensor, or that some ranks would take without the others."""
    move = f"{step.op} over {join_axis_names(step.axes)}"
    if step.op in LENDING:
        if spread.split.get("experts", ()) != step.axes:
            raise Unsound(f"{move} takes experts that {join_axis_names(spread.axes)} splits")
        _check_ranks_of_step(step, spread.only)
        return spread
    axes, (before, becomes) = step.axes, BECOMES[step.op]
    split, partial, only, dims = dict(spread.split), set(spread.partial), set(spread.only), list(spread.split)
    if max(step.dim, step.joined) >= max(1, len(dims)):
        raise Unsound(f"{move} is of dim {max(step.dim, step.joined)}, of {len(dims)}")
    for axis in axes:
        if spread.state_along_axis(axis) != before:
            raise Unsound(f"{step.op} takes what is {before}, and it is {spread.describe_axis(axis)} over {axis}")
    if before == SPLIT:
        dim = dims[step.joined if step.op in ("all_to_all", "all_to_allv") else step.dim]
        axes_of_dim, remaining = ", ".join(split[dim]) or "no axis", tuple(a for a in split[dim] if a not in axes)
        if not axes or not set(axes) <= set(split[dim]):
            raise Unsound(f"{move} joins {dim}, which is split over {axes_of_dim}")
        if step.op != "all_to_allv" and split[dim] != (*remaining, *axes):
            raise Unsound(f"{move} joins {dim}, which is split over {axes_of_dim}, the last one first")
        split[dim] = remaining
    partial.difference_update(map(base_axis, axes))
    only.difference_update(axes)
    _check_ranks_of_step(step, only)
    if becomes == SPLIT:
        split[dims[step.dim]] = (*split[dims[step.dim]], *axes)
    elif becomes == PARTIAL:
        partial.update(axes)
    elif becomes == ALONE:
        only.update(axes)
    return Spread(split, frozenset(partial), frozenset(only))


def _check_ranks_of_step(step: RelayoutStep, only: Set[str]) -> None:
    """Raise Unsound for a step that ranks take elsewhere than at index 0 of the axes `only`, where the tensor is."""
    move = f"{step.op} over {join_axis_names(step.axes)}"
    if set(step.only) != only:
        raise Unsound(f"{move} is taken at index 0 of {join_axis_names(step.only)}, not of {join_axis_names(only)}")
    lone = [axis for axis in sorted(only) if axis.partition("-")[2] in map(base_axis, step.axes)]
    if lone and step.op in COLLECTIVES:
        raise Unsound(f"{move} is taken at index 0 of {lone[0]}, by one rank of each group")


def describe_difference(actual: Spread, expected: Spread) -> str:
    """Return in words the first difference between the spreads of a tensor that is found and that is wanted, or ""."""
    if actual == expected:
        return ""
    for axis in sorted({a for s in (actual, expected) for a in (*s.axes, *s.partial, *s.only)}):
        if (actual_kind := actual.describe_axis(axis)) != (expected_kind := expected.describe_axis(axis)):
            return f"is {actual_kind} over {axis}, and has to be {expected_kind}"
    dim = next(d for d, axes in expected.split.items() if actual.split[d] != axes)
    return f"has {dim} split over {', '.join(actual.split[dim])}, and has to over {', '.join(expected.split[dim])}"


def join_axis_names(axes: Sequence[str] | Set[str]) -> str:
    """Return the names of mesh axes as text, such as r+c."""
    return "+".join(axes if isinstance(axes, tuple) else sorted(axes)) or "no axis"


STAYS = Conversion()
SLOTS = "length", "experts", "slots"  # whole where tokens go to slots, or come back


class Operand(NamedTuple):
    """Tensor that an operation reads, with its conversion. `panels`: SUMMA passes it around over `axes` in place of a
    gather, as a ring of the axes `around` does along length; `regathered`: the backward pass converts it again;
    `shared`: a form before has converted it already; `constant`: it takes no gradient; `renamed`: gives the spread of
    the converted tensor in the operation's dims."""

    tensor: Spec | Parameter
    conversion: Conversion = STAYS
    panels: Panels | None = None
    axes: tuple[str, ...] = ()
    regathered: bool = False
    shared: bool = False
    constant: bool = False
    renamed: Callable[[Spread], Spread] = lambda spread: spread
    around: tuple[str, ...] = ()


class Form(NamedTuple):
    """Form of an operation, or of one of its einsums. `spreads`: spreads of operands that take no gradient; `output`:
    conversion of its result `out`, which a loss lacks; `statistics`: dims of which ranks exchange statistics; `whole`:
    dims that no axis may split; `merged`: dims of which the plan merges the results of ranks; `linear`: the operation
    is linear in each operand, of which one may be partial; `beside`: collectives that it takes beside all conversions;
    `apart`: axes along which ranks compute other summands, of its result or, without `out`, of its operand's gradient.
    `scaled`: the products of an einsum that are in 8 bits.
    """

    operands: Sequence[Operand]
    out: Spec | None
    output: Conversion = STAYS
    spreads: Sequence[Spread] = ()
    statistics: Sequence[str] = ()
    whole: Sequence[str] = ()
    merged: Sequence[str] = ()
    linear: bool = False
    beside: Sequence[Collective] = ()
    apart: tuple[str, ...] = ()
    scaled: ScaledProducts | None = None


def forms_of_operation(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
    """Yield the forms of a planned operation. Raises Unsound for a kind that none describes."""
    if planned.operation.kind not in FORMS:
        raise Unsound("has no form in platform.plan: what it sums is not known")
    yield from FORMS[planned.operation.kind](plan, planned)


def _einsum_forms(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
    """Yield a form for each einsum of a planned operation."""
    inputs, outputs = planned.operation.inputs, planned.operation.outputs
    computed = sorted(e.index for group in planned.groups for e in group.einsums)
    if computed != list(range(len(outputs))):
        raise Unsound(f"computes results {computed} of {len(outputs)}")
    for group in planned.groups:
        _check_fused_collective(group)
        panels = group.panels
        x_axes, operand_axes = (panels.x_axes, panels.operand_axes) if panels else ((), ())
        for number, e in enumerate(group.einsums):
            x = Operand(inputs[0], group.x, panels, x_axes, group.regathered, shared=number > 0)
            operand = Operand(inputs[1 + e.index], e.operand, panels, operand_axes, e.regathered)
            operand = operand._replace(renamed=sort_axes) if "rows" in inputs[0].dims else operand
            yield Form((x, operand), outputs[e.index], e.output, scaled=e.scaled)


# end of a group of einsums that is fused -> its collectives in the forward and the backward pass
FUSED = {"x": ("all_gather", "reduce_scatter"), "result": ("reduce_scatter", "all_gather")}


def _check_fused_collective(group: EinsumGroup) -> None:
    """Raise Unsound unless what a group of einsums computes as one with a collective can be computed part by part: of
    one dim that x and each result have, in equal parts over one axis, and back in the backward pass."""
    if not group.fuses:
        return
    conversion, ops = group.fused_conversion, FUSED[group.fuses]
    steps = (*conversion.forward, *conversion.backward) if conversion else ()
    if tuple(s.op for s in steps) != ops or len({s.axes for s in steps}) != 1 or len(steps[0].axes) != 1:
        planned_ops = join_axis_names(tuple(s.op for s in steps))
        raise Unsound(
            f"multiplies as part of {' and '.join(ops)} of its {group.fuses}, and converts it by {planned_ops}"
        )
    dims = {(group.x_dims if group.fuses == "x" else group.einsums[0].out_dims)[s.dim] for s in steps}
    kept = all(dims <= {*e.out_dims} & {*group.x_dims} - {*e.dims} for e in group.einsums)
    if len(dims) != 1 or not kept or any(s.cuts or s.only or s.zigzag >= 0 for s in steps):
        raise Unsound(f"multiplies by parts of {', '.join(sorted(dims))}, of which a product needs more than a part")
    if group.is_scaled or group.panels or group.has_wide_dtype or (ops[0] == "reduce_scatter" and group.einsums[1:]):
        raise Unsound("multiplies as part of a collective what torch's fused operations do not")


def _rowwise_forms(
    statistics: Callable[[PlannedOperation], Sequence[str]] = lambda planned: (),
    whole: Callable[[PlannedOperation], Sequence[str]] = lambda planned: (),
) -> Callable[[Plan, PlannedOperation], Iterator[Form]]:
    """Return the form of operations whose result has the dims of their first activation. `statistics`, `whole`: the
    dims, as in Form, of a planned operation."""

    def rowwise_form(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
        """Yield the form of an operation element by element, or row by row."""
        operands, output = _operands_and_output(planned)
        if "rows" in planned.operation.outputs[0].dims:
            operands = [operand._replace(renamed=sort_axes) for operand in operands]
        over = statistics(planned)
        yield Form(operands, planned.operation.outputs[0], output, (), over, whole(planned), over)

    return rowwise_form


def _operands_and_output(planned: PlannedOperation) -> tuple[list[Operand], Conversion]:
    """Return the operands of an operation without einsums, and the conversion of its result: conversions are of its
    parameters or, where it has none, of its activations, then of the result."""
    operation, waiting = planned.operation, list(planned.conversions)
    converted = operation.parameters or operation.inputs
    if len(waiting) > len(converted) + 1:
        raise Unsound(f"has {len(waiting)} conversions for {len(converted)} tensors and a result")
    operands = [Operand(t, waiting.pop(0)) if waiting and t in converted else Operand(t) for t in operation.inputs]
    operands = [o._replace(constant=o.tensor in operation.states) for o in operands]
    return operands, waiting[0] if waiting else STAYS


def _id_activation_forms(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
    """Yield the form of an activation that is made of ids, where it lies."""
    out = planned.operation.outputs[0]
    yield Form((), out, spreads=[Spread.build_from_layout(out.dims, plan.layout(out))])


def _lookup_forms(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
    """Yield the form of a lookup: an einsum with a one-hot of the ids, which lie as the plan reads them."""
    (table,), (operand,) = planned.operation.parameters, _operands_and_output(planned)[0]
    out, row = planned.operation.outputs[0], table.dims[0]
    split = {d: planned.tokens[d] for d in out.dims if d not in table.dims} | {row: planned.over}
    one_hot = Spread(split, frozenset(), frozenset(planned.tokens.only))
    yield Form((operand,), out, _operands_and_output(planned)[1], [one_hot], merged=(row,))


def _position_bias_forms(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
    """Yield the form of a bias of positions: a sum over batch, though no rank sees it, for its table's gradient."""
    scores, table = planned.operation.inputs
    (conversion,) = planned.conversions
    spread = Spread.build_from_layout(scores.dims, plan.layout(scores))
    yield Form((Operand(table, conversion),), planned.operation.outputs[0], spreads=[spread])


def _reduction_forms(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
    """Yield the form of a sum, mean or maximum over the dims that the result lacks."""
    (x,), output = _operands_and_output(planned)
    out = planned.operation.outputs[0]
    gone = [d for d in x.tensor.dims if d not in out.dims]
    statistics = gone if planned.operation["function"] == "max" else []
    yield Form((x,), out, output, statistics=statistics, merged=gone)


def _expansion_forms(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
    """Yield the form of KV heads repeated for heads: ranks that share them need no gather of more."""
    (x,), out = _operands_and_output(planned)[0], planned.operation.outputs[0]
    goal = plan.layout(out)["heads"]

    def spread_over_heads(spread: Spread) -> Spread:
        """Return the spread in which each rank has the heads whose KV heads it holds."""
        kv_axes = spread.split["kv_heads"]
        if goal[: len(kv_axes)] != kv_axes:
            kv_names = join_axis_names(kv_axes)
            raise Unsound(f"{x.tensor} has kv_heads split over {kv_names}, heads are over {join_axis_names(goal)}")
        split = {"heads" if d == "kv_heads" else d: axes for d, axes in spread.split.items()}
        return spread._replace(split={**split, "heads": goal})

    yield Form((x._replace(renamed=spread_over_heads),), out)


def _kernel_attention_forms(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
    """Yield the form of attention in one kernel, which needs the positions and d_kv of its keys whole."""
    (query, *memory), _ = _operands_and_output(planned)
    operands = [query, *(m._replace(renamed=_dim_renamer({"length": "memory_length"})) for m in memory)]
    yield Form(operands, planned.operation.outputs[0], whole=("memory_length", "d_kv"))


def _ring_attention_forms(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
    """Yield the form of attention to keys and values that go around: as if gathered, and their gradients summed."""
    (query, *memory), out = planned.operation.inputs[:3], planned.operation.outputs[0]
    ring_axes = plan.layout(out)["length"]
    memory_of = _dim_renamer({"length": "memory_length"})
    sinks = [o for o in _operands_and_output(planned)[0] if o.tensor in planned.operation.parameters]
    operands = [Operand(query), *(Operand(m, renamed=memory_of, around=ring_axes) for m in memory), *sinks]
    sent = sum(_count_key_value_elements(plan, planned.operation.name, m) for m in memory)
    # keys and values twice, gradients once
    hops = ["forward", "backward", "backward"] * (plan.mesh.count_ranks(ring_axes) - 1)
    of_groups = planned.operation["shared"] and plan.planner.cut_units
    key = replace(memory[0], dims=tuple("kv_heads" if d == "heads" and of_groups else d for d in memory[0].dims))
    cuts = plan.planner.cuts_among_dims(key, plan.layout(key), [d for d in key.dims if d != "length"])
    beside = [Collective("rotate", ring_axes, sent, "compute", phase, planned.only, 0, cuts) for phase in hops]
    yield Form(operands, out, whole=("memory_length", "d_kv"), beside=beside)


def _count_key_value_elements(plan: Plan, name: str, keys_or_values: Spec | Parameter) -> int:
    """Return the elements of keys or values that a plan gives a rank of attention, of KV heads if in whole groups."""
    elements = prod(plan.local_shape(keys_or_values))
    if not (expanded := plan.operations.get(("expand_kv", f"{name}.key"))):
        return elements
    kv = expanded.operation.inputs[0]
    heads_per_group = plan.planner.count_group_heads(kv)
    groups = plan.local_shape(kv)[kv.dims.index("kv_heads")]
    heads = plan.local_shape(keys_or_values)[keys_or_values.dims.index("heads")]
    return elements // heads_per_group if heads == groups * heads_per_group else elements


def _delta_rule_forms(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
    """Yield the form of a delta rule, or of its convolution: each head by itself, of whole sequences."""
    operands, output = _operands_and_output(planned)
    out, heads = planned.operation.outputs[0], plan.layout(planned.operation.outputs[0])["heads"]
    blocks = plan.mesh.count_ranks(heads) * plan.planner.cut_units.get("heads", 1)
    for o in operands if heads else ():
        if plan.planner.tensor_sizes(o.tensor).get("heads", blocks) % blocks:
            raise Unsound(f"{o.tensor} has heads that {join_axis_names(heads)} cut unevenly, apart from their values")
    yield Form(operands, out, output, whole=("length", "d_kv", "taps"))


def _relayout_forms(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
    """Yield the form of a move to another layout, with dims renamed by position."""
    (x,), out = planned.operation.inputs, planned.operation.outputs[0]
    assert isinstance(x, Spec)
    names = dict(zip(x.dims, out.dims, strict=True))
    (conversion,) = planned.conversions
    yield Form((Operand(x, conversion, renamed=_dim_renamer(names)),), out)


def _branch_split_forms(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
    """Yield the form of an activation that branches read, each on its sub-grid."""
    (x,), (conversion,), apart = planned.operation.inputs, planned.conversions, plan.planner.branch_axes
    whole = reduce(apply_step, conversion.forward, Spread.build_from_layout(x.dims, plan.layout(x)))
    for out in planned.operation.outputs:
        expected = Spread.build_from_layout(out.dims, plan.layout(out))
        if mismatch := describe_difference(expected._replace(only=_leave_sub_grids(expected, apart)), whole):
            raise Unsound(f"{out} {mismatch}")
    yield Form((Operand(x, conversion),), None, apart=apart)


def _branch_sum_forms(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
    """Yield the form of the sum of branches, each on its sub-grid."""
    apart = plan.planner.branch_axes

    def leave(spread: Spread) -> Spread:
        """Return the spread of a branch's result as the spread of a summand, which every sub-grid has."""
        return spread._replace(only=_leave_sub_grids(spread, apart))

    operands = tuple(Operand(t, renamed=leave) for t in planned.operation.inputs)
    yield Form(operands, planned.operation.outputs[0], planned.conversions[0], apart=apart)


def _leave_sub_grids(spread: Spread, axes: Sequence[str]) -> frozenset[str]:
    """Return along which axes index 0 alone has a tensor of a branch, besides the `axes` of sub-grids."""
    return frozenset(a for a in spread.only if base_axis(a) not in axes)


def _reshape_forms(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
    """Yield the form of a dim split into two, or of two joined, whose axes are the major's and then the minor's."""
    (x,), output = _operands_and_output(planned)
    spec, out = x.tensor, planned.operation.outputs[0]
    fine, coarse = (spec, out) if len(spec.dims) > len(out.dims) else (out, spec)
    (merged,) = (d for d in coarse.dims if d not in fine.dims)
    major, minor = (d for d in fine.dims if d not in coarse.dims)
    extent = plan.planner.tensor_sizes(fine)[major]

    def reshape_spread(spread: Spread) -> Spread:
        """Return the spread in the result's dims. Raises Unsound if a rank's block would not be one of them."""
        if fine is spec:
            outer_axes, inner_axes = spread.split[major], spread.split[minor]
        else:
            outer_axes = plan.layout(fine)[major]
            inner_axes = spread.split[merged][len(outer_axes) :]
            if spread.split[merged][: len(outer_axes)] != outer_axes:
                places = f"{join_axis_names(spread.split[merged])}, its part {major} over {join_axis_names(outer_axes)}"
                raise Unsound(f"{merged} is over {places}")
        if inner_axes and plan.mesh.count_ranks(outer_axes) != extent:
            raise Unsound(f"{minor} is split over {'+'.join(inner_axes)} inside of a {major} that is not")
        parts = {merged: (*outer_axes, *inner_axes), major: outer_axes, minor: inner_axes}
        return spread._replace(split={d: parts[d] if d in parts else spread.split[d] for d in out.dims})

    yield Form((x._replace(renamed=reshape_spread),), out, output)


def _route_forms(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
    """Yield the forms of a router's weights and of its auxiliary loss, from whole sequences of all experts' scores."""
    (scores, *_), (enter, *leave) = planned.operation.inputs, planned.conversions
    for number, (out, conversion) in enumerate(zip(planned.operation.outputs, leave, strict=True)):
        operand = Operand(scores, enter, shared=number > 0)
        yield Form((operand,), out, conversion, whole=("length", "experts"))


def _dispatch_forms(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
    """Yield the form of the way to the slots of all experts, which the weights show and do not learn from."""
    (x, weights), (out,) = planned.operation.inputs, planned.operation.outputs
    enter, weight_conversion, leave = planned.conversions
    assert isinstance(x, Spec)
    slots = Spread({"slots": ()}, frozenset(), frozenset(planned.only))
    choice = Operand(weights, weight_conversion, constant=True)
    yield Form((Operand(x, enter), choice), out, leave, [slots], whole=SLOTS)


def _combine_forms(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
    """Yield the form of a weighted sum over experts, where all slots of a sequence are."""
    (y, weights), (out,) = planned.operation.inputs, planned.operation.outputs
    enter, weight_conversion, leave = planned.conversions
    yield Form((Operand(y, enter), Operand(weights, weight_conversion)), out, leave, whole=SLOTS, linear=True)


def _row_dispatch_forms(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
    """Yield the form of tokens copied for each of their experts, which the weights show and do not learn from."""
    (x, weights), (out,) = planned.operation.inputs, planned.operation.outputs
    enter, weight_conversion, exchange, join = planned.conversions
    leave = _join_conversions(exchange, join)
    assert isinstance(x, Spec)
    expert_axes = _axes_holding_experts(plan, out, exchange)
    beside = _copied_weights(plan, out, planned, exchange, weight_conversion)
    experts, more = plan.sizes["experts"] // plan.mesh.count_ranks(expert_axes), plan.scheme.lent + len(beside)
    counts = [(s, experts + more * plan.mesh.count_ranks(s.axes)) for s in exchange.forward]
    beside += [Collective("all_to_all", s.axes, n, "integers", "forward", s.only) for s, n in counts]
    choice = Operand(weights, weight_conversion, constant=True, renamed=_place_on_experts(expert_axes))
    yield Form((Operand(x, enter), choice), out, leave, beside=beside)


def _row_combine_forms(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
    """Yield the form of a weighted sum over experts, of the rows that came back to their tokens."""
    (y, weights), (out,) = planned.operation.inputs, planned.operation.outputs
    split, exchange, weight_conversion, leave = planned.conversions
    enter = _join_conversions(split, exchange)
    assert isinstance(y, Spec)
    weight_spread = Spread.build_from_layout(weights.dims, plan.layout(weights))
    for step in weight_conversion.forward:
        weight_spread = apply_step(weight_spread, step)
    holding = _axes_holding_experts(plan, y, exchange)
    apart, back = _place_on_experts(holding), _place_on_experts(holding, weight_spread.split["batch"])
    operands = Operand(y, enter, renamed=back), Operand(weights, weight_conversion, renamed=apart)
    returned = [replace(c, phase="backward") for c in _copied_weights(plan, y, planned, exchange, weight_conversion)]
    yield Form(operands, out, leave, linear=True, beside=returned)


def _copied_weights(
    plan: Plan, rows: Spec, planned: PlannedOperation, exchange: Conversion, weights: Conversion
) -> list[Collective]:
    """Return the messages of weights, in the forward pass, that go with copies of tokens along an exchange of `rows` to
    ranks with seats for several experts of a token: for each copy, the weights in all seats."""
    over = [s for s in exchange.forward if s.op == "all_to_allv"]
    expert_axes = (*_axes_holding_experts(plan, rows, exchange), *(a for s in over for a in s.axes))
    seats = plan.sizes["experts"] // plan.mesh.count_ranks(expert_axes) + plan.scheme.lent
    chosen, tokens = planned.operation["chosen"], prod(weights.after[:2])
    sent = [(s, tokens * min(chosen, plan.mesh.count_ranks(s.axes) - 1)) for s in over if min(chosen, seats) > 1]
    return [Collective("all_to_allv", s.axes, n * seats, "accumulate", "forward", s.only, n) for s, n in sent]


def _join_conversions(first: Conversion, second: Conversion) -> Conversion:
    """Return the conversion that takes the steps of both, one after the other."""
    forward, backward = (*first.forward, *second.forward), (*second.backward, *first.backward)
    return replace(second, forward=forward, backward=backward, before=first.before)


def _axes_holding_experts(plan: Plan, rows: Spec, exchange: Conversion) -> tuple[str, ...]:
    """Return the axes along which ranks hold experts apart for the same tokens: those over which none are exchanged."""
    exchanged = {a for s in exchange.forward for a in s.axes}
    return tuple(a for a in plan.scheme.regions[rows.region]["experts"] if a not in exchanged)


def _place_on_experts(expert_axes: tuple[str, ...], batch: tuple[str, ...] = ()) -> Callable[[Spread], Spread]:
    """Return the function that gives the spread of what ranks read that hold experts apart along `expert_axes`;
    `batch`: the axes of the tokens in order, where the spread has them in any."""

    def place_rows(spread: Spread) -> Spread:
        """Return the spread over the experts that a rank holds. Raises Unsound if rows are not where tokens are."""
        batch_axes, experts = spread.split["batch"], spread.split["experts"]
        if (batch and sorted(batch_axes) != sorted(batch)) or (experts and sorted(experts) != sorted(expert_axes)):
            places = f"batch over {join_axis_names(batch_axes)} and experts over {join_axis_names(experts)}"
            tokens = f"their tokens lie over {join_axis_names(batch)}, held over {join_axis_names(expert_axes)}"
            raise Unsound(f"rows are back with {places}, {tokens}")
        return spread._replace(split={**spread.split, "batch": batch or batch_axes, "experts": expert_axes})

    return place_rows


def _loss_forms(statistics: Sequence[str]) -> Callable[[Plan, PlannedOperation], Iterator[Form]]:
    """Return the form of a loss, a sum over all ranks' tokens; `statistics` as in Form."""

    def loss_form(plan: Plan, planned: PlannedOperation) -> Iterator[Form]:
        """Yield the form of a loss of its first activation; one of pairs adds up answers over the ranks of a length."""
        (logits, *_), beside = planned.operation.inputs, []
        if dict(planned.operation.attributes).get("paired") and (axes := planned.tokens["length"]):
            # of each answer: log-probability, reference and labels; a sequence has at most so many answers as tokens
            sequences = plan.local_shape(logits)[logits.dims.index("batch")]
            elements = 3 * sequences * (plan.sizes["length"] + plan.sizes["length"] % 2)
            cuts = plan.planner.cuts_among_dims(logits, plan.layout(logits), ["batch"])
            beside = [Collective("all_reduce", axes, elements, "metrics", "forward", planned.only, 0, cuts)]
        yield Form(_operands_and_output(planned)[0], None, statistics=statistics, merged=statistics, beside=beside)

    return loss_form


def _dim_renamer(names: Mapping[str, str]) -> Callable[[Spread], Spread]:
    """Return the function that renames dims of a spread."""
    return lambda spread: spread._replace(split={names.get(d, d): axes for d, axes in spread.split.items()})


FORMS: Mapping[str, Callable[[Plan, PlannedOperation], Iterator[Form]]] = {
    "project": _einsum_forms,
    "einsum": _einsum_forms,
    "lookup": _lookup_forms,
    "one_hot": _id_activation_forms,
    "features": _id_activation_forms,
    "relative_bias": _position_bias_forms,
    "reduce": _reduction_forms,
    "expand_kv": _expansion_forms,
    "fused_attention": _kernel_attention_forms,
    "ring_attention": _ring_attention_forms,
    "relayout": _relayout_forms,
    "reshape": _reshape_forms,
    "split_branches": _branch_split_forms,
    "sum_branches": _branch_sum_forms,
    "shift": _rowwise_forms(),
    "dropout": _rowwise_forms(),
    "jitter": _rowwise_forms(),
    "sinusoid": _rowwise_forms(),
    "remember": _rowwise_forms(),
    "recall": _rowwise_forms(),
    "scale_by": _rowwise_forms(),
    "multiply_by": _rowwise_forms(),
    "normalise": _rowwise_forms(whole=lambda planned: ("d_kv",)),
    "rotate": _rowwise_forms(whole=lambda planned: ("d_kv",)),
    "recurrence": _rowwise_forms(whole=lambda planned: ("length",)),
    "convolve": _delta_rule_forms,
    "delta_rule": _delta_rule_forms,
    "concatenate": _rowwise_forms(whole=lambda planned: (planned.operation["dim"],)),
    "norm": _rowwise_forms(lambda planned: planned.operation.parameters[0].dims),
    "softmax": _rowwise_forms(lambda planned: (planned.operation["dim"],)),
    "route": _route_forms,
    "dispatch": _dispatch_forms,
    "combine": _combine_forms,
    "dispatch_rows": _row_dispatch_forms,
    "combine_rows": _row_combine_forms,
    "cross_entropy": _loss_forms(("vocab",)),
    "token_loss": _loss_forms(()),
    "sequence_mean": _rowwise_forms(whole=lambda planned: ("length",)),
    "squared_error": _loss_forms(()),
}


def describe_misread_data(planned: PlannedOperation, space: Mapping[str, tuple[str, ...]], only: frozenset[str]) -> str:
    """Return how the data tensors that an operation reads lie otherwise than its space, "" if they do not. A mask of
    attention's scores lies as the keys that it hides."""
    operation, tokens = planned.operation, planned.tokens
    hides = operation.kind in ("softmax", "fused_attention", "ring_attention") and not operation["begins"]
    names = {"length": "memory_length"} if hides else {}
    for dim in ("batch", "length"):
        if tokens[dim] != (axes := space.get(names.get(dim, dim), ())):
            return f"has {dim} split over {join_axis_names(tokens[dim])}, the operation over {join_axis_names(axes)}"
    if set(tokens.only) != only:
        return f"exists at index 0 of {join_axis_names(tokens.only)}, the operation at 0 of {join_axis_names(only)}"
    return ""

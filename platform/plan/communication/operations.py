"""Plans of all kinds of operations: conversions, and every collective with its size.

The forward pass executes these lists and `platform.plan.communication.traffic` prices the same lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from platform.plan.communication.einsums import plan_einsums
from platform.plan.communication.planned import Collective, PlannedOperation
from platform.plan.communication.planner import Planner
from platform.plan.communication.rule import Conversion, Step
from platform.plan.language.functions import CROSS_ENTROPY
from platform.plan.language.layout import Layout, prefix
from platform.plan.language.ops import Operation, Parameter, Spec


def _planned(
    planner: Planner,
    operation: Operation,
    layout: Layout,
    conversions: Sequence[Conversion] = (),
    statistics: Sequence[Collective] = (),
    **more: Any,
) -> PlannedOperation:
    """Assemble the plan of an operation that computes in `layout`: the collectives of its `conversions`, then those
    that merge its `statistics` (such as the maximum of a softmax) over ranks. `more`: values of further fields of
    PlannedOperation, by name."""
    moved = [c for conversion in conversions for c in planner.collectives(conversion)]
    at = {"compute_axes": layout.axes, "only": layout.only, **more}
    return PlannedOperation(operation, (*moved, *statistics), conversions=tuple(conversions), **at)


def _read(planner: Planner, spec: Spec | Parameter, tokens: Layout, length: str = "length") -> dict[str, Any]:
    """Return the fields `tokens` and `token_count` for the plan of an operation that reads a data tensor (token ids,
    labels, a mask) in the layout `tokens` over batch and length; the data tensor is as long as dim `length` of `spec`.
    """
    sizes = {"batch": planner.sizes["batch"], "length": planner.sizes_of(spec)[length]}
    return {"tokens": tokens, "token_count": prod(n // planner.mesh.extent(tokens[d]) for d, n in sizes.items())}


def _lookup(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan a lookup of table rows by token ids: the conversions of the table and of the result, which is partial over
    the axes that split the table's rows."""
    table, out = operation.parameters[0], operation.outputs[0]
    c = planner.lookup(operation)
    conversions = planner.parameter_conversion(operation, table, c.inputs[1]), c.output
    tokens = c.compute.restrict([d for d in out.dims if d not in table.dims])
    over = c.compute[table.dims[0]]
    return _planned(planner, operation, c.compute, conversions, over=over, **_read(planner, out, tokens))


def _vectors(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan a shift, norm or relative_bias operation: its parameters are converted to the layout of its activation; a
    norm over a split dim also merges statistics."""
    spec = operation.inputs[0]
    have = planner.layout(spec)
    conversions = [
        planner.parameter_conversion(operation, p, planner.enter(p, have.restrict(p.dims), have.axes))
        for p in operation.parameters
    ]
    if operation.kind != "norm":
        return _planned(planner, operation, have, conversions)
    over, rows = have[spec.dims[-1]], prod(planner.shape(spec)[:-1])
    op = "all_reduce"
    if operation["norm"] == "layernorm":
        op, rows = "all_gather", 2 * rows
    found = [
        *planner.statistics(over, have.only, rows, "forward", op),
        *planner.statistics(over, have.only, rows, "backward"),
    ]
    return _planned(planner, operation, have, conversions, found, over=over)


def _local(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan an operation that moves nothing; the data tensor that it may read is laid out as its result."""
    out = operation.outputs[0]
    layout = planner.layout(out)
    read = _read(planner, out, layout.restrict(("length", "batch"))) if operation.reads else {}
    return _planned(planner, operation, layout, **read)


def _mask_layout(layout: Layout) -> Layout:
    """Return the layout over batch and length in which attention that computes in `layout` reads its mask, the data
    tensor whose padding it hides: its length is split as memory_length."""
    return Layout.of({"batch": layout["batch"], "length": layout["memory_length"]}, layout.only)


def _fused_attention(planner: Planner, operation: Operation) -> PlannedOperation:
    layout, key = planner.layout(operation.outputs[0]), operation.inputs[1]
    return _planned(planner, operation, layout, **_hiding(planner, operation, layout, key, "length"))


def _hiding(
    planner: Planner, operation: Operation, layout: Layout, memory: Spec | Parameter, length: str
) -> dict[str, Any]:
    """Return the fields `tokens` and `token_count` for the plan of an attention, by the data tensor that it reads: a
    mask, which is as long as dim `length` of `memory`, or where the documents of its queries begin."""
    if operation["begins"]:
        return _read(planner, operation.outputs[0], layout.restrict(("length", "batch")))
    return _read(planner, memory, _mask_layout(layout), length)


def _from_data(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan a features or one_hot operation, which moves nothing: every rank makes its block of the output from its own
    block of the data tensor."""
    out = operation.outputs[0]
    layout = planner.layout(out)
    return _planned(planner, operation, layout, **_read(planner, out, layout.restrict(("length", "batch"))))


def _rotate(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan a rotate operation (rotary position embedding): rotated pairs lie half of d_kv apart, so a split d_kv is
    gathered first and split again."""
    spec = operation.outputs[0]
    whole = planner.layout(spec).restrict([d for d in spec.dims if d != "d_kv"])
    conversions = planner.enter(spec, whole, whole.axes), planner.split(spec, whole)
    return _planned(planner, operation, whole, conversions)


def _expand_kv(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan an expand_kv operation (grouped-query attention): each rank picks the KV heads of its own query heads, free;
    the gradient is all-reduced over the axes that split heads but not kv_heads. Raises ValueError if kv_heads are not
    split over a prefix of the axes of heads."""
    spec, out = operation.inputs[0], operation.outputs[0]
    have, goal = planner.layout(spec), planner.layout(out)
    if prefix(have["kv_heads"], goal["heads"]) != have["kv_heads"]:
        raise ValueError(
            f"kv_heads ({have['kv_heads']}) must be split over a prefix of the axes of heads {goal['heads']}"
        )
    lacking = goal["heads"][len(have["kv_heads"]) :]
    backward = (Step("all_reduce", lacking, only=goal.only),) if lacking else ()
    return _planned(planner, operation, goal, [planner.shaped(Conversion((), backward), spec, have, have)])


def _softmax(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan a softmax operation: over a split dim, maximum and sum are all-reduced forward, one sum backward; that of
    attention may read a mask or where documents begin."""
    spec, dim = operation.inputs[0], operation["dim"]
    layout, shape = planner.layout(spec), planner.shape(spec)
    rows = prod(shape) // shape[spec.dims.index(dim)]
    over, only = layout[dim], layout.only
    found = [*planner.statistics(over, only, rows, "forward") * 2, *planner.statistics(over, only, rows, "backward")]
    hiding = _hiding(planner, operation, layout, spec, "memory_length")
    return _planned(planner, operation, layout, statistics=found, over=over, **hiding)


def _relayout(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan a relayout operation: a conversion from the layout of the input, its dims renamed, to that of the output."""
    spec, out = operation.inputs[0], operation.outputs[0]
    renamed = dict(zip(spec.dims, out.dims, strict=True))
    have, goal = planner.layout(spec), planner.layout(out)
    source = Layout.of({renamed[d]: axes for d, axes in have.items()}, have.only)
    conversion = planner.enter(out, goal, goal.axes, source=source)
    if planner.scheme.slice_via == "all_gather":
        conversion = _without_all_to_all(conversion, planner.scheme.branches)
    return _planned(planner, operation, goal, [conversion], only=tuple(a for a in goal.only if a in have.only))


def _without_all_to_all(conversion: Conversion, axes: Sequence[str]) -> Conversion:
    """Replace each all-to-all over the branch axes `axes` in a conversion by an all-gather and a slice, as in SUPER
    (Jain et al.), which has none: `branch.slice_via=all_gather`."""

    def replaced(steps: Sequence[Step]) -> tuple[Step, ...]:
        out: list[Step] = []
        for s in steps:
            if s.op == "all_to_all" and s.axes[0] in axes:
                out += [Step("all_gather", s.axes, s.joined, only=s.only), Step("slice", s.axes, s.dim, only=s.only)]
            else:
                out.append(s)
        return tuple(out)

    return replace(conversion, forward=replaced(conversion.forward), backward=replaced(conversion.backward))


def _reduce(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan a reduce operation (sum, mean or max over dims), as an einsum of one operand. A maximum over split dims is
    all-reduced like a statistic, as is the number of elements that share it, which its gradient needs; after that every
    rank has the result."""
    spec, out = operation.inputs[0], operation.outputs[0]
    c = planner.contraction([(spec, planner.layout(spec))], out)
    over = tuple(a for d in spec.dims if d not in out.dims for a in c.compute[d])
    leaving, found = c.output, []
    if operation["function"] == "max":
        leaving = planner.split(out, c.compute.restrict(out.dims))
        found = planner.statistics(over, c.compute.only, prod(leaving.before), "forward") * 2
    return _planned(planner, operation, c.compute, (*c.inputs, leaving), found, over=over)


def _concatenate(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan a concatenate operation: the dim along which the parts are joined is gathered in each part, and split again
    in the whole."""
    out, dim = operation.outputs[0], operation["dim"]
    assert dim != "vocab", "vocab may be padded: its parts would not lie side by side"
    assert all(spec.dims == out.dims for spec in operation.inputs), "the parts and the whole have the same dims"
    whole = planner.layout(out).restrict([d for d in out.dims if d != dim])
    entering = [planner.enter(spec, whole, whole.axes) for spec in operation.inputs]
    return _planned(planner, operation, whole, [*entering, planner.split(out, whole)])


def _reshape(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan a reshape operation through a layout whose blocks are the same in both shapes, so that reshaping moves
    nothing: the merged dim is split over the major dim's axes, then over the minor's if a block's extent along the
    major is 1. A conversion before and one after it do the rest."""
    spec, out = operation.inputs[0], operation.outputs[0]
    merges = len(spec.dims) > len(out.dims)
    fine, coarse = (spec, out) if merges else (out, spec)
    (merged,) = (d for d in coarse.dims if d not in fine.dims)
    major, minor = (d for d in fine.dims if d not in coarse.dims)
    assert "vocab" not in (merged, major, minor), "vocab may be padded"
    i = coarse.dims.index(merged)
    assert fine.dims == (*coarse.dims[:i], major, minor, *coarse.dims[i + 1 :]), "two neighbours, in place of one"
    have = planner.layout(fine)
    alone = planner.mesh.extent(have[major]) == planner.sizes_of(fine)[major]
    common = Layout.of({**have, minor: have[minor] if alone else ()}, have.only)
    rules = {d: axes for d, axes in common.items() if d not in (major, minor)}
    joint = Layout.of({**rules, merged: (*common[major], *common[minor])}, common.only)
    if merges:
        steps = (spec, have, common), (out, joint, planner.layout(out))
    else:
        steps = (spec, planner.layout(spec), joint), (out, common, have)
    conversions = [planner.enter(tensor, target, target.axes, source=source) for tensor, source, target in steps]
    return _planned(planner, operation, common, conversions)


def _cross_entropy(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan a cross_entropy operation, which never gathers logits: over a split vocab, the maximum and then the sums of
    each row are all-reduced; it reads the labels, and their weights if they have any."""
    spec = operation.inputs[0]
    layout, shape = planner.layout(spec), planner.shape(spec)
    over = layout["vocab"]
    rows = prod(shape) // shape[spec.dims.index("vocab")]
    sums = 3 if operation["smoothing"] or operation["loss"] != CROSS_ENTROPY else 2
    found = [
        *planner.statistics(over, layout.only, rows, "forward"),
        *planner.statistics(over, layout.only, sums * rows, "forward"),
    ]
    labels = _read(planner, spec, layout.restrict([d for d in spec.dims if d != "vocab"]))
    return _planned(planner, operation, layout, statistics=found, over=over, **labels)


def _squared_error(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan a squared_error operation, which moves nothing: a rank's loss is over its own elements, so `tokens` has all
    axes that split them."""
    spec = operation.inputs[0]
    layout = planner.layout(spec)
    return _planned(planner, operation, layout, **_read(planner, spec, layout))


_PLANS: dict[str, Callable[[Planner, Operation], PlannedOperation]] = {
    "project": plan_einsums,
    "einsum": plan_einsums,
    "lookup": _lookup,
    "features": _from_data,
    "one_hot": _from_data,
    "shift": _vectors,
    "norm": _vectors,
    "relative_bias": _vectors,
    "rotate": _rotate,
    "sinusoid": _local,
    "dropout": _local,
    "remember": _local,
    "recall": _local,
    "fused_attention": _fused_attention,
    "expand_kv": _expand_kv,
    "softmax": _softmax,
    "relayout": _relayout,
    "reduce": _reduce,
    "concatenate": _concatenate,
    "reshape": _reshape,
    "cross_entropy": _cross_entropy,
    "squared_error": _squared_error,
}


def plan_operation(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan one operation of a recorded model: its compute layout, the conversions of its operands and results, and
    every collective with its size. Raises ValueError if its layouts do not allow computing it."""
    return _PLANS[operation.kind](planner, operation)

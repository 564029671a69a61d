"""Plans of all kinds of operations: conversions, and every collective with its size, earliest issue and latest wait.

The forward pass executes these lists and `platform.plan.communication.traffic` prices the same lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from platform.plan.communication.einsums import plan_einsums
from platform.plan.communication.planned import Collective, PlannedOperation
from platform.plan.communication.planner import Planner
from platform.plan.communication.rule import Conversion, Step, contract, leave
from platform.plan.language.layout import Layout, prefix
from platform.plan.language.ops import Operation, Parameter, Spec


def _lookup(planner: Planner, operation: Operation) -> PlannedOperation:
    table, out = operation.parameters[0], operation.outputs[0]
    c = planner.lookup_contraction(operation)
    conversion = planner.parameter_conversion(operation, table, c.inputs[1])
    inner = planner.shape(table, c.compute.restrict(table.dims))
    local = planner.shape(out, c.compute.restrict(out.dims))
    found = [
        *planner.collectives(conversion.forward, planner.stored(table), "forward", "operation", "contraction"),
        *planner.collectives(c.output.forward, local, "forward", "contraction", "end"),
        *planner.collectives(c.output.backward, planner.shape(out), "backward", "operation", "contraction"),
        *planner.collectives(conversion.backward, inner, "backward", "operand gradient", "end"),
    ]
    token_dims = [d for d in out.dims if d not in table.dims]
    return PlannedOperation(
        operation,
        tuple(found),
        conversions=(conversion, c.output),
        over=c.compute[table.dims[0]],
        tokens=c.compute.restrict(token_dims),
        compute_axes=c.axes,
        only=c.compute.only,
    )


def _vectors(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan a shift, norm or relative_bias: its parameters take the activation's layout; a norm merges statistics."""
    spec = operation.inputs[0]
    have = planner.layout(spec)
    found: list[Collective] = []
    conversions = []
    for p in operation.parameters:
        target = have.restrict(p.dims)
        conversion = planner.parameter_conversion(operation, p, planner.enter(p, target, have.axes))
        conversions.append(conversion)
        inner = planner.shape(p, target)
        found += planner.collectives(conversion.forward, planner.stored(p), "forward", "operation", "use")
        found += planner.collectives(conversion.backward, inner, "backward", "operand gradient", "end")
    over: tuple[str, ...] = ()
    if operation.kind == "norm" and (over := have[spec.dims[-1]]):
        rows = prod(planner.shape(spec)[:-1])
        if operation["norm"] == "layernorm":
            found += planner.statistics(over, have.only, 2 * rows, "forward", "all_gather")
            found += planner.statistics(over, have.only, 2 * rows, "backward")
        else:
            found += planner.statistics(over, have.only, rows, "forward")
            found += planner.statistics(over, have.only, rows, "backward")
    return PlannedOperation(
        operation, tuple(found), conversions=tuple(conversions), over=over, compute_axes=have.axes, only=have.only
    )


def _local(planner: Planner, operation: Operation) -> PlannedOperation:
    layout = planner.layout(operation.outputs[0])
    return PlannedOperation(operation, compute_axes=layout.axes, only=layout.only)


def _hidden(layout: Layout) -> Layout:
    """Return the layout in which attention reads its mask, the data tensor whose padding it hides: as memory_length."""
    return Layout.of({"batch": layout["batch"], "length": layout["memory_length"]}, layout.only)


def _fused_attention(planner: Planner, operation: Operation) -> PlannedOperation:
    layout = planner.layout(operation.outputs[0])
    return PlannedOperation(operation, tokens=_hidden(layout), compute_axes=layout.axes, only=layout.only)


def _from_data(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan features or one_hot: every rank makes its block of the output from its own block of the data tensor."""
    layout = planner.layout(operation.outputs[0])
    tokens = layout.restrict(("length", "batch"))
    return PlannedOperation(operation, tokens=tokens, compute_axes=layout.axes, only=layout.only)


def _rotate(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan a rotate: rotated pairs lie half of d_kv apart, so a split d_kv is gathered first and split again."""
    spec = operation.inputs[0]
    have = planner.layout(spec)
    whole = have.restrict([d for d in spec.dims if d != "d_kv"])
    into, leaving = planner.enter(spec, whole, whole.axes), leave(spec.dims, whole, have, ())
    shape = planner.shape(spec)
    found = [
        *planner.collectives(into.forward, shape, "forward", "operation", "at once"),
        *planner.collectives(leaving.backward, shape, "backward", "gradient", "at once"),
    ]
    return PlannedOperation(
        operation, tuple(found), conversions=(into, leaving), compute_axes=whole.axes, only=whole.only
    )


def _expand_kv(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan an expand_kv: each rank picks the KV heads of its own heads, free; the gradient is all-reduced over the axes
    that split heads but not kv_heads. Raises ValueError if kv_heads are not split over a prefix of the axes of heads.
    """
    spec, out = operation.inputs[0], operation.outputs[0]
    have, goal = planner.layout(spec), planner.layout(out)
    if prefix(have["kv_heads"], goal["heads"]) != have["kv_heads"]:
        raise ValueError(
            f"kv_heads ({have['kv_heads']}) must be split over a prefix of the axes of heads {goal['heads']}"
        )
    lacking = goal["heads"][len(have["kv_heads"]) :]
    conversion = Conversion((), (Step("all_reduce", lacking, only=goal.only),) if lacking else ())
    found = planner.collectives(conversion.backward, planner.shape(spec), "backward", "gradient", "at once")
    return PlannedOperation(operation, tuple(found), conversions=(conversion,), compute_axes=goal.axes, only=goal.only)


def _softmax(planner: Planner, operation: Operation) -> PlannedOperation:
    spec = operation.inputs[0]
    layout, shape, dim = planner.layout(spec), planner.shape(spec), operation["dim"]
    rows = prod(shape) // shape[spec.dims.index(dim)]
    over, only = layout[dim], layout.only
    found = [*planner.statistics(over, only, rows, "forward") * 2, *planner.statistics(over, only, rows, "backward")]
    return PlannedOperation(
        operation,
        tuple(found),
        over=over,
        tokens=_hidden(layout),
        compute_axes=layout.axes,
        only=layout.only,
    )


def _relayout(planner: Planner, operation: Operation) -> PlannedOperation:
    spec, out = operation.inputs[0], operation.outputs[0]
    renamed = dict(zip(spec.dims, out.dims, strict=True))
    have, goal = planner.layout(spec), planner.layout(out)
    source = Layout.of({renamed[d]: axes for d, axes in have.items()}, have.only)
    conversion = planner.enter(out, goal, goal.axes, source=source)
    if planner.scheme.slice_via == "all_gather":
        conversion = _without_all_to_all(conversion, planner.scheme.branches)
    found = [
        *planner.collectives(conversion.forward, planner.shape(spec), "forward", "operation", "at once"),
        *planner.collectives(conversion.backward, planner.shape(out), "backward", "gradient", "at once"),
    ]
    only = tuple(a for a in goal.only if a in have.only)
    return PlannedOperation(operation, tuple(found), conversions=(conversion,), compute_axes=goal.axes, only=only)


def _without_all_to_all(conversion: Conversion, axes: Sequence[str]) -> Conversion:
    """Replace each all-to-all over `axes` by an all-gather and a slice, as in SUPER (Jain et al.), which has none."""

    def replaced(steps: Sequence[Step]) -> tuple[Step, ...]:
        out: list[Step] = []
        for s in steps:
            if s.op == "all_to_all" and s.axes[0] in axes:
                out += [Step("all_gather", s.axes, s.joined, only=s.only), Step("slice", s.axes, s.dim, only=s.only)]
            else:
                out.append(s)
        return tuple(out)

    return Conversion(replaced(conversion.forward), replaced(conversion.backward))


def _reduce(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan a reduce, an einsum of one operand. A maximum over split dims is all-reduced like a statistic, as is the
    number of elements that share it, which its gradient needs; after that every rank has the result."""
    spec, out = operation.inputs[0], operation.outputs[0]
    goal = planner.layout(out)
    c = contract([(spec.dims, planner.layout(spec), False)], (out.dims, goal))
    inner = c.compute.restrict(out.dims)
    local = planner.shape(out, inner)
    over = tuple(a for d in spec.dims if d not in out.dims for a in c.compute[d])
    into = planner.shaped(c.inputs[0], spec, c.compute.restrict(spec.dims))
    leaving = planner.leaving(c, out)
    if operation["function"] == "max":
        leaving = planner.shaped(leave(out.dims, inner, goal, ()), out, goal, inner)
    found = _entering(planner, spec, c.compute.restrict(spec.dims), into)
    if operation["function"] == "max":
        found += planner.statistics(over, c.compute.only, prod(local), "forward") * 2
    found += planner.collectives(leaving.forward, local, "forward", "operation", "at once")
    found += planner.collectives(leaving.backward, planner.shape(out), "backward", "gradient", "at once")
    return PlannedOperation(
        operation,
        tuple(found),
        conversions=(into, leaving),
        over=over,
        compute_axes=c.axes,
        only=c.compute.only,
    )


def _entering(planner: Planner, spec: Spec | Parameter, inside: Layout, conversion: Conversion) -> list[Collective]:
    """Return the collectives that convert an activation to the layout `inside` an operation, and its gradient back."""
    return [
        *planner.collectives(conversion.forward, planner.shape(spec), "forward", "operation", "at once"),
        *planner.collectives(conversion.backward, planner.shape(spec, inside), "backward", "gradient", "at once"),
    ]


def _concatenate(planner: Planner, operation: Operation) -> PlannedOperation:
    out, dim = operation.outputs[0], operation["dim"]
    assert dim != "vocab", "vocab may be padded: its parts would not lie side by side"
    goal = planner.layout(out)
    whole = goal.restrict([d for d in out.dims if d != dim])
    leaving = planner.shaped(leave(out.dims, whole, goal, ()), out, goal, whole)
    conversions, found = [], []
    for spec in operation.inputs:
        assert isinstance(spec, Spec) and spec.dims == out.dims, "the parts and the whole have the same dims"
        conversions.append(planner.enter(spec, whole, whole.axes))
        found += _entering(planner, spec, whole, conversions[-1])
    found += planner.collectives(leaving.backward, planner.shape(out), "backward", "gradient", "at once")
    return PlannedOperation(
        operation, tuple(found), conversions=(*conversions, leaving), compute_axes=whole.axes, only=whole.only
    )


def _reshape(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan a reshape through a layout whose blocks are the same in both shapes, so that reshaping moves nothing: the
    merged dim is split over the major dim's axes, then over the minor's if a block's extent along the major is 1. A
    conversion before and one after it do the rest."""
    spec, out = operation.inputs[0], operation.outputs[0]
    assert isinstance(spec, Spec)
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
    conversions, found = [], []
    for tensor, source, target in steps:
        conversions.append(planner.enter(tensor, target, target.axes, source=source))
        forward, backward = conversions[-1].forward, conversions[-1].backward
        shapes = planner.shape(tensor, source), planner.shape(tensor, target)
        found += planner.collectives(forward, shapes[0], "forward", "operation", "at once")
        found += planner.collectives(backward, shapes[1], "backward", "gradient", "at once")
    return PlannedOperation(
        operation, tuple(found), conversions=tuple(conversions), compute_axes=common.axes, only=common.only
    )


def _cross_entropy(planner: Planner, operation: Operation) -> PlannedOperation:
    spec = operation.inputs[0]
    layout = planner.layout(spec)
    over = layout["vocab"]
    rows = prod(planner.shape(spec)) // planner.shape(spec)[spec.dims.index("vocab")]
    sums = 3 if operation["smoothing"] else 2
    found = [
        *planner.statistics(over, layout.only, rows, "forward"),
        *planner.statistics(over, layout.only, sums * rows, "forward"),
    ]
    return PlannedOperation(
        operation,
        tuple(found),
        over=over,
        tokens=layout.restrict([d for d in spec.dims if d != "vocab"]),
        compute_axes=layout.axes,
        only=layout.only,
    )


def _squared_error(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan a squared_error, which is local: a rank's loss is over its own elements, so `tokens` has all axes that split
    them."""
    layout = planner.layout(operation.inputs[0])
    return PlannedOperation(operation, tokens=layout, compute_axes=layout.axes, only=layout.only)


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
    """Plan an operation's conversions and collectives. Raises ValueError if its layouts do not allow computing it."""
    return _PLANS[operation.kind](planner, operation)

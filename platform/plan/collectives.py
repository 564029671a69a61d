"""The plan of each operation: its conversions, and every collective with its size, earliest issue and latest wait.

The forward pass executes these lists and `platform.plan.cost` prices them: there is no second description.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod

from platform.plan.layout import Layout, local_shape, prefix
from platform.plan.mesh import Mesh
from platform.plan.ops import Operation, Parameter, Spec
from platform.plan.rule import COLLECTIVES, Contraction, Conversion, Step, contract, enter, leave, partial_axes
from platform.plan.scheme import Scheme


@dataclass(frozen=True)
class Collective:
    """One launch on every rank. `elements`: of one member's input, before the collective.

    `dtype` is `compute` (activations, weights) or `accumulate` (statistics, gradients that are summed up).
    `issue` and `wait` say the earliest point of issue and the latest wait inside the operation.
    """

    op: str
    axes: tuple[str, ...]
    elements: int
    dtype: str
    phase: str  # forward | backward
    issue: str
    wait: str


@dataclass(frozen=True)
class Member:
    """One einsum of a group: `operand` [dims] with the shared x into output number `index`."""

    index: int
    x_dims: tuple[str, ...]
    dims: tuple[str, ...]
    out_dims: tuple[str, ...]
    operand: Conversion
    output: Conversion


@dataclass(frozen=True)
class Panels:
    """SUMMA instead of two gathers: `dim`, which every member contracts, is split over `x_axes` in x and over
    `operand_axes` in the operands (either may be none), and comes in `count` panels, each broadcast by its owners."""

    dim: str
    x_axes: tuple[str, ...]
    operand_axes: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Group:
    """Einsums that read x in one compute layout: one gather of x, one reduction of its gradient.

    With `panels`, the conversions leave out the gathers of the contracted dim and their adjoints.
    """

    x: Conversion
    members: tuple[Member, ...]
    panels: Panels | None = None

    @property
    def x_dims(self) -> tuple[str, ...]:
        return self.members[0].x_dims


@dataclass(frozen=True)
class PlannedOperation:
    """What a rank executes for one operation.

    `groups` for project and einsum; `conversions`, one per parameter or moved operand, for the others; `over` are the
    axes that split the dim of a norm, softmax or cross-entropy, whose statistics are merged over them; `tokens` is the
    layout over batch and length in which the operation reads a data tensor.
    """

    operation: Operation
    collectives: tuple[Collective, ...] = ()
    groups: tuple[Group, ...] = ()
    conversions: tuple[Conversion, ...] = ()
    over: tuple[str, ...] = ()
    tokens: Layout = Layout()
    compute_axes: tuple[str, ...] = ()


def walk(steps: Sequence[Step], shape: Sequence[int], mesh: Mesh) -> list[tuple[Step, int]]:
    """The collectives among `steps` with the elements of their input, from a local tensor of `shape`."""
    now, out = list(shape), []
    for step in steps:
        n = mesh.extent(step.axes)
        if step.op in COLLECTIVES:
            out.append((step, prod(now)))
        if step.op in ("all_gather", "pad"):
            now[step.dim] *= n
        elif step.op in ("reduce_scatter", "slice"):
            now[step.dim] //= n
        elif step.op == "all_to_all":
            now[step.dim] //= n
            now[step.joined] *= n
    return out


@dataclass(frozen=True)
class Planner:
    """Plans operations for one scheme on one mesh. `sizes`: global dims, vocab padded.

    `reduced_at_use[name, kind, parameter]`: axes over which this use's gradient is reduced in its backward, because the
    parameter's uses disagree on them.
    """

    mesh: Mesh
    scheme: Scheme
    sizes: Mapping[str, int]
    reduced_at_use: Mapping[tuple[str, str, str], tuple[str, ...]]

    def layout(self, tensor: Spec | Parameter) -> Layout:
        """The layout of an activation or parameter. kv_heads takes the longest prefix of heads' axes that divides it,
        where the scheme does not name it."""
        dims = tensor.dims
        wanted = (*dims, "heads") if "kv_heads" in dims else dims
        if isinstance(tensor, Parameter):
            layout = self.scheme.parameter(tensor.role, wanted)
        else:
            layout = self.scheme.activation(tensor.region, wanted)
        if "kv_heads" in dims:
            rules = dict(layout)
            heads = rules.pop("heads", ())
            rules.setdefault("kv_heads", self._kv_axes(heads))
            layout = Layout.of(rules)
        return layout

    def _kv_axes(self, heads: Sequence[str]) -> tuple[str, ...]:
        n = len(heads)
        while self.sizes["kv_heads"] % self.mesh.extent(heads[:n]):
            n -= 1
        return tuple(heads[:n])

    def sizes_of(self, tensor: Spec | Parameter) -> dict[str, int]:
        """Global dims of a tensor: the model's, but for the tensor's own."""
        return {**self.sizes, **dict(tensor.sizes)}

    def shape(self, tensor: Spec | Parameter, layout: Layout | None = None) -> tuple[int, ...]:
        """Local shape of a tensor in its own layout, or in another one."""
        layout = self.layout(tensor) if layout is None else layout
        return local_shape(tensor.dims, self.sizes_of(tensor), layout, self.mesh)

    def plan(self, operation: Operation) -> PlannedOperation:
        return _PLANS[operation.kind](self, operation)

    def partial(self, operation: Operation) -> dict[str, tuple[str, ...]]:
        """Parameter name -> axes over which its gradient is partial after this operation."""
        parameters = operation.parameters
        if operation.kind == "project":
            spec = operation.inputs[0]
            pairs = zip(parameters, operation.outputs, strict=True)
            axes = {p.name: self.contraction(spec, p, out).axes for p, out in pairs}
        elif operation.kind == "lookup":
            axes = {p.name: self.lookup_contraction(operation).axes for p in parameters}
        else:
            axes = {p.name: self.layout(operation.outputs[0]).axes for p in parameters}
        return {p.name: partial_axes(self.layout(p), axes[p.name]) for p in parameters}

    def contraction(self, x: Spec | Parameter, y: Spec | Parameter, out: Spec) -> Contraction:
        operands = [(t.dims, self.layout(t), isinstance(t, Parameter)) for t in (x, y)]
        return contract(operands, (out.dims, self.layout(out)))

    def lookup_contraction(self, operation: Operation) -> Contraction:
        table, out = operation.inputs[0], operation.outputs[0]
        token_dims = tuple(d for d in out.dims if d not in table.dims)
        one_hot = (*token_dims, "vocab")
        # the one-hot is unmaterialised: it has whatever split of vocab the table has, and whole tokens
        vocab = self.layout(table).restrict(["vocab"])
        return contract([(one_hot, vocab, False), (table.dims, self.layout(table), True)], (out.dims, self.layout(out)))

    def parameter_conversion(self, operation: Operation, p: Parameter, conversion: Conversion) -> Conversion:
        """Adds the reduction at this use, if the parameter's uses disagree, where its gradient is narrowest.

        The sum over an axis of blocks in zeros along that axis is an all-gather of the blocks.
        """
        axes = self.reduced_at_use.get((operation.name, operation.kind, p.name), ())
        backward = [
            replace(s, op="all_gather") if s.op == "pad" and s.axes[0] in axes else s for s in conversion.backward
        ]
        gathered = {s.axes[0] for s, old in zip(backward, conversion.backward, strict=True) if s != old}
        if summed := tuple(a for a in axes if a not in gathered):
            at = next((i for i, s in enumerate(conversion.backward) if s.op == "pad"), len(backward))
            backward.insert(at, Step("all_reduce", summed))
        return replace(conversion, backward=tuple(backward))

    def collectives(
        self, steps: Sequence[Step], shape: Sequence[int], phase: str, issue: str, wait: str, dtype: str = "compute"
    ) -> list[Collective]:
        return [Collective(s.op, s.axes, n, dtype, phase, issue, wait) for s, n in walk(steps, shape, self.mesh)]

    def statistics(self, over: Sequence[str], elements: int, phase: str, op: str = "all_reduce") -> list[Collective]:
        if not over:
            return []
        return [Collective(op, tuple(over), elements, "accumulate", phase, "statistics ready", "at once")]


def _project(planner: Planner, operation: Operation) -> PlannedOperation:
    """project and einsum: members that bring x to one compute layout form a group."""
    x = operation.inputs[0]
    grouped: dict[tuple[Conversion, Layout], list[tuple[Member, Contraction]]] = {}
    for index, (operand, out) in enumerate(zip(operation.inputs[1:], operation.outputs, strict=True)):
        c = planner.contraction(x, operand, out)
        enter_operand = c.inputs[1]
        if isinstance(operand, Parameter):
            enter_operand = planner.parameter_conversion(operation, operand, enter_operand)
        member = Member(index, x.dims, operand.dims, out.dims, enter_operand, c.output)
        grouped.setdefault((c.inputs[0], c.compute.restrict(x.dims)), []).append((member, c))
    groups, found = [], []
    for (enter_x, _), entries in grouped.items():
        group = Group(enter_x, tuple(member for member, _ in entries))
        if planner.scheme.gathered == "panels" and (in_panels := split_into_panels(group, planner.mesh)):
            group = in_panels
        groups.append(group)
        found += _einsum_collectives(planner, operation, group, [c for _, c in entries])
    axes = tuple(dict.fromkeys(a for entries in grouped.values() for _, c in entries for a in c.axes))
    return PlannedOperation(operation, tuple(found), groups=tuple(groups), compute_axes=axes)


def split_into_panels(group: Group, mesh: Mesh) -> Group | None:
    """The same products by SUMMA, where x and all operands gather one contracted dim last, and nothing else follows."""
    contracted = [d for d in group.x_dims if all(d in m.dims and d not in m.out_dims for m in group.members)]
    plans = []
    for dim in contracted:
        x = _without_gather(group.x, group.x_dims.index(dim))
        operands = [_without_gather(m.operand, m.dims.index(dim)) for m in group.members]
        axes = {taken for _, taken in operands}
        local = not any(m.output.forward or m.output.backward for m in group.members)
        if local and len(axes) == 1 and (x[1] or operands[0][1]):
            plans.append((dim, x, operands))
    if not plans:
        return None
    dim, (rest, x_axes), operands = plans[0]
    count = lcm(mesh.extent(x_axes), mesh.extent(operands[0][1]))
    members = (replace(m, operand=c) for m, (c, _) in zip(group.members, operands, strict=True))
    return Group(rest, tuple(members), Panels(dim, x_axes, operands[0][1], count))


def _without_gather(c: Conversion, position: int) -> tuple[Conversion, tuple[str, ...]]:
    """A conversion without its last step, if that gathers the dim at `position` and its adjoint sums; and its axes."""
    if c.forward and c.backward:
        last, first = c.forward[-1], c.backward[0]
        if (last.op, first.op) == ("all_gather", "reduce_scatter") and last.dim == first.dim == position:
            return Conversion(c.forward[:-1], c.backward[1:]), last.axes
    return c, ()


def _einsum_collectives(
    planner: Planner, operation: Operation, group: Group, contractions: Sequence[Contraction]
) -> list[Collective]:
    """Every collective of a group, forward and backward, in the order of `platform.parallel.einsum`.

    `contractions`: of its members.
    """
    found: list[Collective] = []
    panels = group.panels

    def entering(tensor: Spec | Parameter, compute: Layout, conversion: Conversion, ready: str) -> None:
        rules = dict(compute.restrict(tensor.dims))
        axes: tuple[str, ...] = ()
        if panels:  # their dim is still split
            axes = panels.operand_axes if isinstance(tensor, Parameter) else panels.x_axes
            rules[panels.dim] = (*compute[panels.dim], *axes)
        local = planner.shape(tensor, Layout.of(rules))
        steps = planner.collectives(conversion.forward, planner.shape(tensor), "forward", "operation", "contraction")
        found.extend(steps)
        if planner.scheme.gathered == "again":
            found.extend(replace(s, phase="backward", wait="gradients") for s in steps)
        found.extend(planner.collectives(conversion.backward, local, "backward", ready, "end"))
        if panels:
            found.extend(_panel_collectives(panels, axes, local, planner))

    entering(operation.inputs[0], contractions[0].compute, group.x, "input gradient")
    for m, c in zip(group.members, contractions, strict=True):
        out = operation.outputs[m.index]
        local = planner.shape(out, c.compute.restrict(out.dims))
        entering(operation.inputs[1:][m.index], c.compute, m.operand, "operand gradient")
        found += planner.collectives(m.output.forward, local, "forward", "contraction", "end")
        found += planner.collectives(m.output.backward, planner.shape(out), "backward", "operation", "contraction")
    return found


def _panel_collectives(
    panels: Panels, axes: tuple[str, ...], local: Sequence[int], planner: Planner
) -> list[Collective]:
    """Of one operand: each panel is broadcast forward and again backward, and its gradient is reduced."""
    if not axes:
        return []
    elements = prod(local) * planner.mesh.extent(axes) // panels.count
    kinds = [("broadcast", "forward"), ("broadcast", "backward"), ("reduce", "backward")]
    return [
        Collective(op, axes, elements, "compute", phase, "panel before", "panel")
        for op, phase in kinds
        for _ in range(panels.count)
    ]


def _lookup(planner: Planner, operation: Operation) -> PlannedOperation:
    table, out = operation.parameters[0], operation.outputs[0]
    c = planner.lookup_contraction(operation)
    conversion = planner.parameter_conversion(operation, table, c.inputs[1])
    inner = planner.shape(table, c.compute.restrict(table.dims))
    local = planner.shape(out, c.compute.restrict(out.dims))
    found = [
        *planner.collectives(conversion.forward, planner.shape(table), "forward", "operation", "contraction"),
        *planner.collectives(c.output.forward, local, "forward", "contraction", "end"),
        *planner.collectives(c.output.backward, planner.shape(out), "backward", "operation", "contraction"),
        *planner.collectives(conversion.backward, inner, "backward", "operand gradient", "end"),
    ]
    token_dims = [d for d in out.dims if d not in table.dims]
    return PlannedOperation(
        operation,
        tuple(found),
        conversions=(conversion, c.output),
        over=c.compute["vocab"],
        tokens=c.compute.restrict(token_dims),
        compute_axes=c.axes,
    )


def _vectors(planner: Planner, operation: Operation) -> PlannedOperation:
    """shift, norm, relative_bias: parameters are brought to the activation's layout; a norm merges its statistics."""
    spec = operation.inputs[0]
    have = planner.layout(spec)
    found: list[Collective] = []
    conversions = []
    for p in operation.parameters:
        target = have.restrict(p.dims)
        conversion = enter(p.dims, planner.layout(p), target, have.axes, parameter=True)
        conversion = planner.parameter_conversion(operation, p, conversion)
        conversions.append(conversion)
        inner = planner.shape(p, target)
        found += planner.collectives(conversion.forward, planner.shape(p), "forward", "operation", "use")
        found += planner.collectives(conversion.backward, inner, "backward", "operand gradient", "end")
    over: tuple[str, ...] = ()
    if operation.kind == "norm" and (over := have["d_model"]):
        rows = prod(planner.shape(spec)) // planner.shape(spec)[spec.dims.index("d_model")]
        if operation["norm"] == "layernorm":
            found += planner.statistics(over, 2 * rows, "forward", "all_gather")
            found += planner.statistics(over, 2 * rows, "backward")
        else:
            found += planner.statistics(over, rows, "forward")
            found += planner.statistics(over, rows, "backward")
    return PlannedOperation(operation, tuple(found), conversions=tuple(conversions), over=over, compute_axes=have.axes)


def _local(planner: Planner, operation: Operation) -> PlannedOperation:
    return PlannedOperation(operation, compute_axes=planner.layout(operation.outputs[0]).axes)


def _hidden(layout: Layout) -> Layout:
    """Where an attention in `layout` reads the data tensor whose padding it hides: its length is memory_length."""
    return Layout.of({"batch": layout["batch"], "length": layout["memory_length"]})


def _fused_attention(planner: Planner, operation: Operation) -> PlannedOperation:
    layout = planner.layout(operation.outputs[0])
    return PlannedOperation(operation, tokens=_hidden(layout), compute_axes=layout.axes)


def _features(planner: Planner, operation: Operation) -> PlannedOperation:
    layout = planner.layout(operation.outputs[0])
    return PlannedOperation(operation, tokens=layout.restrict(("length", "batch")), compute_axes=layout.axes)


def _rotate(planner: Planner, operation: Operation) -> PlannedOperation:
    """Pairs lie half of d_kv apart: where it is split, it is gathered first and split again."""
    spec = operation.inputs[0]
    have = planner.layout(spec)
    whole = have.restrict([d for d in spec.dims if d != "d_kv"])
    into, leaving = enter(spec.dims, have, whole, whole.axes), leave(spec.dims, whole, have, ())
    shape = planner.shape(spec)
    found = [
        *planner.collectives(into.forward, shape, "forward", "operation", "at once"),
        *planner.collectives(leaving.backward, shape, "backward", "gradient", "at once"),
    ]
    return PlannedOperation(operation, tuple(found), conversions=(into, leaving), compute_axes=whole.axes)


def _expand_kv(planner: Planner, operation: Operation) -> PlannedOperation:
    """Each rank picks the KV heads of its own heads: free; the gradient is summed over the axes that share them."""
    spec, out = operation.inputs[0], operation.outputs[0]
    have, goal = planner.layout(spec), planner.layout(out)
    if prefix(have["kv_heads"], goal["heads"]) != have["kv_heads"]:
        raise ValueError(
            f"kv_heads ({have['kv_heads']}) must be split over a prefix of the axes of heads {goal['heads']}"
        )
    lacking = goal["heads"][len(have["kv_heads"]) :]
    conversion = Conversion((), (Step("all_reduce", lacking),) if lacking else ())
    found = planner.collectives(conversion.backward, planner.shape(spec), "backward", "gradient", "at once")
    return PlannedOperation(operation, tuple(found), conversions=(conversion,), compute_axes=goal.axes)


def _softmax(planner: Planner, operation: Operation) -> PlannedOperation:
    spec = operation.inputs[0]
    layout = planner.layout(spec)
    rows = prod(planner.shape(spec)[:-1])
    over = layout[spec.dims[-1]]
    found = [*planner.statistics(over, rows, "forward") * 2, *planner.statistics(over, rows, "backward")]
    return PlannedOperation(operation, tuple(found), over=over, tokens=_hidden(layout), compute_axes=layout.axes)


def _relayout(planner: Planner, operation: Operation) -> PlannedOperation:
    spec, out = operation.inputs[0], operation.outputs[0]
    renamed = dict(zip(spec.dims, out.dims, strict=True))
    source = Layout.of({renamed[d]: axes for d, axes in planner.layout(spec).items()})
    goal = planner.layout(out)
    conversion = enter(out.dims, source, goal, goal.axes)
    found = [
        *planner.collectives(conversion.forward, planner.shape(spec), "forward", "operation", "at once"),
        *planner.collectives(conversion.backward, planner.shape(out), "backward", "gradient", "at once"),
    ]
    return PlannedOperation(operation, tuple(found), conversions=(conversion,), compute_axes=goal.axes)


def _cross_entropy(planner: Planner, operation: Operation) -> PlannedOperation:
    spec = operation.inputs[0]
    layout = planner.layout(spec)
    over = layout["vocab"]
    rows = prod(planner.shape(spec)) // planner.shape(spec)[spec.dims.index("vocab")]
    sums = 3 if operation["smoothing"] else 2
    found = [*planner.statistics(over, rows, "forward"), *planner.statistics(over, sums * rows, "forward")]
    return PlannedOperation(
        operation,
        tuple(found),
        over=over,
        tokens=layout.restrict([d for d in spec.dims if d != "vocab"]),
        compute_axes=layout.axes,
    )


def _squared_error(planner: Planner, operation: Operation) -> PlannedOperation:
    """Local: every rank's part of the loss is over its own elements, so `tokens` names all axes that split them."""
    layout = planner.layout(operation.inputs[0])
    return PlannedOperation(operation, tokens=layout, compute_axes=layout.axes)


_PLANS: dict[str, Callable[[Planner, Operation], PlannedOperation]] = {
    "project": _project,
    "einsum": _project,
    "lookup": _lookup,
    "features": _features,
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
    "cross_entropy": _cross_entropy,
    "squared_error": _squared_error,
}

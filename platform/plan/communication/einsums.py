"""Plans of `project` and `einsum` operations: einsums that share a gather of x, their collectives, SUMMA panels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm, prod

from platform.plan.communication.planned import Collective, Group, GroupMember, Panels, PlannedOperation
from platform.plan.communication.planner import Planner
from platform.plan.communication.rule import Contraction, Conversion
from platform.plan.language.layout import Layout
from platform.plan.language.mesh import Mesh
from platform.plan.language.ops import Operation, Parameter, Spec


def plan_einsums(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan a project or einsum operation: members that convert x to the same compute layout form a group."""
    x = operation.inputs[0]
    again = planner.scheme.gathered == "again"
    grouped: dict[tuple[Conversion, Layout], list[tuple[GroupMember, Contraction]]] = {}
    for index, (operand, out) in enumerate(zip(operation.inputs[1:], operation.outputs, strict=True)):
        c = planner.contraction(x, operand, out)
        enter_operand, bring_again = c.inputs[1], again
        if isinstance(operand, Parameter):
            enter_operand = planner.parameter_conversion(operation, operand, enter_operand)
            bring_again |= bool(planner.storage)
        member = GroupMember(index, x.dims, operand.dims, out.dims, enter_operand, c.output, bring_again)
        grouped.setdefault((c.inputs[0], c.compute.restrict(x.dims)), []).append((member, c))
    groups, found = [], []
    for (enter_x, _), entries in grouped.items():
        group = Group(enter_x, tuple(member for member, _ in entries), again=again)
        if planner.scheme.gathered == "panels" and (in_panels := split_into_panels(group, planner.mesh)):
            group = in_panels
        groups.append(group)
        found += _einsum_collectives(planner, operation, group, [c for _, c in entries])
    contractions = [c for entries in grouped.values() for _, c in entries]
    axes = tuple(dict.fromkeys(a for c in contractions for a in c.axes))
    only = tuple(a for a in contractions[0].compute.only if all(a in c.compute.only for c in contractions))
    return PlannedOperation(operation, tuple(found), groups=tuple(groups), compute_axes=axes, only=only)


def split_into_panels(group: Group, mesh: Mesh) -> Group | None:
    """Return the group computed by SUMMA, or None if it cannot be: x and all operands must gather one contracted dim in
    their last step, and no member's output may need a conversion."""
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
    """Return the conversion without its last step and that step's axes, if it all-gathers the dim at `position` and its
    adjoint is a reduce-scatter; else the conversion itself and ()."""
    if c.forward and c.backward:
        last, first = c.forward[-1], c.backward[0]
        if (last.op, first.op) == ("all_gather", "reduce_scatter") and last.dim == first.dim == position:
            return Conversion(c.forward[:-1], c.backward[1:]), last.axes
    return c, ()


def _einsum_collectives(
    planner: Planner, operation: Operation, group: Group, contractions: Sequence[Contraction]
) -> list[Collective]:
    """Return every collective of a group, forward and backward, in the order of `platform.parallel.kernels.einsum`.

    `contractions`: one per member.
    """
    found: list[Collective] = []
    panels = group.panels

    def entering(tensor: Spec | Parameter, compute: Layout, conversion: Conversion, again: bool, ready: str) -> None:
        rules = dict(compute.restrict(tensor.dims))
        axes: tuple[str, ...] = ()
        if panels:  # the panels' dim is not gathered, so it stays split
            axes = panels.operand_axes if isinstance(tensor, Parameter) else panels.x_axes
            rules[panels.dim] = (*compute[panels.dim], *axes)
        local = planner.shape(tensor, Layout.of(rules))
        steps = planner.collectives(conversion.forward, planner.stored(tensor), "forward", "operation", "contraction")
        found.extend(steps)
        if again:
            found.extend(replace(s, phase="backward", wait="gradients") for s in steps)
        found.extend(planner.collectives(conversion.backward, local, "backward", ready, "end"))
        if panels:
            found.extend(_panel_collectives(panels, axes, local, planner, compute.only))

    entering(operation.inputs[0], contractions[0].compute, group.x, group.again, "input gradient")
    for m, c in zip(group.members, contractions, strict=True):
        out = operation.outputs[m.index]
        local = planner.shape(out, c.compute.restrict(out.dims))
        entering(operation.inputs[1:][m.index], c.compute, m.operand, m.again, "operand gradient")
        found += planner.collectives(m.output.forward, local, "forward", "contraction", "end")
        found += planner.collectives(m.output.backward, planner.shape(out), "backward", "operation", "contraction")
    return found


def _panel_collectives(
    panels: Panels, axes: tuple[str, ...], local: Sequence[int], planner: Planner, only: tuple[str, ...]
) -> list[Collective]:
    """Return the collectives of one operand: each panel is broadcast in both passes, and its gradient is reduced."""
    if not axes:
        return []
    elements = prod(local) * planner.mesh.extent(axes) // panels.count
    kinds = [("broadcast", "forward"), ("broadcast", "backward"), ("reduce", "backward")]
    return [
        Collective(op, axes, elements, "compute", phase, "panel before", "panel", only)
        for op, phase in kinds
        for _ in range(panels.count)
    ]

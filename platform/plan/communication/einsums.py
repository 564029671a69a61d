"""Plans of `project` and `einsum` operations: einsums that share a gather of x, their collectives, SUMMA panels."""

from __future__ import annotations

from dataclasses import replace
from math import lcm, prod

from platform.plan.communication.planned import Collective, Einsum, EinsumGroup, Panels, PlannedOperation, shapes
from platform.plan.communication.planner import Planner
from platform.plan.communication.rule import Contraction, Conversion
from platform.plan.language.layout import Layout
from platform.plan.language.mesh import Mesh
from platform.plan.language.ops import Operation, Parameter


def plan_einsums(planner: Planner, operation: Operation) -> PlannedOperation:
    """Plan a project or einsum operation: compute layouts, conversions and collectives of its einsums; those that
    convert x to the same compute layout form a group, which gathers x once."""
    x, regathers = operation.inputs[0], planner.scheme.gathered == "again"
    grouped: dict[tuple[Conversion, Layout], list[tuple[Einsum, Contraction]]] = {}
    for index, (operand, out) in enumerate(zip(operation.inputs[1:], operation.outputs, strict=True)):
        c = planner.einsum(x, operand, out)
        enter_operand = c.inputs[1]
        if isinstance(operand, Parameter):
            enter_operand = planner.parameter_conversion(operation, operand, enter_operand)
        einsum = Einsum(index, x.dims, operand.dims, out.dims, enter_operand, c.output, regathers)
        grouped.setdefault((c.inputs[0], c.compute.restrict(x.dims)), []).append((einsum, c))
    groups, found = [], []
    for (enter_x, _), entries in grouped.items():
        group = EinsumGroup(enter_x, tuple(einsum for einsum, _ in entries), regathered=regathers)
        if planner.scheme.gathered == "panels":
            group = split_into_panels(group, planner.mesh) or group
        groups.append(group)
        found += _group_collectives(planner, group, entries[0][1].compute.only)
    contractions = [c for entries in grouped.values() for _, c in entries]
    axes = tuple(dict.fromkeys(a for c in contractions for a in c.axes))
    only = tuple(a for a in contractions[0].compute.only if all(a in c.compute.only for c in contractions))
    return PlannedOperation(operation, tuple(found), groups=tuple(groups), compute_axes=axes, only=only)


def split_into_panels(group: EinsumGroup, mesh: Mesh) -> EinsumGroup | None:
    """Return the group of einsums computed by SUMMA, one panel of the contracted dim at a time, or None if it cannot
    be: x and all operands must gather one contracted dim in their last step, and no einsum's output may need a
    conversion."""
    if any(e.output.forward or e.output.backward for e in group.einsums):
        return None
    for dim in group.x_dims:
        if not all(dim in e.dims and dim not in e.out_dims for e in group.einsums):
            continue
        x, x_axes = _without_gather(group.x, group.x_dims.index(dim), mesh)
        operands = [_without_gather(e.operand, e.dims.index(dim), mesh) for e in group.einsums]
        axes = operands[0][1]
        if all(taken == axes for _, taken in operands) and (x_axes or axes):
            count = lcm(mesh.extent(x_axes), mesh.extent(axes))
            einsums = (replace(e, operand=rest) for e, (rest, _) in zip(group.einsums, operands, strict=True))
            return EinsumGroup(x, tuple(einsums), Panels(dim, x_axes, axes, count))
    return None


def _without_gather(c: Conversion, position: int, mesh: Mesh) -> tuple[Conversion, tuple[str, ...]]:
    """Return an operand's conversion without its last step, and that step's axes, if the step all-gathers the dim at
    `position` and its adjoint is a reduce-scatter; else the conversion itself and (). SUMMA broadcasts panels in place
    of that gather."""
    if c.forward and c.backward:
        last, first = c.forward[-1], c.backward[0]
        if (last.op, first.op) == ("all_gather", "reduce_scatter") and last.dim == first.dim == position:
            *_, (_, split, _) = shapes(c.forward, c.before, mesh)
            return Conversion(c.forward[:-1], c.backward[1:], c.before, split), last.axes
    return c, ()


def _group_collectives(planner: Planner, group: EinsumGroup, only: tuple[str, ...]) -> list[Collective]:
    """Return every collective, forward and backward, of a group of einsums that the ranks at index 0 of the axes `only`
    compute."""
    found = planner.collectives(group.x, group.regathered)
    if panels := group.panels:
        found += _panel_collectives(panels, panels.x_axes, group.x, planner.mesh, only)
    for e in group.einsums:
        found += planner.collectives(e.operand, e.regathered)
        if panels:
            found += _panel_collectives(panels, panels.operand_axes, e.operand, planner.mesh, only)
        found += planner.collectives(e.output)
    return found


def _panel_collectives(
    panels: Panels, axes: tuple[str, ...], operand: Conversion, mesh: Mesh, only: tuple[str, ...]
) -> list[Collective]:
    """Return the collectives by which SUMMA passes one operand of a group, split over `axes`, around in panels: each
    panel is broadcast in both passes, and its gradient is reduced. `operand`: its remaining conversion; `only`: the
    axes at whose index 0 alone ranks compute."""
    if not axes:
        return []
    elements = panels.elements(prod(operand.after), axes, mesh)
    kinds = [("broadcast", "forward"), ("broadcast", "backward"), ("reduce", "backward")]
    return [Collective(op, axes, elements, "compute", phase, only) for op, phase in kinds for _ in range(panels.count)]

"""Asynchronous products: products with weights that run as one with the all-gather of what they read, or with the
reduce-scatter of what they give, part by part, so that all but the first part travels under the product (async tensor
parallelism of PyTorch; Wang et al. 2023, "Overlap communication with dependent computation via decomposition").

Of such a group the backward pass has the adjoint: a gradient that is scattered as it is computed, or gathered as it is
multiplied. Nothing else of a plan changes: it has the same conversions, collectives and bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from platform.plan.model_types import Parameter
from platform.plan.operation_plan import Einsum, EinsumGroup, PlannedOperation
from platform.plan.plan import Plan
from platform.plan.rule import Conversion


def fuse_products(plan: Plan) -> Plan:
    """Return the plan with each group of einsums that can be one with its collective marked so (`fuses`)."""

    fuse = partial(fuse_operation, are_neighbours=partial(_are_neighbours, plan))
    chunks = (replace(chunk, operations={key: fuse(o) for key, o in chunk.operations.items()}) for chunk in plan.chunks)
    shorter = {length: fuse_products(other) for length, other in plan.shorter.items()}
    return replace(plan, chunks=tuple(chunks), shorter=shorter)


def fuse_operation(o: PlannedOperation, are_neighbours: Callable[[list[str]], bool]) -> PlannedOperation:
    """Return a planned operation with its groups marked, itself if none is; weights of several are `are_neighbours`."""
    groups = tuple(_fuse_group(o, group, are_neighbours) for group in o.groups)
    return replace(o, groups=groups) if groups != o.groups else o


def list_fused_axes(plan: Plan) -> list[str]:
    """Return the mesh axes over which products of a plan are one with their collectives, in mesh order."""
    conversions = (group.fused_conversion for o in plan.operations.values() for group in o.groups)
    return list(plan.mesh.order_axes({axis for c in conversions if c for axis in c.forward[0].axes}))


def _fuse_group(o: PlannedOperation, group: EinsumGroup, are_neighbours: Callable[[list[str]], bool]) -> EinsumGroup:
    """Return a group of einsums marked with the end whose collective is one with its products, if there is one."""
    weights = [o.operation.inputs[1 + e.index] for e in group.einsums]
    multiplies_weights = all(isinstance(w, Parameter) for w in weights) and all(map(_is_matrix_product, group.einsums))
    if o.only or group.panels or group.has_wide_dtype or group.is_scaled or not multiplies_weights:
        return group
    if "rows" in group.x_dims or any("vocab" in e.out_dims for e in group.einsums):  # the loss takes chunks of logits
        return group
    first, *others = group.einsums
    if others and not (group.can_join_operands and are_neighbours([w.name for w in weights])):  # type: ignore[union-attr]
        return group
    rows = first.num_row_dims
    if _is_one_move(group.x, "all_gather", "reduce_scatter", rows):
        return replace(group, fuses="x")
    if not others and _is_one_move(first.output, "reduce_scatter", "all_gather", rows):
        return replace(group, fuses="result")
    return group


def _is_matrix_product(e: Einsum) -> bool:
    """Return True if an einsum of x [rows, contracted] with a matrix, either way around, gives [rows, columns]."""
    rows = e.num_row_dims
    contracted, columns = e.x_dims[rows:], e.out_dims[rows:]
    return e.x_dims[:rows] == e.out_dims[:rows] and e.dims in (columns + contracted, contracted + columns)


def _is_one_move(c: Conversion, forward: str, backward: str, rows: int) -> bool:
    """Return True if a conversion is one collective of equal blocks of one of the first `rows` dims over one axis."""
    if [s.op for s in c.forward] != [forward] or [s.op for s in c.backward] != [backward]:
        return False
    (step,), (adjoint,) = c.forward, c.backward
    is_plain = all(s.zigzag < 0 and not (s.cuts or s.only or s.shape) for s in (step, adjoint))
    return is_plain and step.axes == adjoint.axes and len(step.axes) == 1 and step.dim == adjoint.dim < rows


def _are_neighbours(plan: Plan, names: list[str]) -> bool:
    """Return True if parameters lie one after another in one bucket of the plan, so that they are one matrix."""
    bucket = plan.bucket_by_parameter.get(names[0])
    return bucket is not None and bucket.range_of_parameters(names) is not None

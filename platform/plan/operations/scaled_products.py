"""Planning of products in 8 bits: which of an einsum's three they are, the maxima that ranks take together for their
scales, and where a layout cuts a block of elements with one scale, which would make other numbers of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod

from platform.plan.layout import Layout
from platform.plan.model_types import Operation, Parameter, Spec
from platform.plan.operation_plan import Collective, Einsum, EinsumGroup
from platform.plan.planner import Planner
from platform.plan.quantisation import (
    EXACT,
    PHASES,
    ROLES,
    Quantisation,
    ScaledProducts,
    arrange_product,
    contracted_dims,
)

Operand = Spec | Parameter


def find_quantisation(operation: Operation) -> Quantisation | None:
    """Return how an operation's products are in 8 bits; None if they are not."""
    how: Quantisation | None = dict(operation.attributes).get("quantise")
    return how


def plan_scaled_products(
    planner: Planner, operation: Operation, weight: Operand, out: Spec, compute: Layout
) -> ScaledProducts | None:
    """Return which products of a weight are in 8 bits where an einsum computes in the layout `compute`, and their
    maxima over ranks; None for none. Rows of several experts begin no block with each expert: their gradients of
    weights are not in 8 bits, nor is a product whose maxima would be as many as the rows that come."""
    how = find_quantisation(operation)
    if how is None or not isinstance(weight, Parameter):
        return None
    tensors: tuple[Operand, Operand, Operand] = operation.inputs[0], weight, out
    of_rows = "rows" in tensors[0].dims
    products, maxima = list[str](), list[tuple[str, int, tuple[str, ...]]]()
    for product in ROLES:
        operands = arrange_product(*tensors, product)
        axes = [_axes_of_maximum(planner, how, operands, n, compute) for n in (0, 1)]
        if (product == "weight" and (of_rows or planner.is_frozen(weight))) or (
            of_rows and axes[0] and how.scale == "row"
        ):
            continue
        products.append(product)
        maxima += [(product, n, over) for n, over in enumerate(axes) if over]
    return ScaledProducts(how, tuple(products), tuple(maxima)) if products else None


def _axes_of_maximum(
    planner: Planner, how: Quantisation, tensors: Sequence[Operand], number: int, compute: Layout
) -> tuple[str, ...]:
    """Return the axes that split, in the layout `compute`, what has one scale of operand `number` in 8 bits."""
    if how.scale in EXACT:
        return ()
    a, b, out = (t.dims for t in tensors)
    shared = {d for d in a if d in b and d in out} | {"experts"} & {*tensors[number].dims}
    along = contracted_dims(a, b, out) if how.scale == "row" else tensors[number].dims
    return planner.mesh.order_axes({axis for d in along if d not in shared for axis in compute[d]})


def list_maxima(
    planner: Planner, operation: Operation, group: EinsumGroup, computes: Sequence[Layout]
) -> Iterator[Collective]:
    """Yield the collectives by which ranks take the maxima of a group's products in 8 bits; `computes`: the layout that
    each einsum computes in. Of x, which all share, they are taken once in each pass."""
    taken = set[tuple[str, int]]()
    for e, compute in zip(group.einsums, computes, strict=True):
        for product, number, axes in e.scaled.maxima if e.scaled else ():
            tensors = _list_tensors(operation, e)
            if operation.inputs[0] is (operand := arrange_product(*tensors, product)[number]):
                if (product, number) in taken:
                    continue
                taken.add((product, number))
            dims = arrange_product(e.x_dims, e.dims, e.out_dims, product)
            kept = _dims_of_scales(e, number, dims)
            layout = compute.restrict_dims(operand.dims)
            extents = dict(zip(operand.dims, planner.local_shape(operand, layout), strict=True))
            if operand is tensors[1]:
                extents = dict(zip(operand.dims, e.operand.after, strict=True))  # with lent experts
            elements, cuts = prod(extents[d] for d in kept), planner.cuts_among_dims(operand, layout, kept)
            yield from planner.statistics_collectives(axes, compute.only, elements, PHASES[product], cuts=cuts)


def _list_tensors(operation: Operation, e: Einsum) -> tuple[Operand, Operand, Operand]:
    """Return the activation, the weight and the output of the einsum e of an operation with products in 8 bits."""
    return operation.inputs[0], operation.inputs[1 + e.index], operation.outputs[e.index]


def _dims_of_scales(e: Einsum, number: int, dims: tuple[tuple[str, ...], ...]) -> list[str]:
    """Return the dims of an operand in 8 bits, number `number` of a product of `dims`, that its scales have too."""
    assert e.scaled
    a, b, out = dims
    if e.scaled.how.scale == "tensor":
        return [d for d in dims[number] if d == "experts" or (d in a and d in b and d in out)]
    contracted = contracted_dims(a, b, out)
    return [d for d in dims[number] if d not in contracted]


def keep_blocks(e: Einsum) -> ScaledProducts | None:
    """Return the products in 8 bits of an einsum that comes in panels: none whose scales are of more than a block."""
    return e.scaled if e.scaled and e.scaled.how.scale in EXACT else None


def describe_other_scales(planner: Planner, operation: Operation, group: EinsumGroup, e: Einsum) -> str:
    """Return why an einsum's products in 8 bits would have other scales than in one process: ranks' parts begin or end
    inside a block with one scale, or no rank knows a maximum; "" if they are the same."""
    tensors = _list_tensors(operation, e)
    if not (how := find_quantisation(operation)):
        return ""
    if how.scale not in EXACT and group.panels:
        return f"{group.panels.dim} comes in panels, of which no rank has all that has one scale"
    if not e.scaled or how.scale not in EXACT:
        is_short = how.scale == "row" and "rows" in e.x_dims and not (e.scaled and "forward" in e.scaled.products)
        return "axes split the rows of experts, of which no plan knows the number" if is_short else ""
    compute = planner.plan_contraction(tensors[:2], operation.outputs[e.index]).compute
    for product in e.scaled.products:
        dims = arrange_product(e.x_dims, e.dims, e.out_dims, product)
        blocked = [d for d in contracted_dims(*dims) if d != "batch"]
        tensor, *_ = arrange_product(*tensors, product)
        if cut := find_cut_block(planner, tensor, blocked, compute, e.scaled.how.block):
            return f"{cut} inside a block of {how.block} with one scale"
        if (panels := group.panels) and panels.dim in blocked:
            sizes = planner.tensor_sizes(tensor)
            inner = prod(sizes[d] for d in blocked[blocked.index(panels.dim) + 1 :])
            if panels.count > 1 and sizes[panels.dim] // panels.count * inner % how.block:
                return f"{panels.dim}={sizes[panels.dim]} comes in {panels.count} parts of a block of {how.block}"
    return ""


def find_cut_block(planner: Planner, tensor: Operand, dims: Sequence[str], compute: Layout, block: int) -> str:
    """Return the last of `dims` that axes of the layout `compute` cut inside a `block` of consecutive elements along
    all of them, and which axes."""
    sizes = planner.tensor_sizes(tensor)
    split = [i for i, d in enumerate(dims) if planner.mesh.count_ranks(compute[d]) > 1]
    if not split:
        return ""
    at, dim = split[-1], dims[split[-1]]
    inner = prod(sizes[d] for d in dims[at + 1 :])
    layout, end = compute.restrict_dims(dims), 0 if at else sizes[dim]
    for indices in itertools.product(*(range(planner.mesh.axes[axis]) for axis in compute[dim])):
        coordinates = planner.mesh.rank_coordinates(0) | dict(zip(compute[dim], indices, strict=True))
        stretches = planner.stretches_of_rank(dim, sizes[dim], layout, coordinates)
        for number, (start, extent) in enumerate(stretches):
            is_last = number == len(stretches) - 1 and start + extent == end
            if start * inner % block or (extent * inner % block and not is_last):
                return f"{dim}={sizes[dim]} is cut by {'+'.join(compute[dim])}"
    return ""

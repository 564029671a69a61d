"""Gathers of ZeRO-3 in 8 bits: of weights whose products in the forward and the backward pass scale one and the same
square tiles, by powers of two, so that what arrives is rounded again to itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from platform.plan.model_types import Parameter
from platform.plan.operation_plan import Einsum, PlannedOperation
from platform.plan.operations.scaled_products import find_cut_block
from platform.plan.planner import Planner
from platform.plan.quantisation import WeightTiles, contracted_dims


class GatheredTiles(NamedTuple):
    """Weights by name: the `tiles` in which they are gathered in 8 bits, and why `others` of such products are not."""

    tiles: Mapping[str, WeightTiles]
    others: Mapping[str, str]


def find_gathered_tiles(
    planner: Planner,
    operations: Iterable[PlannedOperation],
    parameters: Mapping[str, Parameter],
    apart: Collection[str],
) -> GatheredTiles:
    """Return in which tiles weights of a stage's `operations` can be gathered in 8 bits. `parameters`: the stage's, by
    name; `apart`: names of weights of which blocks are of several stages, or uneven."""
    uses: dict[str, list[Einsum | None]] = {}
    for o in operations:
        einsums = {e.index + 1: e for group in o.groups for e in group.einsums if e.scaled}
        for number, p in enumerate(o.operation.inputs):
            if isinstance(p, Parameter):
                uses.setdefault(p.name, []).append(einsums.get(number))
    tiles, others = dict[str, WeightTiles](), dict[str, str]()
    for name, einsums_of_weight in uses.items():
        if name not in parameters or not any(einsums_of_weight):
            continue
        tiled = "ranks' blocks differ" if name in apart else _tile_weight(planner, parameters[name], einsums_of_weight)
        if isinstance(tiled, str):
            others[name] = tiled
        else:
            tiles[name] = tiled
    return GatheredTiles(tiles, others)


def _tile_weight(planner: Planner, p: Parameter, einsums: Sequence[Einsum | None]) -> WeightTiles | str:
    """Return the tiles in which a weight of `einsums` (None: another use) is gathered in 8 bits, or why it is not."""
    sides = {_find_sides(e) if e else None for e in einsums}
    how = next(e.scaled.how for e in einsums if e and e.scaled)
    if not how.has_equal_tiles:
        return f"each pass rounds them otherwise, with {how.title}"
    if len(sides) > 1 or None in sides:
        return "other uses read it in more bits"
    ((stack, rows, columns),) = sides  # type: ignore[misc]
    layout, sizes = planner.layout(p), planner.tensor_sizes(p)
    block = how.block if how.scale == "block" else max(prod(sizes[d] for d in dims) for dims in (rows, columns))
    for dims in (rows, columns):
        if cut := find_cut_block(planner, p, dims, layout, block):
            return f"{cut} inside a tile of {block}"
    shape = dict(zip(p.dims, planner.local_shape(p, layout), strict=True))
    return WeightTiles(block, *(prod(shape[d] for d in dims) for dims in (stack, rows, columns)))


def _find_sides(e: Einsum) -> tuple[tuple[str, ...], ...] | None:
    """Return the dims of an einsum's weight that count its matrices, their rows and columns, as they lie in memory;
    None if they do not lie so, or if a product does not read it in 8 bits."""
    assert e.scaled
    shared = tuple(d for d in e.dims if d == "experts" or (d in e.x_dims and d in e.out_dims))
    contracted = contracted_dims(e.x_dims, e.dims, e.out_dims)
    others = tuple(d for d in e.dims if d not in shared and d not in contracted)
    in_both = {"forward", "input"} <= {*e.scaled.products}
    orders = ((shared, others, contracted), (shared, contracted, others))
    return next((sides for sides in orders if in_both and sum(sides, ()) == e.dims), None)

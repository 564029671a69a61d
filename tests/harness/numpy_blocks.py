"""The blocks of all ranks as NumPy arrays, and the steps of the rule executed on them: what a backend must do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from platform.plan.layout import Layout, Mesh, is_at_index_zero, locate_block
from platform.plan.rule import RelayoutStep

Blocks = list[np.ndarray | None]  # by rank; None where the tensor does not exist


ONLY = "only"


@st.composite
def layouts(draw, mesh: Mesh, dims: Sequence[str]) -> Layout:
    """Any layout: every axis on one of the dims or on none, in any order; or the tensor exists at its index 0 alone."""
    rules: dict[str, list[str]] = {}
    for axis in draw(st.permutations(list(mesh.axes))):
        if dim := draw(st.sampled_from([None, ONLY, *dims])):
            rules.setdefault(dim, []).append(axis)
    only = rules.pop(ONLY, [])
    return Layout.build_canonical(rules, mesh.order_axes(only))


def whole(dims: Sequence[str], mesh: Mesh, seed: int = 0) -> np.ndarray:
    """Small integers, exact in any order of summation; every dim is divided by any of the axes."""
    return np.random.default_rng(seed).integers(-9, 9, [mesh.world_size] * len(dims))


def split(x: np.ndarray, dims: Sequence[str], layout: Layout, mesh: Mesh) -> Blocks:
    sizes = dict(zip(dims, x.shape, strict=True))

    def at(coordinates) -> np.ndarray | None:
        where = locate_block(dims, sizes, layout, mesh, coordinates)
        return x[tuple(slice(o, o + n) for o, n in where)] if layout.has_block(coordinates) else None

    return [at(mesh.rank_coordinates(rank)) for rank in range(mesh.world_size)]


def execute(steps: Sequence[RelayoutStep], blocks: Blocks, mesh: Mesh) -> Blocks:
    for step in steps:
        blocks = [_step(step, blocks, mesh, rank) for rank in range(mesh.world_size)]
    return blocks


def _step(step: RelayoutStep, blocks: Blocks, mesh: Mesh, rank: int) -> np.ndarray | None:
    if not is_at_index_zero(step.only, mesh.rank_coordinates(rank)):
        return blocks[rank]
    parts = [blocks[r] for r in mesh.group_of_rank(rank, step.axes)]
    me, n = mesh.index_in_group(mesh.rank_coordinates(rank), step.axes), len(parts)

    def mine(x: np.ndarray) -> np.ndarray:
        return np.split(x, n, step.dim)[me]

    match step.op:
        case "all_gather":
            return np.concatenate(parts, step.dim)
        case "reduce_scatter":
            return mine(sum(parts))
        case "all_reduce":
            return sum(parts)
        case "all_to_all":
            return np.concatenate([mine(p) for p in parts], step.joined)
        case "slice":
            return mine(blocks[rank])
        case "broadcast":
            return parts[0]
        case "scatter":
            return mine(parts[0])
        case "reduce" | "gather" | "drop" if me:
            return None
        case "reduce":
            return sum(parts)
        case "gather":
            return np.concatenate(parts, step.dim)
        case "drop":
            return blocks[rank]
        case "pad":
            zero = np.zeros_like(blocks[rank])
            return np.concatenate([blocks[rank] if i == me else zero for i in range(n)], step.dim)
    raise AssertionError(step.op)


def equal(actual: Blocks, wanted: Blocks) -> bool:
    return all(a is b if a is None or b is None else np.array_equal(a, b) for a, b in zip(actual, wanted, strict=True))

"""The blocks of all ranks as NumPy arrays, and the steps of the rule executed on them: what a backend must do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from platform.plan.layout import Layout, block
from platform.plan.mesh import Mesh
from platform.plan.rule import Step

Blocks = list[np.ndarray]  # by rank


@st.composite
def layouts(draw, mesh: Mesh, dims: Sequence[str]) -> Layout:
    """Any layout: every axis on one of the dims or on none, in any order."""
    rules: dict[str, list[str]] = {}
    for axis in draw(st.permutations(list(mesh.axes))):
        if dim := draw(st.sampled_from([None, *dims])):
            rules.setdefault(dim, []).append(axis)
    return Layout.of(rules)


def whole(dims: Sequence[str], mesh: Mesh, seed: int = 0) -> np.ndarray:
    """Small integers, exact in any order of summation; every dim is divided by any of the axes."""
    return np.random.default_rng(seed).integers(-9, 9, [mesh.size] * len(dims))


def split(x: np.ndarray, dims: Sequence[str], layout: Layout, mesh: Mesh) -> Blocks:
    sizes = dict(zip(dims, x.shape, strict=True))
    where = (block(dims, sizes, layout, mesh, mesh.coordinates(rank)) for rank in range(mesh.size))
    return [x[tuple(slice(o, o + n) for o, n in b)] for b in where]


def execute(steps: Sequence[Step], blocks: Blocks, mesh: Mesh) -> Blocks:
    for step in steps:
        blocks = [_step(step, blocks, mesh, rank) for rank in range(mesh.size)]
    return blocks


def _step(step: Step, blocks: Blocks, mesh: Mesh, rank: int) -> np.ndarray:
    parts = [blocks[r] for r in mesh.group(rank, step.axes)]
    me, n = mesh.index(mesh.coordinates(rank), step.axes), len(parts)

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
        case "pad":
            zero = np.zeros_like(blocks[rank])
            return np.concatenate([blocks[rank] if i == me else zero for i in range(n)], step.dim)
    raise AssertionError(step.op)


def equal(found: Blocks, wanted: Blocks) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))

"""Planned elements of a layer's four linears against closed formulas, and so, by the oracle, the counted ones.

Ring volumes per rank and layer, forward and backward, with d_ff = 4 h: sums over QKV, O, FC1 and FC2 of
rows x inputs = 7 bsh, rows x outputs = 9 bsh, inputs x outputs = 12 h^2 (AxoNN and the papers' cost sections).
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from platform.plan.operation_plan import TRAFFIC, traffic_bytes
from platform.predict.make_plan import make_plan
from tests.harness.oracle import configure

B, S, H = 16, 32, 64
BSH, HH = B * S * H, H * H


def elements_per_rank(tensor, axes, gathered, **more) -> Fraction:
    """Elements that a rank sends on average for the linears of layer 0 in one microbatch."""
    c = configure(tensor, axes, d_model=H, heads=16, length=S, microbatch=B, global_batch=B, layers=1, **more)
    c.tensor.gathered = gathered
    plan = make_plan(c)
    total = Fraction(0)
    for (kind, name), o in plan.operations.items():
        if kind == "project" and name.startswith("layers.0."):
            for collective in o.collectives:
                n = plan.mesh.count_ranks(collective.axes)
                total += Fraction(TRAFFIC[collective.op](n, collective.elements), n)
    return total


@pytest.mark.parametrize("t", [2, 4, 8])
def test_1d(t):
    assert elements_per_rank("1d", {"t": t}, "keep") == Fraction(8 * (t - 1), t) * BSH
    assert elements_per_rank("1d_sp", {"t": t}, "keep") == Fraction(8 * (t - 1), t) * BSH
    assert elements_per_rank("1d_sp", {"t": t}, "again") == Fraction(10 * (t - 1), t) * BSH


@pytest.mark.parametrize("q", [2, 4])
def test_2d(q):
    square = {"r": q, "c": q}
    product = Fraction(q - 1, q * q) * (7 * BSH + 12 * HH)  # AB, AB^T and A^TB move as much
    assert elements_per_rank("2d", square, "panels") == 3 * product
    assert elements_per_rank("2d_gather", square, "keep") == 2 * product
    assert elements_per_rank("2d_gather", square, "again") == 3 * product


@pytest.mark.parametrize("d", [2, 4])
def test_2p5d(d):
    """The gradients' reduction over the depth comes once a step, not per microbatch: it is not an einsum's."""
    q = 2
    expected = Fraction(q - 1, q * q) * (Fraction(7 * BSH, d) + 12 * HH)
    assert elements_per_rank("2p5d", {"d": d, "r": q, "c": q}, "keep") == 2 * expected
    c = configure("2p5d", {"d": d, "r": q, "c": q}, d_model=H, heads=16, length=S, microbatch=B, global_batch=B)
    plan = make_plan(c)
    assert all("d" in plan.reductions[p.name] for p in plan.parameters)


GRIDS = [(1, 8, 1), (8, 1, 1), (2, 2, 2), (4, 2, 1), (1, 2, 4), (2, 1, 4), (2, 4, 2)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_3d_on_any_cuboid(grid):
    x, y, z = grid
    p = x * y * z
    axes = {"x": x, "y": y, "z": z}
    keep = Fraction((8 * (y - 1) + 24 * (z - 1)) * BSH + 24 * (x - 1) * HH, p)
    again = Fraction((10 * (y - 1) + 29 * (z - 1)) * BSH + 36 * (x - 1) * HH, p)
    assert elements_per_rank("3d", axes, "keep") == keep
    assert elements_per_rank("3d", axes, "again") == again


@pytest.mark.parametrize("p", [2, 4])
def test_the_papers_cube(p):
    """Algorithms 1 and 2: three collectives of (p-1)/p^3 each per linear and direction."""
    axes = {"x": p, "y": p, "z": p}
    assert elements_per_rank("3d_literal", axes, "keep") == Fraction(p - 1, p**3) * (32 * BSH + 24 * HH)
    assert elements_per_rank("3d_literal", axes, "again") == Fraction(p - 1, p**3) * (39 * BSH + 36 * HH)


@pytest.mark.parametrize("p", [2, 4])
def test_the_papers_vectors(p):
    """Algorithms 7 and 8 of Bian et al., of a vector of d_model: forward a broadcast from the diagonal over y and a
    gather over x, backward a scatter of sums over x and their reduction to the diagonal; to the element."""
    c = configure("3d_literal", {"x": p, "y": p, "z": p}, d_model=H, heads=16, length=S, microbatch=B, layers=1)
    c.tensor.vectors = "diagonal"
    plan = make_plan(c)
    norm = next(o for (kind, name), o in plan.operations.items() if kind == "norm" and name.startswith("layers.0"))
    moved = {(x.phase, x.op, x.axes): 0 for x in norm.collectives if x.dtype == "compute"}
    for x in norm.collectives:
        if x.dtype == "compute":
            moved[x.phase, x.op, x.axes] += traffic_bytes(x, plan.mesh, {"compute": 1})
    one, spread = 2 * (p - 1) * H, 2 * (p - 1) * p * H  # gain and bias
    assert moved == {
        ("forward", "broadcast", ("y-z",)): one,
        ("forward", "all_gather", ("x",)): spread,
        ("backward", "reduce_scatter", ("x",)): spread,
        ("backward", "reduce", ("y-z",)): one,
    }


@pytest.mark.parametrize("g", [2, 4])
def test_dsp_split_and_sum(g):
    """Jain et al. by split/sum: an all-gather and a reduce-scatter of the batch around each half layer, (g-1) V."""
    v = Fraction(BSH, g)
    elements = elements_per_rank("serial", {}, "keep", branch="dsp", branch_axes={"g": g})
    assert elements == 8 * (g - 1) * v


def moved_by_a_block(branch, g, data=1, via="all_to_all") -> dict[str, tuple[int, Fraction]]:
    """op -> launches of a group and elements that all groups move, in the branches of layer 0, both directions."""
    c = configure(branch=branch, branch_axes={"g": g}, data=data, d_model=H, heads=16, length=S, microbatch=B,
                  global_batch=B * data, layers=1)  # fmt: skip
    c.branch.slice_via = via
    plan = make_plan(c)
    traffic: dict[str, tuple[int, Fraction]] = {}
    for (kind, name), o in plan.operations.items():
        if kind in ("project", "relayout") and name.startswith("layers.0."):
            for x in o.collectives:
                launches, elements = traffic.get(x.op, (0, Fraction(0)))
                traffic[x.op] = launches + 1, elements + traffic_bytes(x, plan.mesh, {"compute": 1})
    return traffic


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("g", [2, 4])
def test_dsp_csub(g, data):
    """Jain et al., common layers on sub-grid 0: per block and direction, Q, K, V and the context are scattered and
    gathered, (g-1)/g of each; around the feed-forward layer the stream is broadcast and reduced, (g-1) of it."""
    stream = BSH * data
    moved = moved_by_a_block("dsp_csub", g, data)
    sliced, split = 4 * Fraction(g - 1, g) * stream, 2 * (g - 1) * stream
    assert moved == {
        "scatter": (4, sliced),  # forward Q, K, V; backward the context
        "gather": (4, sliced),
        "broadcast": (2, split),
        "reduce": (2, split),
    }


@pytest.mark.parametrize("g", [2, 4])
def test_dsp_slices(g):
    """All-to-all moves what cSub's scatter and gather do; the paper's all-gather g times as much."""
    assert moved_by_a_block("dsp_slice", g)["all_to_all"] == (8, 8 * Fraction(g - 1, g) * BSH)
    joined = moved_by_a_block("dsp_slice", g, via="all_gather")
    around_mlp = 2 * (g - 1) * BSH  # an all-gather forward and another backward
    assert joined["all_gather"] == (8 + 2, 8 * (g - 1) * BSH + around_mlp)
    assert "all_to_all" not in joined

"""Vectors on the diagonal of a 3-D scheme's plane (algorithms 7 and 8 of Bian et al.), against one process in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest

from platform.config.fields import Config
from platform.plan.layout import Layout
from platform.plan.operation_forms import Spread, Unsound, apply_step
from platform.plan.plan_check import find_unsoundness
from platform.plan.rule import RelayoutStep
from platform.predict.make_plan import make_plan
from tests.harness.oracle import MODELS, compare, compute, configure, examine, prove, run, serial, with_operations

CUBE, PLANE = {"x": 2, "y": 2, "z": 2}, {"x": 1, "y": 2, "z": 2}
PLANES_OF_THREE = dict(tensor="3d", axes={"x": 1, "y": 3, "z": 3}, layers=1, d_model=36, heads=9, length=18, vocab=63)
CASES = {
    "the paper's cube": dict(tensor="3d_literal", axes=CUBE),
    "3d": dict(tensor="3d", axes=PLANE, data=2, gathered="again"),
    "panels": dict(tensor="3d_literal", axes=CUBE, gathered="panels"),
    "dropout, tied, grouped queries": dict(tensor="3d", axes=CUBE, dropout=0.2, layers=1, **MODELS["gqa_tied"]),
    "encoder and decoder": dict(tensor="3d_literal", axes=PLANE, layers=1, recompute="full", **MODELS["t5"]),
    "beside D&SP": dict(tensor="3d", axes=PLANE, branch="dsp_csub", branch_axes={"g": 2}, layers=1),
    "a plane of three": PLANES_OF_THREE,
    "stages": dict(tensor="3d", axes=PLANE, pipeline="1f1b", stages=2),
}


def build(**arguments) -> Config:
    c = configure(**arguments)
    c.tensor.vectors = "diagonal"
    return c


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name):
    """Losses, gradients, their norm and two updates; counted bytes are the planned ones."""
    c = build(**CASES[name])
    assert find_unsoundness(make_plan(c)) == []
    prove(c)


def test_on_processes(pool):
    c = build(**CASES["3d"])
    plan = make_plan(c)
    examine(c, plan, pool.run(compute, c, plan))


def test_who_holds_which_vector():
    """p^2 of p^3 ranks, those with equal indices along y and z; matrices and tables of positions lie as ever."""
    plan = make_plan(build(**PLANES_OF_THREE))
    even = make_plan(configure(**PLANES_OF_THREE))
    places = [plan.mesh.rank_coordinates(rank) for rank in range(plan.mesh.world_size)]
    for p in plan.parameters:
        vector = p.role == "vector" and "length" not in p.dims or p.name.endswith("_bias")
        expected = [not vector or at["y"] == at["z"] for at in places]
        assert [plan.has_block(p, at) for at in places] == expected, p.name
        if not vector:
            assert plan.layout(p) == even.layout(p)


def forget(conversion):
    backward = (replace(s, op="drop") if s.op == "reduce" else s for s in conversion.backward)
    return replace(conversion, backward=tuple(backward))


def test_negative_control_a_forgotten_reduction():
    """Algorithm 8 as it is printed leaves one out: the oracle and the static check see it."""
    c = build(**CASES["3d"])
    plan = make_plan(c)
    broken = with_operations(
        plan, {k: replace(o, conversions=tuple(map(forget, o.conversions))) for k, o in plan.operations.items()}
    )
    assert any("drop takes what is whole, and it is partial over y-z" in line for line in find_unsoundness(broken))
    with pytest.raises(AssertionError, match="gradient of"):
        compare(c, *run(c, broken), serial(c))


def test_a_collective_that_one_rank_of_each_group_would_take_is_unsound():
    """Of z, at the diagonal: it would wait for ranks that have nothing."""
    layout = Layout((("d_model", ("z",)),), ("y-z",))
    spread = Spread.build_from_layout(["d_model"], layout)
    with pytest.raises(Unsound, match="all_gather over z is taken at index 0 of y-z, by one rank of each group"):
        apply_step(spread, RelayoutStep("all_gather", ("z",), only=("y-z",)))
    whole = apply_step(spread, RelayoutStep("broadcast", ("y-z",)))
    assert apply_step(whole, RelayoutStep("all_gather", ("z",))).split == {"d_model": ()}


def test_where_the_planner_chooses_no_square_vectors_lie_as_ever():
    c = build(tensor="3d", axes={"x": 1, "y": 4, "z": 2})
    assert not any(plan_layout.shifted_axes for plan_layout in map(make_plan(c).layout, make_plan(c).parameters))

"""Branches of other widths and depths each, dealt to sub-grids by their cost; `unlike` of test_branches.py trains them
under every scheme."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from platform.model import build_model
from platform.plan.model_types import BranchPlace, Parameter, Spec, deal_branches
from platform.plan.operations.recorder import Recorder, Symbol
from platform.plan.plan_check import find_unsoundness
from platform.plan.plan_data import decode_plan, encode_plan
from platform.plan.scheme import ModelMistake
from platform.predict.footprint import count_saved_elements
from platform.predict.make_plan import make_plan
from platform.predict.work import Execution, record_chunk_work
from tests.harness.branch_models import STREAM, WIDTHS
from tests.harness.oracle import compare, configure, prove, run, serial, with_operations
from tests.runtime.oracle.test_branches import CASES, loss_of, small
from tests.runtime.test_memory import measured

COSTS = tuple(2 * 16 * sum(widths) for widths in WIDTHS)  # of d_model 16


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12).map(tuple), st.integers(1, 6))
def test_the_costliest_goes_first_to_who_has_least(costs, sub_grids):
    """So the busiest, sub-grid 0, has at most what all have on average and one branch more."""
    dealt = deal_branches(costs, sub_grids)
    loads = [sum(c for c, at in zip(costs, dealt, strict=True) if at == k) for k in range(sub_grids)]
    assert len(dealt) == len(costs) and loads == sorted(loads, reverse=True)
    assert loads[0] * sub_grids <= sum(costs) + (sub_grids - 1) * max(costs)
    assert all(loads) or len(costs) < sub_grids


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_each_sub_grid_alone_has_its_branches(zero):
    """By their costs; beside replicas, and shards of them."""
    c = small("unlike", **CASES["dsp g2 x data"], zero=zero)
    plan = make_plan(c)
    sub_grids = deal_branches(COSTS, 2)
    assert sub_grids == (0, 1, 1, 1, 0)
    for rank in range(plan.mesh.world_size):
        at = plan.mesh.rank_coordinates(rank)
        for p in plan.parameters:
            branch = int(p.name.split(".")[1]) if p.name.startswith("block.") else -1
            assert plan.has_block(p, at) == (branch < 0 or sub_grids[branch] == at["g"]), p.name
            assert plan.reductions[p.name] == (("data",) if branch >= 0 else plan.reductions[p.name])
    prove(c)


def test_one_gather_and_one_sum_for_all_branches():
    plan = make_plan(small("unlike", **CASES["dsp g2"]))
    moves = {
        name: [(c.op, c.axes, c.phase) for c in plan.operations[kind, name].collectives]
        for kind, name in plan.operations
        if name.startswith("block.")
    }
    assert {name: collectives for name, collectives in moves.items() if collectives} == {
        "block.split": [("all_gather", ("g",), "forward"), ("reduce_scatter", ("g",), "backward")],
        "block.sum": [("reduce_scatter", ("g",), "forward"), ("all_gather", ("g",), "backward")],
    }


def test_equals_plain_pytorch():
    def forward(x, w):
        branches = []
        for i, widths in enumerate(WIDTHS):
            y = x
            for j in range(len(widths)):
                y = torch.relu(y @ w[f"block.{i}.{j}.up"].t()) @ w[f"block.{i}.{j}.down"].t()
            branches.append(y)
        return x + sum(branches)

    result, loss, gradients = loss_of(small("unlike"), forward)
    assert result.loss == pytest.approx(loss, rel=1e-12)
    for name, g in gradients.items():
        assert torch.allclose(result.gradients[name], g, rtol=1e-10, atol=1e-15), name


@pytest.mark.parametrize("case", CASES)
def test_the_static_check_follows_them(case):
    plan = make_plan(small("unlike", **CASES[case]))
    assert find_unsoundness(plan) == [] and decode_plan(encode_plan(plan)) == plan


@pytest.mark.parametrize("name", ["split", "sum"])
def test_negative_controls(name):
    """A sum over sub-grids that is left out fails the oracle and the static check."""
    c = small("unlike", **CASES["dsp g2"])
    plan = make_plan(c)

    def leave_out(conversion):
        away = [tuple(replace(s, op="slice") if s.op == "reduce_scatter" else s for s in steps)
                for steps in (conversion.forward, conversion.backward)]  # fmt: skip
        return replace(conversion, forward=away[0], backward=away[1])

    key = next(k for k in plan.operations if k[1] == f"block.{name}")
    broken_operation = replace(plan.operations[key], conversions=(leave_out(plan.operations[key].conversions[0]),))
    broken = with_operations(plan, {**plan.operations, key: broken_operation})
    assert any("slice" in line or "partial over g" in line for line in find_unsoundness(broken))
    with pytest.raises(AssertionError):
        compare(c, *run(c, broken), serial(c))


@pytest.mark.parametrize("case", ["none", "dsp g2", "dsp g4", "dsp_csub g2"])
def test_saved_for_backward(case):
    c = small("unlike", **CASES[case])
    plan, saved = measured(c)
    metered = [
        count_saved_elements(plan, build_model(c.model), at=plan.mesh.rank_coordinates(rank)).total_elements
        for rank in range(plan.mesh.world_size)
    ]
    assert saved == metered


def test_the_busiest_sub_grid_is_priced():
    """Two sub-grids, of which each computes its own branches: products of the first, not of all."""
    priced = {}
    for case in ("none", "dsp g2"):
        c = small("unlike", vocab=64, **CASES[case])
        (chunk,) = record_chunk_work(make_plan(c), build_model(c.model), Execution())
        priced[case] = sum(n * product.flops for part, n in chunk.forward.items() for product in part.products)
    tokens, branches = 4 * 8, sum(c for c, at in zip(COSTS, deal_branches(COSTS, 2), strict=True) if at == 0)
    head = priced["none"] - 2 * tokens * sum(COSTS)
    assert priced["dsp g2"] == head / 2 + 2 * tokens * branches


ONE, TWO = (replace(STREAM, place=BranchPlace(i, (3, 2))) for i in range(2))
OTHER = replace(STREAM, place=BranchPlace(1, (3, 3)))
MISTAKES = {
    "one branch": (lambda ops, x: ops.split_branches("a", x, STREAM, [ONE]), "two branches or more"),
    "one place twice": (lambda ops, x: ops.split_branches("a", x, STREAM, [ONE, ONE]), "have a place each"),
    "no place": (lambda ops, x: ops.split_branches("a", x, STREAM, [ONE, STREAM]), "have a place each"),
    "other costs": (lambda ops, x: ops.split_branches("a", x, STREAM, [ONE, OTHER]), "dealt by the same costs"),
    "other dims": (
        lambda ops, x: ops.split_branches("a", x, STREAM, [ONE, Spec("mlp", ("length", "d_ff"), place=TWO.place)]),
        r"begins and ends as the stream, in a \(.*\); legal: stream\[length batch d_model\]|begins and ends",
    ),
    "a weight of another branch": (
        lambda ops, x: ops.project(
            ops.split_branches("a", x, STREAM, [ONE, TWO])[0],
            ONE,
            [Parameter("w", ("d_ff", "d_model"), "in", place=TWO.place)],
            [Spec("mlp", ("length", "batch", "d_ff"), place=ONE.place)],
        ),
        "has tensors of branch 0, branch 1, in project",
    ),
    "a norm that leaves its branch": (
        lambda ops, x: ops.relayout("b", ops.split_branches("a", x, STREAM, [ONE, TWO])[0], ONE, STREAM),
        "has tensors of branch 0, no branch, in relayout",
    ),
    "the stream in place of a branch": (
        lambda ops, x: ops.sum_branches("b", [x, x], [STREAM, STREAM], STREAM),
        "have a place each",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_be_is_refused_by_name(name):
    mistake, text = MISTAKES[name]
    with pytest.raises(ModelMistake, match=text):
        mistake(Recorder(make_plan(configure()).scheme), Symbol(STREAM))

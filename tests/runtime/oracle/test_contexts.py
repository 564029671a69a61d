"""Ranks that share each sequence, in every kind, against one process in fp64."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from platform.boundary.refusals import ConfigError
from platform.plan.layout import Stretch, consecutive_ranges, zigzag_order
from platform.plan.plan import Plan
from platform.plan.plan_check import find_unsoundness
from platform.plan.planner import Planner
from platform.plan.step_collectives import communication
from platform.predict.make_plan import make_plan
from platform.runtime import conversion
from tests.harness.oracle import MODELS, compare, configure, prove, run, serial
from tests.harness.pairwise import cover, product
from tests.harness.suite import suite

KINDS: dict[str, dict[str, Any]] = {
    "gather": {"context": 2, "context_kind": "gather"},
    "gather of four": {"context": 4, "context_kind": "gather"},
    "heads": {"context": 2, "context_kind": "heads"},
    "nested": {"context": 4, "context_kind": "nested", "context_heads": 2},
}
SCHEMES: dict[str, dict[str, Any]] = {
    "serial": {},
    "1d": {"tensor": "1d", "axes": {"t": 2}},
    "1d_sp": {"tensor": "1d_sp", "axes": {"t": 2}},
    "2d": {"tensor": "2d", "axes": {"r": 2, "c": 1}},
    "3d": {"tensor": "3d", "axes": {"x": 1, "y": 2, "z": 1}},
    "dsp": {"branch": "dsp", "branch_axes": {"g": 2}},
}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "data, zero 3": {"data": 2, "zero": 3, "microbatch": 2},
    "1f1b": {"pipeline": "1f1b", "stages": 2, "microbatch": 2},
    "full": {"recompute": "full", "dropout": 0.2},
    "selective": {"recompute": "selective"},
}
FACTORS = {
    "kind": list(KINDS),
    "scheme": list(SCHEMES),
    "mode": list(MODES),
    "model": ["gpt", "llama", "modern", "packed_gpt", "bert", "original", "t5", "latent", "gpt_oss", "experts"],
    "pieces": [2, 4, 0],  # of a rank; 0: parts lie straight
}


def configured(case, **more):
    parts = KINDS[case["kind"]], SCHEMES[case["scheme"]], MODES[case["mode"]], MODELS[case["model"]]
    c = configure(**{key: value for part in parts for key, value in part.items()} | more)
    c.parallel.context_balance, c.parallel.context_pieces = bool(case["pieces"]), case["pieces"]
    c.model.source_length *= 2  # so that as many pieces as of the targets divide it
    return c


def ranks(case) -> int:
    c = configured(case)
    sizes = (*c.tensor.axes.values(), *c.branch.axes.values(), c.parallel.data, c.pipeline.stages)
    return prod(sizes) * c.parallel.context


CASES = product(FACTORS, lambda case: ranks(case) <= 8)
COVER = cover(CASES, cost=lambda case: ranks(case) ** 0.5)


@suite("contexts", CASES, COVER)
def test_equals_one_process(case):
    plan, _ = prove(configured(case))
    assert find_unsoundness(plan) == []
    rounds = case["pieces"] // 2 if case["kind"] != "heads" else 0
    assert (plan.scheme.zigzag, plan.scheme.rounds) == (("context", rounds) if rounds else ("", 1))


def test_pieces():
    assert zigzag_order(2) == [0, 3, 1, 2]
    assert zigzag_order(2, 2) == [0, 3, 4, 7, 1, 2, 5, 6]
    assert consecutive_ranges(4, 4, 8, 2, 2) == [(1, 1), (2, 1), (5, 1), (6, 1)]
    assert consecutive_ranges(4, 4, 8, 1) == [(4, 4)]
    assert [consecutive_ranges(first, 4, 8, 2) for first in (0, 4)] == [[(0, 2), (6, 2)], [(2, 2), (4, 2)]]
    # an axis inside of a rank's two pieces splits them in their order
    assert [consecutive_ranges(first, 3, 12, 2) for first in (0, 3, 6, 9)] == [[(0, 3)], [(9, 3)], [(3, 3)], [(6, 3)]]
    assert [consecutive_ranges(first, 4, 16, 2, 2) for first in (0, 12)] == [[(0, 2), (6, 2)], [(10, 2), (12, 2)]]


def test_the_kind_that_moves_fewest_bytes_is_chosen():
    """Four of 8 heads' keys are gathered for less than all of them go back and forth; of all heads it is the other way
    round with more ranks."""
    for more, kind in (({**MODELS["llama"], "context": 2}, "gather"), ({"context": 4}, "heads")):
        moved = {}
        for each in ("auto", "gather", "heads"):
            moved[each] = communication(make_plan(configure(context_kind=each, **more)))
        assert moved["auto"] == moved[kind]
        assert sum(moved[kind].values()) == min(sum(nbytes.values()) for nbytes in moved.values())


def test_keys_come_back_by_one_reduce_scatter():
    """Two layers' keys and values, [16 4 32] in fp64 of two microbatches, are gathered by two ranks, and their gradient
    summed where they came from: 2 x 2 x 2 x 2 blocks of half of that each way."""
    nbytes = communication(make_plan(configure(context=2, context_kind="gather")))
    moved = 2 * 2 * 2 * 2 * (16 * 4 * 32 * 8 // 2)
    assert nbytes["all_gather/context"] == nbytes["reduce_scatter/context"] == moved
    assert set(nbytes) == {"all_gather/context", "reduce_scatter/context", "all_reduce/context"}  # of parameters


def test_a_plan_says_where_keys_do_not_go_around():
    ring = {"context": 2, "context_kind": "ring"}
    assert make_plan(configure(**ring)).warnings == ()
    (line,) = make_plan(configure(**ring, dropout=0.1)).warnings
    assert line == "keys of attention are gathered, not passed around a ring: model.dropout=0.1"
    (line,) = make_plan(configure("layout", {"c": 2}, rules={"length": ["c"]}, **ring)).warnings
    assert line.endswith("another axis splits length there")


def test_heads_that_cannot_be_exchanged_are_not():
    c = configure(context=4, heads=2)
    assert dict(make_plan(c).scheme.context) == {"context": 4}
    with pytest.raises(ConfigError, match="heads=2"):
        make_plan(configure(context=4, context_kind="heads", heads=2))


def places(plan, tensor, dim):
    return plan.planner.tensor_sizes(tensor)[dim], plan.layout(tensor)


@pytest.mark.parametrize("mutant", ["offset", "straight", "labels", "unfolded", "one round"])
def test_negative_controls(mutant, monkeypatch):
    pieces = 4 if mutant == "one round" else 2
    c = configure(context=2, context_kind="gather", context_pieces=pieces, positions="rope", tied=False)
    expected = serial(c)
    half, of_tensor, lying = Stretch(0, c.model.length // 2), Plan.stretches_of_rank, Planner.stretches_of_rank
    in_order = conversion.undo_zigzag
    if mutant == "offset":  # each rank's queries are at the first positions
        monkeypatch.setattr(
            Plan, "stretches_of_rank", lambda *arguments: [half] if arguments[2] == "length" else of_tensor(*arguments)
        )
    elif mutant == "straight":  # pieces in zigzag are taken for consecutive ones
        monkeypatch.setattr(Planner, "count_zigzag_ranks", lambda *_: 1)
    elif mutant == "labels":  # each rank reads the first tokens and labels
        monkeypatch.setattr(Planner, "stretches_of_rank", lambda *_: [half])
        monkeypatch.setattr(Plan, "stretches_of_rank", lambda p, t, d, at: lying(p.planner, d, *places(p, t, d), at))
    elif mutant == "unfolded":
        monkeypatch.setattr(conversion, "undo_zigzag", lambda x, *_: x)
    else:  # pieces that two rounds have dealt are joined as those of one
        monkeypatch.setattr(conversion, "undo_zigzag", lambda x, dim, ranks, _: in_order(x, dim, ranks, 1))
    with pytest.raises(AssertionError):
        compare(c, *run(c), expected)


def test_lengths_that_pieces_do_not_divide_lie_straight():
    lengths = {16: "context", 18: "", 20: "context"}
    plans = {n: make_plan(configure(context=2, context_kind="gather", length=n)) for n in lengths}
    assert {n: plan.scheme.zigzag for n, plan in plans.items()} == lengths

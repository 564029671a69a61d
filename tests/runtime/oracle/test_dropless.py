"""Experts without a capacity: rows as many as tokens choose; worst routings, tensor axes, real processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.plan.operations.experts import CombineRowsOp
from platform.plan.plan_check import find_unsoundness
from platform.plan.step_collectives import communication
from platform.predict.make_plan import make_plan
from platform.runtime import expert_rows, products
from platform.runtime.parallel_ops import SentRows
from platform.runtime.products import build_grouped_einsum
from tests.harness.oracle import MODELS, compare, compute, configure, counted, examine, prove, run, with_operations
from tests.harness.replayed_bytes import replay_traffic
from tests.harness.routing import to_the_first

ROWS: dict[str, Any] = {**MODELS["llama"], **MODELS["experts"], "capacity_factor": 0.0}
PLANS: dict[str, dict[str, Any]] = {
    "two ranks": {"data": 2, "experts_of": 2},
    "four ranks, full": {"data": 4, "experts_of": 4, "recompute": "full"},
    "two of four, 1d_sp, zero": {"data": 2, "experts_of": 2, "tensor": "1d_sp", "axes": {"t": 2}, "zero": 1},
    "two ranks, 2d": {"data": 2, "experts_of": 2, "tensor": "2d", "axes": {"r": 1, "c": 2}},
    "two ranks, zb_h1": {"data": 2, "experts_of": 2, "pipeline": "zb_h1", "stages": 2, "microbatch": 2},
}


def configured(**more: Any):
    return configure(**{**ROWS, "global_batch": 16, **more})


@pytest.mark.parametrize("first", [0, 1, 2], ids=["one rank has all", "an expert of each", "the last has all"])
@pytest.mark.parametrize("name", PLANS)
def test_all_tokens_choose_the_same_experts(name, first, monkeypatch):
    """Some rank gets nothing, or some expert; the largest bytes are those planned where a rank could get all."""
    c = configured(**PLANS[name])
    to_the_first(monkeypatch, 4, 2, first)
    plan, results = run(c)
    compare(c, plan, results, alone := run(configured())[1][0])
    assert counted(results) == replay_traffic(plan, [r.routing for r in results])
    assert alone.routed[:4] == [2 * 16 * 16 * (first <= e < first + 2) for e in range(4)]


@pytest.mark.parametrize("more", [{}, {"recompute": "full"}], ids=str)
@pytest.mark.parametrize("name", ["two ranks", "two ranks, zb_h1"])
def test_factors_of_experts_go_with_copies_of_tokens(name, more):
    """They differ from 1 in the second step: weights that went before they were multiplied would be seen."""
    c = configured(**PLANS[name], **more, expert_factors=True)
    plan, results = run(c)
    assert any(p.name.endswith(".expert_factor") for p in plan.parameters)
    compare(c, plan, results, run(configured(expert_factors=True))[1][0])


def test_a_model_that_changes_weights_after_they_were_sent_is_refused(monkeypatch):
    """Sums on the ranks of experts would not have them."""
    record = CombineRowsOp.record_operation

    def with_others(op, ops, name, y, spec, counts, weights, *more):
        return record(op, ops, name, y, spec, counts, replace(weights), *more)

    monkeypatch.setattr(CombineRowsOp, "record_operation", with_others)
    with pytest.raises(ConfigError, match="weights are not those with which `dispatch_rows` has sent its rows"):
        make_plan(configured(**PLANS["two ranks"]))


def over_tensor_axes(stream: dict[str, list[str]], **more: Any):
    """Whole experts on ranks of an axis t that splits the stream otherwise, or not at all."""
    c = configured(tensor="1d", axes={"t": 2}, **more)
    c.tensor.regions = {"stream": stream, "attention": {"heads": ["t"]}, "mlp": {}, "experts": {"experts": ["t"]}}
    c.tensor.regions["logits"] = {"vocab": ["t"]}
    c.tensor.parameters = {
        "vector": {},
        "in": {"heads": ["t"], "vocab": ["t"], "experts": ["t"]},
        "out": {"heads": ["t"], "experts": ["t"]},
    }
    return c


@pytest.mark.parametrize("more", [{}, {"data": 2}, {"data": 2, "experts_of": 2, "recompute": "full"}], ids=str)
@pytest.mark.parametrize("dim", ["", "length", "batch", "d_model"])
def test_experts_over_tensor_axes(dim, more):
    """Rows are exchanged along t where it splits the batch, else each rank makes those of its own experts."""
    c = over_tensor_axes({dim: ["t"]} if dim else {}, **more)
    plan, _ = prove(c)
    assert find_unsoundness(plan) == []
    moved = {axis for o in plan.operations.values() for m in o.collectives if m.op == "all_to_allv" for axis in m.axes}
    assert moved == ({"t"} if dim == "batch" else set()) | ({"expert"} if "experts_of" in more else set())


@pytest.mark.parametrize("dim", ["batch", "d_model"])
def test_experts_that_lie_unlike_the_stream(dim):
    c = over_tensor_axes({"length": ["t"]})
    c.tensor.regions["experts"] = {dim: ["t"]}
    for role in ("in", "out"):
        del c.tensor.parameters[role]["experts"]
    plan, _ = prove(c)
    assert find_unsoundness(plan) == []


def test_a_token_of_weight_zero_is_not_sent(monkeypatch):
    def route(*arguments):
        weights, *others = whole(*arguments)
        return weights * (torch.arange(len(weights)) % 3 > 0).view(-1, 1, 1), *others

    whole = expert_rows.route_tokens
    monkeypatch.setattr(expert_rows, "route_tokens", route)
    c = configured(**PLANS["two ranks"])
    plan, results = run(c)
    compare(c, plan, results, run(configured())[1][0])
    sent = sum(sum(one.by_expert) for r in results for passes in r.routing.values() for one in passes)
    assert sent == 2 * 16 * 10 * 2  # layers x sequences x tokens that are sent x experts


MANY: dict[str, dict[str, Any]] = {
    "two ranks": {"data": 2, "experts_of": 2},
    "four ranks, 1d_sp": {"data": 4, "experts_of": 4, "tensor": "1d_sp", "axes": {"t": 2}},
    "two of four, 2d, full": {
        "data": 4, "experts_of": 2, "tensor": "2d", "axes": {"r": 1, "c": 2}, "recompute": "full"
    },
}  # fmt: skip
OF_MANY = {"experts": 16, "experts_per_token": 5}


@pytest.mark.parametrize("name", MANY)
def test_a_token_goes_once_to_each_rank(name, monkeypatch):
    """As many copies as ranks have experts of it, by its weights alone."""
    seen, whole = list[bool](), expert_rows.count_rows

    def count(communicator, weights, seats, chosen):
        counts = whole(communicator, weights, seats, chosen)
        chosen_by = [{e // seats.each for e, w in enumerate(token) if w} for token in weights.flatten(0, 1).tolist()]
        ranks = range(len(seats.first))
        copies = [sum(rank in one for one in chosen_by) for rank in ranks]
        seen.append(not seats.axes or copies == list(counts.sent))
        return counts

    monkeypatch.setattr(expert_rows, "count_rows", count)
    plan, results = prove(configured(**MANY[name], **OF_MANY))
    assert find_unsoundness(plan) == [] and seen and all(seen)
    assert any(sum(one.by_rank) < sum(one.by_expert) for r in results for one in r.routing["layers.0.mlp"])


def test_a_token_whose_experts_are_on_one_rank_is_sent_once(monkeypatch):
    """Each token of the other rank in four rows, in both passes there and back, and its weights of both seats twice."""
    c = configured(**PLANS["two ranks"])
    to_the_first(monkeypatch, 4, 2)
    _, results = run(c)
    rows, weights = 4 * c.model.d_model, 2 * 2
    assert counted(results)["all_to_allv/expert"] == c.model.layers * 8 * 16 * (rows + weights) * 8


CONTROLS = {
    "weights of another token's copy": lambda copies: {"weights": copies.weights.flip(0)},
    "a sum without a copy": lambda copies: {
        "ranks": copies.ranks._replace(lies=copies.ranks.lies.index_fill(1, torch.tensor(1), -1))
    },
    "copies of other tokens": lambda copies: {"ranks": copies.ranks._replace(pair=copies.ranks.pair.flip(0))},
}


@pytest.mark.parametrize("name", CONTROLS)
def test_negative_control_copies(name, monkeypatch):
    def count(*arguments):
        counts = whole(*arguments)
        return counts._replace(copies=counts.copies._replace(**CONTROLS[name](counts.copies)))

    alone, whole, c = run(configured())[1][0], expert_rows.count_rows, configured(**PLANS["two ranks"])
    monkeypatch.setattr(expert_rows, "count_rows", count)
    plan, results = run(c)
    with pytest.raises(AssertionError, match="gradient"):
        compare(c, plan, results, alone)


def test_negative_control_sizes_of_another_routing(monkeypatch):
    """Where a rank receives as many rows as it sends, the exchange must fail, or the numbers."""

    def count(*arguments):
        counts = whole(*arguments)
        ranks = counts.copies.ranks
        return counts._replace(copies=counts.copies._replace(ranks=ranks._replace(received=ranks.sent)))

    whole = expert_rows.count_rows
    monkeypatch.setattr(expert_rows, "count_rows", count)
    c = configured(**PLANS["two ranks"])
    with pytest.raises(Exception, match="of torch.Size|gradient of|another rank failed|index"):
        compare(c, *run(c), run(configured())[1][0])


def test_negative_control_bytes_of_another_routing():
    c = configured(**PLANS["two ranks"])
    plan, results = prove(c)
    routings = [r.routing for r in results]
    other = [
        {name: [SentRows(*(numbers[::-1] for numbers in one)) for one in passes] for name, passes in of_rank.items()}
        for of_rank in routings
    ]
    assert replay_traffic(plan, routings) == counted(results) != replay_traffic(plan, other)
    assert {key: n for key, n in replay_traffic(plan, other).items() if "allv" not in key}.items() <= communication(
        plan
    ).items()


def test_the_check_sees_rows_that_are_not_sent():
    plan = make_plan(configured(**PLANS["two ranks"]))
    for kind, at in (("dispatch_rows", 2), ("combine_rows", 0)):
        key = kind, "layers.0.mlp"
        o = plan.operations[key]
        stays = [replace(c, forward=(), backward=()) if i == at else c for i, c in enumerate(o.conversions)]
        moved = tuple(c for c in o.collectives if c.op != "all_to_allv" and c.dtype != "integers")
        broken = replace(o, conversions=tuple(stays), collectives=moved)
        (line,) = find_unsoundness(with_operations(plan, {**plan.operations, key: broken}))
        assert line.startswith(f"{kind} layers.0.mlp: ")


@pytest.mark.parametrize("first", [None, 0], ids=["even", "one rank gets nothing"])
def test_on_processes(first, pool, monkeypatch):
    """gloo sends no rows as well as some."""
    c = over_tensor_axes({"length": ["t"]}, data=2, experts_of=2)
    plan = make_plan(c)
    results = pool.run(_forced if first == 0 else compute, c, plan)
    if first is None:
        return examine(c, plan, results)
    to_the_first(monkeypatch, 4, 2)
    compare(c, plan, results, run(configured())[1][0])
    assert counted(results) == replay_traffic(plan, [r.routing for r in results])


def _forced(c, plan, communicator):
    with pytest.MonkeyPatch.context() as patch:
        to_the_first(patch, 4, 2)
        return compute(c, plan, communicator)


class Groups:
    each = (2, 0, 3)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)


@pytest.mark.parametrize("kernel", [False, True], ids=["loop", "one kernel"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_grouped_products(dtype, kernel, monkeypatch):
    if kernel and dtype == torch.float64:
        return  # torch has none
    monkeypatch.setattr(products, "has_kernel", lambda x, y: kernel)
    draw = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(s, generator=draw).to(dtype) for s in ((5, 16), (3, 8, 16), (5, 8)))
    rows, up, out = ("rows", "m"), ("experts", "f", "m"), ("rows", "f")
    of = torch.tensor([0, 0, 2, 2, 2])
    near = {"rtol": 1e-6, "atol": 1e-6} if dtype != torch.bfloat16 else {"rtol": 2e-2, "atol": 2e-2}
    y = torch.einsum("rm,rfm->rf", x.double(), w[of].double())
    back = torch.einsum("rf,rfm->rm", g.double(), w[of].double())
    of_w = torch.zeros(3, 8, 16, dtype=torch.float64).index_add_(
        0, of, torch.einsum("rf,rm->rfm", g.double(), x.double())
    )
    for a, b, wanted, dims in (
        (x, w, y, (rows, up, out)),
        (g, w, back, (out, up, rows)),
        (x, g, of_w, (rows, out, up)),
    ):
        product = build_grouped_einsum(Groups(), *dims)
        assert torch.allclose(product(a, b).double(), wanted, **near)
        into = torch.ones(wanted.shape, dtype=dtype)
        assert torch.allclose(product(a, b, None, into).double(), wanted + 1, **near)
        assert torch.allclose(product(a, b, None, into, True).double(), wanted, **near)
        assert product(a, b, None, into) is into


def test_both_stacks_of_an_encoder_decoder():
    """Rows of a source, as long as that is."""
    t5 = {**MODELS["t5"], **MODELS["experts"], "activation": "gelu", "capacity_factor": 0.0}
    plan, _ = prove(configure("1d_sp", {"t": 2}, data=2, experts_of=2, global_batch=16, **t5))
    assert find_unsoundness(plan) == [] and plan.sizes["rows"] == 2

"""Experts that ranks compute for others: which, in how many bytes, and the same numbers (fp64)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from platform.config.validation import violations_of_configuration
from platform.plan.plan_check import find_unsoundness
from platform.plan.scheme import lent_experts
from platform.predict.make_plan import make_plan
from platform.runtime import conversion
from tests.harness.oracle import compare, configure, run, serial, trainer_of
from tests.harness.replayed_bytes import deal_rows, replay_traffic
from tests.harness.threads import run_threads

KIND = {"experts": 8, "experts_per_token": 2, "expert_d_ff": 24, "capacity_factor": 0.0, "balance_loss": 0.3}
PLANS = {
    "serial": {"tensor": "serial", "data": 4, "experts_of": 4},
    "two pairs": {"tensor": "serial", "data": 4, "experts_of": 2},
    "1d": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "experts_of": 2},
}


def configured(lent: int, biased: bool = False, **plan):
    c = configure(**{**KIND, **plan}, **({"expert_bias": True} if biased else {}))
    c.parallel.lent_experts = lent
    return c


@pytest.mark.parametrize("seats", [1, 2])
def test_no_rank_gets_busier(seats):
    generator = torch.Generator().manual_seed(seats)
    for _ in range(100):
        load = (torch.rand(8, generator=generator) ** 4 * 100).int().tolist()
        lent = lent_experts(load, 4, seats)
        at = {e: [e // 2, *(rank for rank, experts in enumerate(lent) if e in experts)] for e in range(8)}
        busy = [sum(load[e] / len(at[e]) for e in at if rank in at[e]) for rank in range(4)]
        assert max(busy) <= max(sum(load[2 * rank : 2 * rank + 2]) for rank in range(4)) + 1e-9
        assert all(len(experts) <= seats for experts in lent)
        assert all(len(set(ranks)) == len(ranks) for ranks in at.values())
        for expert, ranks in at.items():
            for source in range(4):
                assert sum(deal_rows(load[expert], source, sorted(ranks))) == load[expert]


@pytest.mark.parametrize("lent", [1, 3])
@pytest.mark.parametrize("name", PLANS)
def test_equals_one_process(name, lent):
    c = configured(lent, **PLANS[name])
    plan, results = run(c)
    compare(c, plan, results, serial(c))
    assert not list(find_unsoundness(plan))


@pytest.mark.parametrize("lent", [1, 3])
def test_biases_on_sub_grid_zero_alone_are_lent_there(lent, monkeypatch):
    c = configured(lent, biased=True, branch="dsp_csub", branch_axes={"g": 2}, data=2, experts_of=2)
    plan, results = run(c)
    compare(c, plan, results, serial(c))
    assert not list(find_unsoundness(plan))
    shifts = [o for (kind, _), o in plan.operations.items() if kind == "shift"]
    steps = [s for o in shifts for each in o.conversions for s in (*each.forward, *each.backward)]
    assert {s.only for s in steps if s.op in ("lend", "give_back")} == {(), ("g",)}


@pytest.mark.parametrize("dim", ["experts", "d_ff"])
def test_weights_that_another_axis_splits_are_joined_before_they_are_lent(dim):
    """Or split again: an all-to-all of experts and widths."""
    c = configured(1, biased=True, tensor="layout", axes={"b": 2}, rules={}, data=2, experts_of=2)
    c.tensor.regions["experts"] = {"d_ff": ["b"]} if dim == "experts" else {}
    c.tensor.parameters = {"in": {dim: ["b"]}, "out": {dim: ["b"]}}
    plan, results = run(c)
    compare(c, plan, results, serial(c))
    assert not list(find_unsoundness(plan))


def test_equals_one_process_with_biases_recomputed():
    c = configured(2, biased=True, **PLANS["serial"])
    c = replace(c, recompute="full")
    plan, results = run(c)
    compare(c, plan, results, serial(c))


def lent_in_the_second(c, plan):
    """The bytes that the second step moves, and its plan's."""

    def steps(communicator):
        trainer = trainer_of(c, plan, communicator)
        trainer.step(1)
        lent, trainer.ops.routing = dict(communicator.lent), {}
        report = trainer.step(2)
        return lent, trainer.ops.routing, report.comm_bytes

    return run_threads(plan.mesh, steps)


@pytest.mark.parametrize("name", PLANS)
def test_bytes_are_those_of_the_routing(name):
    c = configured(1, **PLANS[name])
    plan = make_plan(c)
    by_rank = lent_in_the_second(c, plan)
    lent = by_rank[0][0]
    assert any(experts for layer in lent.values() for experts in layer), "nobody lends anything"
    assert all(one == lent for one, _, _ in by_rank)
    moved: dict[str, int] = {}
    for _, _, of_rank in by_rank:
        for key, n in of_rank.items():
            moved[key] = moved.get(key, 0) + n
    assert moved == replay_traffic(plan, [routing for _, routing, _ in by_rank], lent)


def test_a_gradient_that_stays_is_found(monkeypatch):
    def forgetful(self):
        self.sent.clear()
        return whole(self)

    whole = conversion.ExpertLending.wait
    monkeypatch.setattr(conversion.ExpertLending, "wait", forgetful)
    c = configured(1, **PLANS["serial"])
    plan, results = run(c)
    with pytest.raises(AssertionError):
        compare(c, plan, results, serial(c))


@pytest.mark.parametrize("region", ["experts", "mlp", "stream"])
def test_experts_that_an_axis_of_the_scheme_splits_are_not_lent(region):
    """A region without a table has that of the next."""
    regions = {"stream": {}, region: {"experts": ["b"]}}
    c = configured(1, tensor="layout", axes={"b": 2}, data=2, experts_of=2)
    c.tensor.regions, c.tensor.parameters = regions, {}
    assert [line for line in violations_of_configuration(c) if "not built beside experts that b splits" in line]
    c.tensor.axes = {"b": 1}
    assert not [line for line in violations_of_configuration(c) if "not built" in line]

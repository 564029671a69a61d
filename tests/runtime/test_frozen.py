"""Frozen parameters take no gradient: nothing of one is computed, reduced, kept or planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from platform.model import build_model
from platform.plan.plan_check import find_unsoundness
from platform.predict.footprint import count_saved_elements, weight_bytes
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from tests.harness.held import check_held, check_stages
from tests.harness.oracle import MODELS, configure, prove, trainer_of
from tests.harness.planned_memory import predict_training
from tests.runtime.test_memory import measured

FROZEN = ["embedding*", "*mlp.*", "layers.0.attention.*"]
full = pytest.mark.full
PLANS: dict[str, dict[str, Any]] = {
    "1d_sp, zero 1": {"tensor": "1d_sp", "axes": {"t": 2}, "data": 2, "zero": 1},
    "2d by SUMMA": {"tensor": "2d", "axes": {"r": 2, "c": 2}},
    "3d, zero 3": {"tensor": "3d", "axes": {"x": 2, "z": 2}, "data": 2, "zero": 3},
    "stages, weights apart": {"pipeline": "zb_h1", "stages": 2, "microbatch": 2, "tied": True},
    "recomputed": {"tensor": "1d", "axes": {"t": 2}, "recompute": "full", "mlp_chunks": 2},
}


def freeze(c, patterns=FROZEN):
    c.train.freeze = list(patterns)
    return c


@pytest.mark.parametrize("model", ["gpt_untied", pytest.param("llama", marks=full), pytest.param("latent", marks=full)])
@pytest.mark.parametrize("name", PLANS)
def test_equal_to_one_process(name, model):
    c = freeze(configure(**{**MODELS[model], **PLANS[name]}))
    plan, results = prove(c)
    assert not find_unsoundness(plan) and plan.frozen
    check_stages(plan)
    assert not any(r.gradients.keys() & plan.frozen for r in results)


@pytest.mark.parametrize(
    "scheme", [("serial", {}), ("1d_sp", {"t": 2}), pytest.param(("2d_gather", {"r": 2, "c": 2}), marks=full)]
)
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_inputs_of_frozen_products_are_not_kept(scheme, model):
    sizes = []
    for patterns in (["embedding"], FROZEN, ["*.up", "*.down", "*.gate"]):
        c = freeze(configure(*scheme, **{**MODELS[model], "tied": False}), patterns)
        c.train.freeze = [p for p in c.train.freeze if model == "llama" or p != "*.gate"]
        plan, saved = measured(c)
        assert set(saved) == {count_saved_elements(plan, build_model(c.model)).total_elements}
        sizes.append(saved[0])
    assert sizes[1] < sizes[2] < sizes[0]


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_there_is_one_copy_in_the_compute_type(zero):
    """Two bytes each where ranks compute in bf16: no master copy, no gradient, and shards under ZeRO-3 alone."""
    c = freeze(configure(precision="bf16", data=2, zero=zero, tied=False), ["embedding", "layers.*", "norm.*"])
    plan = make_plan(c)
    frozen = sum(b.elements for b in plan.buckets if b.frozen)
    trained = [b for b in plan.buckets if not b.frozen]
    assert frozen > 10 * sum(b.elements for b in trained) / 2
    planned = weight_bytes(plan, 2)
    masters = sum(b.shard_elements for b in trained)
    assert planned["optimizer"] == 8 * masters and planned["gradients"] <= 4 * sum(b.elements for b in trained)
    apart = sum(b.shard_elements if zero == 3 else b.elements for b in trained)
    assert planned["parameters"] == 4 * masters + 2 * apart + 2 * frozen // (2 if zero == 3 else 1)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_forecast_has_gradients_of_trained_ones_alone(zero):
    c = freeze(configure(precision="bf16", data=2, zero=zero, tied=False), ["embedding", "layers.*", "norm.*"])
    plan = make_plan(c)
    trained = sum(b.elements for b in plan.buckets if not b.frozen)
    c.train.freeze, (most,) = [], predict_training(c, plan)
    assert most.gradients <= 4 * trained
    assert most.total_bytes < 0.6 * predict_training(c, make_plan(c))[0].total_bytes


def test_a_rank_holds_what_is_planned():
    c = freeze(configure(precision="bf16", tied=False))
    plan = make_plan(c)
    trainer = trainer_of(c, plan, SingleRank(plan.mesh))
    check_held(trainer)
    trainer.step(1)
    for flat in trainer.weights.buckets:
        assert flat.masters.dtype == (torch.bfloat16 if flat.bucket.frozen else torch.float32)
        assert not flat.bucket.frozen or (flat.sums is None and flat.master is flat.compute)


def test_a_frozen_model_takes_two_products_of_three():
    plan, frozen = make_plan(configure(tied=False)), make_plan(freeze(configure(tied=False), ["*mlp*"]))
    products = (o.operation for (_, name), o in plan.operations.items() if "mlp" in name)
    tokens = plan.sizes["length"] * plan.sizes["batch"]
    less = sum(map(plan.count_seen_flops, products)) / tokens
    assert plan.flops_per_token - frozen.flops_per_token == pytest.approx(less)

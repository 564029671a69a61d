"""Losses of pairs of answers under every kind of plan: loss and gradients equal one process in fp64."""

from __future__ import annotations

import pytest
import torch

from platform.plan.model_types import PAIR_LOSSES
from platform.plan.plan_check import find_unsoundness
from platform.predict.make_plan import make_plan
from platform.runtime import chunked_loss
from tests.harness.oracle import MODELS, configure, prove, serial
from tests.harness.pairwise import cover, product
from tests.harness.suite import suite

PLANS = {
    "1d": ("1d", {"t": 2}, {"data": 2}),
    "1d_sp": ("1d_sp", {"t": 4}, {}),
    "2d": ("2d", {"r": 2, "c": 2}, {}),
    "3d": ("3d", {"x": 2, "y": 2, "z": 2}, {}),
    "zero 3": ("serial", {}, {"data": 3, "zero": 3, "microbatch": 1}),
    "context": ("serial", {}, {"context": 2, "data": 2}),
    "context 1d": ("1d", {"t": 2}, {"context": 4}),
    "stages": ("1d", {"t": 2}, {"pipeline": "1f1b", "stages": 2, "microbatch": 2, "scatter_gather": True}),
    "zero bubble": ("serial", {}, {"pipeline": "zb_h1", "stages": 2, "microbatch": 2, "context": 2}),
    "uneven": ("1d", {"t": 3}, {"uneven": True}),
    "branches": ("1d", {"t": 2}, {"branch": "dsp", "branch_axes": {"g": 2}}),
}
FACTORS = {
    "plan": list(PLANS),
    "loss": list(PAIR_LOSSES),
    "model": ["packed_gpt", "modern", "experts", "gpt_oss"],
    "recompute": ["none", "full"],
}


def build(case, **more):
    tensor, axes, options = PLANS[case["plan"]]
    options = dict(options)
    uneven = options.pop("uneven", False)
    model = {**MODELS[case["model"]], "layers": 2, "within_documents": True}
    c = configure(tensor, axes, recompute=case["recompute"], **{**model, **options, **more})
    c.tensor.uneven = uneven
    c.data.kind, c.data.objective, c.data.document_mask = "preferences", "preference", True
    c.data.packing, c.data.overlong, c.train.loss = "best_fit", "drop", case["loss"]
    c.train.loss_settings = {"beta": 0.3, "margin": 0.5}
    return c


CASES = product(FACTORS, lambda case: True)
PLAIN = {"loss": ["dpo"], "model": ["packed_gpt"], "recompute": ["none"]}


@suite("oracle of preferences", CASES, cover(CASES, plain=PLAIN))
def test_equals_one_process(case):
    c = build(case)
    assert not find_unsoundness(make_plan(c))
    prove(c)


@pytest.mark.parametrize("spoiled", ["axes", "side"])
def test_another_sum_is_found(spoiled, monkeypatch):
    """Controls: answers of which each rank adds up its own tokens alone, and gradients of the other answer."""
    c = build({"plan": "context", "loss": "dpo", "model": "packed_gpt", "recompute": "none"})
    expected = serial(c)
    assert expected.loss
    whole = chunked_loss._compute_pair_losses

    def spoil(statistics, targets, communicator, pairs, with_derivatives):
        if spoiled == "axes":
            pairs = chunked_loss.LossOfPairs(pairs.loss, (), pairs.slots)
        losses, derivatives = whole(statistics, targets, communicator, pairs, with_derivatives)
        return losses, derivatives if spoiled == "axes" else derivatives.multiply_by_weights(-torch.ones(()))

    monkeypatch.setattr(chunked_loss, "_compute_pair_losses", spoil)
    with pytest.raises(AssertionError):
        prove(c)

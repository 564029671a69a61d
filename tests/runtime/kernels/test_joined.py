"""Weights that are one matrix, as Q, K and V are, against a product for each of them."""

from __future__ import annotations

import pytest
import torch

from platform.plan import operation_plan
from platform.runtime import einsum
from platform.runtime.flat_buffers import AdjacentParameters
from tests.harness import oracle
from tests.harness.oracle import compare, configure, run, serial

PLANS = {
    "gpt": {"bias": True},
    "llama": {"kv_heads": 2, "activation": "swiglu", "positions": "rope", "norm": "rmsnorm", "bias": False},
    "1d, data 2": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "activation": "geglu", "bias": True},
    "1d_sp, zero 3": {"tensor": "1d_sp", "axes": {"t": 2}, "data": 2, "zero": 3},
    "zb_h1, zero 1": {"pipeline": "zb_h1", "stages": 2, "data": 2, "zero": 1, "microbatch": 1},
}


@pytest.fixture
def joined(monkeypatch) -> list[int]:
    """Collects the number of weights of every joined product."""
    counts: list[int] = []
    outputs = einsum._JoinedWeights.compute_outputs
    monkeypatch.setattr(
        einsum._JoinedWeights,
        "compute_outputs",
        lambda self, *arguments: (counts.append(len(self.weights.names)), outputs(self, *arguments))[1],
    )
    return counts


def apart(c, monkeypatch):
    """One process with a product for each weight."""
    with monkeypatch.context() as patch:
        patch.setattr(einsum, "_join_adjacent_weights", lambda *_: None)
        patch.setattr(oracle, "_serial", {})
        return serial(c)


@pytest.mark.parametrize("copies", [False, True], ids=["own products", "copied gradients"])
@pytest.mark.parametrize("name", PLANS)
def test_equals_a_product_for_each(name, copies, joined, monkeypatch):
    c = configure(**PLANS[name])
    expected = apart(c, monkeypatch)
    assert not joined
    monkeypatch.setitem(operation_plan.JOINS_GRADIENTS, "cpu", copies)
    compare(c, *run(c), expected)
    assert 3 in joined and (2 in joined) == (c.model.activation in ("swiglu", "geglu"))


def test_what_lies_elsewhere_is_not_joined(joined):
    """Under a 3-D scheme weights are gathered one by one."""
    run(configure("3d", {"x": 2, "y": 2, "z": 1}))
    assert not joined


@pytest.mark.parametrize("copies", [False, True])
def test_negative_control_weights_in_another_order(copies, monkeypatch):
    c = configure(**PLANS["gpt"])
    expected = apart(c, monkeypatch)
    monkeypatch.setitem(operation_plan.JOINS_GRADIENTS, "cpu", copies)
    values = AdjacentParameters.flat_compute_copies.fget
    monkeypatch.setattr(AdjacentParameters, "flat_compute_copies", property(lambda self: torch.roll(values(self), 1)))
    with pytest.raises(AssertionError):
        compare(c, *run(c), expected)

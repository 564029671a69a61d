"""Feed-forward layers in chunks of tokens (train.mlp_chunks): the gradients and bytes of whole ones, under every scheme
that exchanges nothing inside of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from platform.plan.operations.pointwise import MlpOp
from platform.runtime import chunked_loss
from tests.harness.oracle import MODELS, configure, prove

T: dict[str, Any] = {"axes": {"t": 2}}
IN_CHUNKS: dict[str, dict[str, Any]] = {
    "serial, biases": {},
    "llama, 1d": {**MODELS["llama"], "tensor": "1d", **T},
    "1d_sp, zero 2": {"tensor": "1d_sp", **T, "data": 2, "zero": 2, "microbatch": 2},
    "recomputed, offloaded, zero 3": {"recompute": "full", "offload": True, "data": 2, "zero": 3, "microbatch": 2},
    "zb_h1, 1d": {"pipeline": "zb_h1", "stages": 2, "microbatch": 2, "tensor": "1d", **T},
    "split length": {"tensor": "layout", "axes": {"c": 2}, "rules": {"length": ["c"]}},
    "sub-grid 0": {"branch": "dsp_csub", "branch_axes": {"g": 2}},
    "shared experts": {**MODELS["experts"], "data": 2, "experts_of": 2},
}
WHOLE: dict[str, dict[str, Any]] = {
    "gathered again": {"tensor": "1d_sp", **T, "gathered": "again"},
    "2d": {"tensor": "2d", "axes": {"r": 2, "c": 2}},
    "3d": {"tensor": "3d", "axes": {"x": 2, "y": 1, "z": 2}},
}


@pytest.fixture
def chunks(monkeypatch):
    """The number of rows in each chunk that a backward pass computes."""
    row_counts: list[int] = []

    def gradients(self, x, *more, compute=chunked_loss.TwoLayerWeights.compute_chunk_gradients):
        row_counts.append(len(x))
        return compute(self, x, *more)

    monkeypatch.setattr(chunked_loss.TwoLayerWeights, "compute_chunk_gradients", gradients)
    return row_counts


@pytest.mark.parametrize("name", IN_CHUNKS)
def test_in_chunks(name, chunks):
    """Five do not divide the rows."""
    prove(configure(mlp_chunks=5, **IN_CHUNKS[name]))
    assert len(set(chunks)) == 2 and max(chunks) <= 13


@pytest.mark.parametrize("name", WHOLE)
def test_whole_where_ranks_exchange_something_inside(name, chunks):
    prove(configure(mlp_chunks=5, **WHOLE[name]))
    assert chunks == []


def test_more_chunks_than_rows(chunks):
    prove(configure(mlp_chunks=1000))
    assert set(chunks) == {1}


def test_negative_control_a_chunk_that_overwrites_the_sums(monkeypatch):
    def forgets(into, x, y, fresh, add=chunked_loss.add_product):
        add(into, x, y, True)

    monkeypatch.setattr(chunked_loss, "add_product", forgets)
    with pytest.raises(AssertionError, match="gradient of"):
        prove(configure(mlp_chunks=2))


def test_negative_control_a_layer_that_ranks_exchange_inside(monkeypatch):
    monkeypatch.setattr(MlpOp, "computes_by_chunks", lambda *_: True)
    with pytest.raises((AssertionError, RuntimeError)):
        prove(configure(mlp_chunks=2, **WHOLE["3d"]))


def test_in_16_bits_it_is_the_whole_within_rounding():
    """Sums of gradients are in fp32 beside rows in bf16, as they are of the whole."""
    torch.manual_seed(0)
    x, w, v = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((40, 8), (16, 8), (8, 16)))
    gradients = []
    for chunk in (40, 7):
        leaves = [t.clone().requires_grad_() for t in (x, w, v)]
        layer = chunked_loss.TwoLayerWeights(torch.tanh, leaves[1:2], [], leaves[2], None, chunk)
        chunked_loss.compute_by_chunks(layer, leaves[0]).square().sum().backward()
        gradients.append([t.grad for t in leaves])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=0.05 * float(one.abs().max()))

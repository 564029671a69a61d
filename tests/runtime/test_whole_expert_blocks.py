"""Blocks with experts of a capacity, and of feed-forward layers in chunks of rows, compiled whole: equal to one process
in fp64, what routers count included, launched as the blocks that are run function by function."""

from __future__ import annotations

import pytest

from tests.harness.oracle import MODELS, examine, run
from tests.runtime.oracle.test_experts import KINDS
from tests.runtime.test_compiled_block import APART
from tests.runtime.test_whole_tensor_blocks import CUBE, GATHERED, MEGATRON, ONE, SEQUENCE, SUMMA, compiling, fast, made

__all__ = ["fast", "made"]

SHARED, LLAMA = MODELS["experts"], MODELS["llama"]
REPLICAS = {"data": 2, "microbatch": 2}
OF_TWO = {**SHARED, **REPLICAS, "experts_of": 2}
ALONE = {
    "shared": {**SHARED, **ONE},
    "weight gradients apart": {**SHARED, **APART},
    "in chunks": {"mlp_chunks": 5, **ONE},
}
MORE = {
    **{kind: KINDS[kind] for kind in KINDS if kind not in ("all tokens", "gpt_oss")},
    "recomputed": {**SHARED, "recompute": "full"},
    "two recomputed together": {**SHARED, "recompute": "full", "every": 2},
    "documents, dropout": {**SHARED, **MODELS["packed_gpt"], "dropout": 0.2},
    "data 2, zero 3": {**SHARED, **REPLICAS, "zero": 3},
    "frozen": {**SHARED, "freeze": ["embedding*", "*attention*", "*.experts.up*"]},
    "interleaved": {**SHARED, "pipeline": "interleaved", "stages": 2, "chunks": 2, "layers": 4, "microbatch": 2},
    "biased, weight gradients apart, recomputed": {**KINDS["biased"], **APART, "recompute": "full"},
    "no loss of the balance": {**SHARED, "balance_loss": 0.0, "z_loss": 0.0},
    "llama in chunks, recomputed": {**LLAMA, "mlp_chunks": 3, "recompute": "full"},
    "in chunks, weight gradients apart": {"mlp_chunks": 3, **APART},
    "in chunks, data 2, zero 3": {"mlp_chunks": 3, **REPLICAS, "zero": 3},
    "in chunks, dropout": {"mlp_chunks": 3, "dropout": 0.2},
    "in chunks, documents, padding": {"mlp_chunks": 3, **MODELS["bert"]},
    "shared in chunks": {**SHARED, "mlp_chunks": 3},
}
TOGETHER = {"experts of two": {**OF_TWO, **ONE}}
MORE_TOGETHER = {
    "experts of two, zero 3, recomputed": {**OF_TWO, "zero": 3, "recompute": "full"},
    "experts of two, weight gradients apart": {**OF_TWO, **APART},
    "experts of two, biased": {**OF_TWO, **KINDS["biased"]},
    "experts of two, 1d_sp": {**SEQUENCE, **OF_TWO},
    "experts of two, latent": {**OF_TWO, **KINDS["first dense"]},
    "1d": {**MEGATRON, **SHARED},
    "1d, whole experts": {**MEGATRON, **OF_TWO, "tensor_experts": "whole"},
    "1d_sp, llama": {**SEQUENCE, **LLAMA, **SHARED},
    "1d_sp, gathered again, weight gradients apart": {**SEQUENCE, **LLAMA, **SHARED, **APART, "gathered": "again"},
    "2d": {**SUMMA, **SHARED},
    "2d_gather, recomputed": {**GATHERED, **SHARED, "recompute": "full"},
    "3d, both stacks": {**CUBE, **KINDS["both stacks"]},
    "context": {**SHARED, **ONE, "context": 2},
    "1d in chunks": {**MEGATRON, "mlp_chunks": 3},
    "1d_sp in chunks, weight gradients apart": {**SEQUENCE, **LLAMA, **APART, "mlp_chunks": 3},
}


@pytest.mark.parametrize("name", [*ALONE, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_blocks_of_one_rank_compute_the_same(name, made):
    c = compiling(**(ALONE | MORE)[name])
    c.train.compile_collectives = False
    plan, results = run(c)
    assert all(made) and any(block.communicator is None for block in made)
    examine(c, plan, results)


@pytest.mark.parametrize("name", [*TOGETHER, *(pytest.param(name, marks=pytest.mark.full) for name in MORE_TOGETHER)])
def test_ranks_exchange_the_same(name, made):
    """With the same collectives in the same order as blocks that are not compiled."""
    c = compiling(**(TOGETHER | MORE_TOGETHER)[name])
    plan, results = run(c)
    assert made and all(made)
    examine(c, plan, results)
    c.train.compile = "off"
    for whole, by_function in zip(results, run(c)[1], strict=True):
        assert whole.log == by_function.log

"""Blocks with experts of a capacity, and of feed-forward layers in chunks of rows, compiled whole: equal to one process
in fp64, what routers count included, launched as the blocks that are run function by function."""

from __future__ import annotations

import pytest
import torch

from platform.runtime import compilation, compiled_blocks
from tests.harness.oracle import MODELS, compare, examine, run, serial
from tests.harness.threads import ThreadGroups
from tests.runtime.oracle.test_experts import KINDS
from tests.runtime.test_compiled_block import APART, of_a_layer
from tests.runtime.test_whole_tensor_blocks import (
    CUBE,
    GATHERED,
    MEGATRON,
    ONE,
    SEQUENCE,
    SUMMA,
    calls_of_a_layer,
    compiling,
    examine_and_compare_logs,
    fast,
    traced_blocks,
    without_waits,
)

__all__ = ["fast", "traced_blocks"]

SHARED, LLAMA = MODELS["experts"], MODELS["llama"]
REPLICAS = {"data": 2, "microbatch": 2}
OF_TWO = {**SHARED, **REPLICAS, "experts_of": 2}
ALONE = {"shared in chunks": {**SHARED, "mlp_chunks": 3, **ONE}}
MORE = {
    "weight gradients apart": {**SHARED, **APART},
    "in chunks": {"mlp_chunks": 5},
    **{kind: KINDS[kind] for kind in KINDS if kind not in ("all tokens", "gpt_oss", "whole")},
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
    "in chunks, padding": {"mlp_chunks": 3, **MODELS["bert"]},
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


def alone(name: str):
    c = compiling(**(ALONE | MORE)[name])
    c.train.compile_collectives = False
    return c


@pytest.mark.parametrize("name", [*ALONE, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_blocks_of_one_rank_compute_the_same(name, traced_blocks):
    c = alone(name)
    plan, results = run(c)
    assert all(traced_blocks) and any(block.communicator is None for block in traced_blocks)
    examine(c, plan, results)


@pytest.mark.parametrize("name", [*TOGETHER, *(pytest.param(name, marks=pytest.mark.full) for name in MORE_TOGETHER)])
def test_ranks_exchange_the_same(name, traced_blocks):
    examine_and_compare_logs(compiling(**(TOGETHER | MORE_TOGETHER)[name]), traced_blocks)


@pytest.mark.full
@pytest.mark.parametrize("name", ["shared in chunks", "biased", "experts of two"])
def test_kernels_of_the_compiler_compute_the_same(name, monkeypatch):
    monkeypatch.undo()  # of `fast`
    c = compiling(**(ALONE | MORE | TOGETHER)[name])
    examine(c, *run(c))


@pytest.mark.full
def test_negative_control_tokens_losses_without_a_gradient(monkeypatch):
    """The second result of a block counts too."""
    take = compiled_blocks._take_float_gradients
    monkeypatch.setattr(
        compiled_blocks, "_take_float_gradients", lambda *how: [g * (i == 0) for i, g in enumerate(take(*how))]
    )
    c = alone("shared in chunks")
    with pytest.raises(AssertionError, match="gradient of"):
        compare(c, *run(c), serial(c))


@pytest.mark.full
def test_negative_control_a_wait_that_is_taken_away(monkeypatch):
    """Slots that are read before they have come are other tokens'."""
    monkeypatch.setattr(ThreadGroups, "_start_collective", without_waits(ThreadGroups._start_collective))
    c = compiling(**TOGETHER["experts of two"])
    with pytest.raises(Exception):  # noqa: B017  (numbers that differ, or none)
        compare(c, *run(c), serial(c))


@pytest.mark.full
def test_negative_control_routers_that_count_twice(traced_blocks, monkeypatch):
    """What they count is a result of the block, and not of its trace."""
    forward = compiled_blocks.CompiledBlock.__call__

    def count_twice(block, *arguments):
        out = forward(block, *arguments)
        return tuple(y if y.is_floating_point() else 2 * y for y in out)

    monkeypatch.setattr(compiled_blocks.CompiledBlock, "__call__", count_twice)
    c = alone("shared in chunks")
    with pytest.raises(AssertionError, match="tokens of experts"):
        compare(c, *run(c), serial(c))


@pytest.mark.parametrize(
    ("more", "most"),
    [(SHARED, 50), pytest.param({"mlp_chunks": 4}, 40, marks=pytest.mark.full)],
    ids=["experts", "in chunks"],
)
def test_python_calls_of_a_layer(more, most, monkeypatch):
    """Those of a block of one rank, which hands over what its routers count."""
    monkeypatch.undo()  # of `fast`
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    for known in (compilation.compile_region, compiled_blocks._partition_graph):  # of another backend
        known.cache_clear()
    assert of_a_layer("gpt", every=False, **more) <= most


def test_python_calls_of_a_layer_whose_experts_ranks_share():
    """With two exchanges in each pass."""
    assert calls_of_a_layer({**SHARED, "data": 2, "experts_of": 2}) <= 130


def test_chunks_of_hidden_rows_are_computed_again(traced_blocks):
    """The compiled forward pass hands none over, and the backward pass has a product more for each chunk."""
    run(compiling(mlp_chunks=4, d_ff=72, **ONE))
    functions = traced_blocks[-1].functions
    hidden = [tuple(y.meta["val"].shape) for y in functions.forward.graph.graph.output_node().args[0]]
    products = functions.backward.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
    assert not [shape for shape in hidden if 72 in shape]
    assert len([p for p in products if 72 in p.meta["val"].shape]) >= 4

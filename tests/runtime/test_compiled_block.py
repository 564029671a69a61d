"""Blocks without collectives, each compiled as one function: equal to one process in fp64, one graph for a stack."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from itertools import product
from typing import Any

import pytest
import torch

from platform.config.fields import Config
from platform.predict.make_plan import make_plan
from platform.runtime import compilation, compiled_blocks
from platform.runtime.communicator import SingleRank
from tests.harness.oracle import MODELS, compare, configure, run, serial, trainer_of
from tests.harness.reference_model import ReferenceModel


def compiling(freeze=(), tune=None, **how) -> Config:
    c = configure(**how)
    c.train.compile, c.train.freeze = "on", list(freeze)
    for key, value in (tune or {}).items():
        setattr(c.tune, key, value)
    return c


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """The same graphs of forward and backward passes, without their kernels."""
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")


@pytest.fixture
def traced_blocks(monkeypatch):
    """What became of every block that was traced."""
    blocks = []

    def keep(*arguments):
        blocks.append(_compiled_block(*arguments))
        return blocks[-1]

    from platform.runtime import parallel_ops

    monkeypatch.setattr(parallel_ops, "compile_block", keep)
    return blocks


_compiled_block = compiled_blocks.compile_block
TUNE = {"kind": "lora", "rank": 4, "alpha": 8.0}
FROZEN = {"freeze": ["embedding*", "*mlp.*", "layers.0.attention.*"], "tied": False}
APART = {"pipeline": "zb_h1", "stages": 2, "layers": 2, "microbatch": 1}
PLANS = {
    "gpt": {},
    "llama": MODELS["llama"],
    "t5": MODELS["t5"] | {"kind": "decoder"},
    "latent": MODELS["latent"],
    "recomputed": {"recompute": "full", **MODELS["llama"]},
    "two blocks recomputed together": {"recompute": "full", "every": 2, "layers": 4},
    "data 2, zero 1": {"data": 2, "zero": 1, "microbatch": 2},
    "data 2, zero 2": {"data": 2, "zero": 2, "microbatch": 2},
    "data 2, zero 3": {"data": 2, "zero": 3, "microbatch": 2},
    "zero 3, recomputed": {"data": 2, "zero": 3, "microbatch": 2, "recompute": "full"},
    "interleaved": {"pipeline": "interleaved", "stages": 2, "chunks": 2, "layers": 4, "microbatch": 2},
    "documents": MODELS["packed_gpt"],
    "documents, data 2, zero 3, recomputed": {
        **MODELS["packed_gpt"], "data": 2, "zero": 3, "microbatch": 2, "recompute": "full",
    },
    "padding": MODELS["bert"],
    "padding and memory": MODELS["t5"],
    "dropout": {"dropout": 0.2},
    "dropout, recomputed, interleaved": {
        "dropout": 0.2, "recompute": "full", "pipeline": "interleaved", "stages": 2, "chunks": 2, "layers": 4,
        "microbatch": 1, **MODELS["llama"],
    },
    "dropout, data 2, padding": {"dropout": 0.2, "data": 2, "microbatch": 2, **MODELS["bert"]},
    "weight gradients apart": APART,
    "weight gradients apart, recomputed, dropout": {
        **APART, **MODELS["llama"], "recompute": "full", "dropout": 0.2, "layers": 3,
    },
    "weight gradients apart, data 2, zero 3, padding and memory": {
        **APART, **MODELS["t5"], "data": 2, "zero": 3, "global_batch": 4,
    },
    "weight gradients apart, some frozen": {**APART, **FROZEN},
    "weight gradients of adapters apart": {**APART, **MODELS["latent"], "tune": TUNE},
    "frozen": FROZEN,
    "frozen llama, a block of no gradient": {**MODELS["llama"], "freeze": ["embedding", "layers.0.*", "*.mlp.*"]},
    "frozen, data 2, zero 3, recomputed": {**FROZEN, "data": 2, "zero": 3, "microbatch": 2, "recompute": "full"},
    "frozen biases and norms, interleaved": {
        "freeze": ["layers.?.*bias", "*norm*"], "pipeline": "interleaved", "stages": 2, "chunks": 2, "layers": 4,
        "microbatch": 2,
    },
    "adapters": {**MODELS["llama"], "tune": TUNE},
    "adapters everywhere, dropout": {**MODELS["gpt_untied"], "tune": {**TUNE, "targets": ["*"], "dropout": 0.25}},
    "adapters, data 2, zero 3, recomputed": {
        **MODELS["latent"], "tune": TUNE, "data": 2, "zero": 3, "microbatch": 2, "recompute": "full",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_they_compute_the_same(name, traced_blocks):
    c = compiling(**PLANS[name])
    compare(c, *run(c), serial(c))
    assert traced_blocks and all(traced_blocks)


PASS_BY_PASS = {
    "sinks": {"attention_sinks": True},
    "a window of a long sequence": {"window": 128, "length": 1024, "layers": 1, "microbatch": 1, "global_batch": 1},
    "a tensor scheme": {"tensor": "1d", "axes": {"t": 2}},
    "recompute=selective": {"recompute": "selective"},
}


@pytest.mark.parametrize("name", PASS_BY_PASS)
def test_other_blocks_are_run_function_by_function(name, traced_blocks):
    c = compiling(**PASS_BY_PASS[name])
    compare(c, *run(c), serial(c))
    assert not traced_blocks  # the plan knows it before anything is traced


PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


@pytest.mark.parametrize(("model", "weights"), [("gpt", 4), ("llama", 4), ("t5", 6)])
def test_products_of_weight_gradients_are_apart(model, weights, traced_blocks):
    """One of each matrix, those side by side as one; vectors' sums stay, and no product is computed twice."""
    run(compiling(**{**MODELS[model], "layers": 1}))
    functions = traced_blocks[-1].functions
    parts = functions.apart
    inputs, late, whole = (
        sum(node.target in PRODUCTS for node in f.graph.graph.nodes)
        for f in (parts.input_gradients, parts.weight_gradients, functions.backward)
    )
    assert late == len(parts.late) == weights and inputs + late == whole
    assert not [i for i in parts.late if i < functions.count]


def test_a_block_of_frozen_weights_leaves_nothing_for_later(traced_blocks):
    run(compiling(**{**MODELS["llama"], "layers": 2}, freeze=["embedding", "layers.1.*"]))
    assert [block.functions.apart is None for block in traced_blocks] == [False, True]


def trainer(**how):
    c = compiling(**how)
    plan = make_plan(c)
    return trainer_of(c, plan, SingleRank(plan.mesh))


def test_the_layers_of_a_stack_share_a_graph():
    before = compiled_blocks._split_graph.cache_info().currsize
    trainer(layers=5, d_model=40).step(1)
    assert compiled_blocks._split_graph.cache_info().currsize == before + 1


def test_a_graph_keeps_nothing_of_the_generation_that_traced_it():
    t = trainer(layers=2, d_model=56)
    t.step(1)
    kept = [weakref.ref(flat._whole) for flat in t.weights.buckets]
    assert compiled_blocks._split_graph.cache_info().currsize
    del t
    gc.collect()
    assert not any(reference() is not None for reference in kept)


def test_layers_that_differ_do_not():
    before = compiled_blocks._split_graph.cache_info().currsize
    windowed = {"window": 5, "window_layers": [1], "layers": 3, "d_model": 24}
    trainer(**windowed).step(1)
    assert compiled_blocks._split_graph.cache_info().currsize == before + 2


def test_a_block_that_reads_what_passes_do_not_share_stays_as_it_is():
    x, mine = torch.ones(2), torch.ones(2)
    assert _compiled_block(lambda x: x + mine, [x], dict) is None
    assert _compiled_block(lambda x: x + mine, [x], lambda: {id(mine): None}) is not None


def test_what_differs_between_passes_is_an_argument_behind_the_activations():
    x, of_pass, mine = torch.ones(2), torch.full((2,), 2.0), torch.full((2,), 3.0)
    block = _compiled_block(lambda x: x * mine + of_pass, [x], lambda: {id(mine): None, id(of_pass): ("mask",)})
    assert block.reads == [("mask",)]
    assert block(lambda function: function, None, x, torch.full((2,), 5.0)).tolist() == [8.0, 8.0]


def calls_of(step, every: bool) -> int:
    """Calls of Python functions in all threads, `every` one, or the platform's own."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call" and (every or "/platform/" in frame.f_code.co_filename)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return count


def of_a_layer(model: str, every: bool, **more: Any) -> float:
    """Calls of a layer and microbatch more."""
    counts = {}
    for layers, microbatches in product((2, 4), (2, 4)):
        t = trainer(layers=layers, global_batch=microbatches, microbatch=1, **MODELS[model], **more)
        for step in range(1, 4):
            t.step(step)
        counts[layers, microbatches] = calls_of(lambda t=t: t.step(4), every)
    return (counts[4, 4] - counts[4, 2] - counts[2, 4] + counts[2, 2]) / 4


def of_a_plain_layer(model: str) -> float:
    """Calls of a layer and microbatch more of plain PyTorch."""
    counts = []
    for layers in (2, 4):
        c = configure(layers=layers, **MODELS[model])
        m, tokens = ReferenceModel(c.model), torch.zeros(1, c.model.length, dtype=torch.long)
        counts.append(calls_of(lambda m=m, x=tokens: m(x, x).backward(), True))
    return (counts[1] - counts[0]) / 2


def test_python_calls_of_a_layer():
    """They are those of the compiled functions, and of what hands them their tensors."""
    assert of_a_layer("gpt", every=False) < 40


def test_python_calls_of_a_layer_with_adapters():
    """They add a tensor each to what is handed over, and nothing of a frozen weight is added."""
    assert of_a_layer("llama", every=False, tune=TUNE) < 40


def test_python_calls_of_a_layer_with_dropout():
    """The starts of its random numbers are sent with all others of a pass."""
    assert of_a_layer("gpt", every=False, dropout=0.1, fused_dropout=True) < 72


@pytest.mark.parametrize("model", ["gpt", pytest.param("llama", marks=pytest.mark.full)])
def test_the_host_has_hardly_more_to_do_than_for_plain_pytorch(model, monkeypatch):
    """Torch's own functions included (A8)."""
    monkeypatch.setattr(compilation, "BACKEND", "inductor")
    for known in (compilation.compile_region, compiled_blocks._split_graph):  # of the backend before
        known.cache_clear()
    ours, plain = of_a_layer(model, every=True), of_a_plain_layer(model)
    print(f"{model}: {ours:.1f} and {plain:.1f} calls, {ours / plain:.2f}")
    assert ours <= 1.3 * plain, (ours, plain)

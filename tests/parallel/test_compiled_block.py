"""Blocks without collectives, each compiled as one function: equal to one process in fp64, one graph for a stack."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch

from platform.config.fields import Config
from platform.parallel import compiled, compiled_block
from platform.parallel.communicator.base import SingleRank
from platform.planning.make_plan import make_plan
from tests.harness.oracle import MODELS, compare, configure, run, serial, trainer_of


def compiling(**how) -> Config:
    c = configure(**how)
    c.train.compile = "on"
    return c


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """The same graphs of forward and backward passes, without their kernels."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")


@pytest.fixture
def made(monkeypatch):
    """What became of every block that was traced."""
    found = []

    def keep(*arguments):
        found.append(_compiled_block(*arguments))
        return found[-1]

    from platform.parallel import parallel_ops

    monkeypatch.setattr(parallel_ops, "compiled_block", keep)
    return found


_compiled_block = compiled_block.compiled_block
PLANS = {
    "gpt": {},
    "llama": MODELS["llama"],
    "t5": MODELS["t5"] | {"kind": "decoder"},
    "recomputed": {"recompute": "full", **MODELS["llama"]},
    "two blocks recomputed together": {"recompute": "full", "every": 2, "layers": 4},
    "data 2, zero 1": {"data": 2, "zero": 1, "microbatch": 2},
    "data 2, zero 2": {"data": 2, "zero": 2, "microbatch": 2},
    "data 2, zero 3": {"data": 2, "zero": 3, "microbatch": 2},
    "zero 3, recomputed": {"data": 2, "zero": 3, "microbatch": 2, "recompute": "full"},
    "interleaved": {"pipeline": "interleaved", "stages": 2, "chunks": 2, "layers": 4, "microbatch": 2},
}


@pytest.mark.parametrize("name", PLANS)
def test_they_compute_the_same(name, made):
    c = compiling(**PLANS[name])
    compare(c, *run(c), serial(c))
    assert made and all(made)


PASS_BY_PASS = {
    "documents": MODELS["packed_gpt"],
    "padding": MODELS["bert"],
    "a tensor scheme": {"tensor": "1d", "axes": {"t": 2}},
    "dropout": {"dropout": 0.2},
    "weight gradients apart": {"pipeline": "zb_h1", "stages": 2, "layers": 2, "microbatch": 1},
    "recompute=selective": {"recompute": "selective"},
}


@pytest.mark.parametrize("name", PASS_BY_PASS)
def test_other_blocks_are_run_function_by_function(name, made):
    c = compiling(**PASS_BY_PASS[name])
    if name == "dropout":
        run(c)
    else:
        compare(c, *run(c), serial(c))
    assert not any(made)


def trainer(**how):
    c = compiling(**how)
    plan = make_plan(c)
    return trainer_of(c, plan, SingleRank(plan.mesh))


def test_the_layers_of_a_stack_share_a_graph():
    before = compiled_block._traced.cache_info().currsize
    trainer(layers=5, d_model=40).step(1)
    assert compiled_block._traced.cache_info().currsize == before + 1


def test_a_graph_keeps_nothing_of_the_generation_that_traced_it():
    t = trainer(layers=2, d_model=56)
    t.step(1)
    kept = [weakref.ref(flat._whole) for flat in t.weights.buckets]
    assert compiled_block._traced.cache_info().currsize
    del t
    gc.collect()
    assert not any(reference() is not None for reference in kept)


def test_layers_that_differ_do_not():
    before = compiled_block._traced.cache_info().currsize
    windowed = {"window": 5, "window_layers": [1], "layers": 3, "d_model": 24}
    trainer(**windowed).step(1)
    assert compiled_block._traced.cache_info().currsize == before + 2


def test_a_block_that_reads_what_passes_do_not_share_stays_as_it_is():
    x, mine = torch.ones(2), torch.ones(2)
    assert _compiled_block(lambda x: x + mine, [x], set) is None
    assert _compiled_block(lambda x: x + mine, [x], lambda: {id(mine)}) is not None


def calls_of(step) -> int:
    """Calls of the platform's own functions in one step."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call" and "/platform/" in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def test_python_calls_of_a_layer():
    """A layer more costs few calls: of the compiled functions and of what hands them their tensors."""
    found = []
    for layers in (2, 6):
        t = trainer(layers=layers)
        for step in range(1, 4):
            t.step(step)
        found.append(calls_of(lambda t=t: t.step(4)))
    of_a_layer = (found[1] - found[0]) / 4 / 2  # two microbatches
    assert of_a_layer < 200, of_a_layer

"""Gradients that are kept: each owns its storage and is laid out as its parameter, whatever computed it."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from platform.config.fields import Config
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from tests.harness.oracle import MODELS, assemble, configure, prove, serial, trainer_of
from tests.harness.threads import run_threads


def strided(pipeline: str, precision: str = "fp64", **more) -> Config:
    """Configure parameters that are split over an axis which no activation has: their gradients are slices."""
    stages = 1 if pipeline == "none" else 2
    sizes = {"length": 8, "vocab": 64, "microbatch": 2, "global_batch": 8, **more}
    c = configure("layout", {"a": 2}, pipeline=pipeline, stages=stages, precision=precision, **sizes)
    c.tensor.regions, c.tensor.parameters = {"stream": {}}, {"all": {"d_ff": "a"}}
    return c


def one_token(pipeline: str, length: int = 1, **more) -> Config:
    """Configure biases of activations that have one token per rank: a bias' gradient is a view of the activation's."""
    stages = 1 if pipeline == "none" else 2
    chunks = 2 if pipeline == "interleaved" else 1
    axes, rules = ({"a": length}, {"length": "a"}) if length > 1 else ({}, None)
    scheme = "layout" if rules else "serial"
    sizes = {"length": length, "microbatch": 1, "global_batch": 7, "layers": 2 * chunks, **more}
    return configure(scheme, axes, rules=rules, pipeline=pipeline, stages=stages, chunks=chunks, **sizes)


def test_slices_of_gradients_update_the_right_elements():
    prove(strided("zb_h1"))


@pytest.mark.parametrize("length", [1, 2])
def test_one_token_per_rank(length):
    prove(one_token("zb_h1", length))


def drawn(seed: int) -> Config:
    """Draw a plan under which gradients come as views: of slices, or of activations of one token."""
    draw = random.Random(seed)
    model = draw.choice(["gpt", "gpt_untied", "gqa_tied", "bert"])
    more = {
        **MODELS[model],
        "layers": 4,
        "dropout": draw.choice([0.0, 0.1]),
        "recompute": draw.choice(["none", "selective", "full"]),
        "data": draw.choice([1, 2]),
    }
    more["zero"] = draw.choice([0, 1]) if more["data"] == 2 else 0
    pipeline = draw.choice(["none", "1f1b", "interleaved", "zb_h1", "zb_h1", "zb_h1"])
    if draw.random() < 0.3:
        return strided(pipeline, **{**more, "chunks": 2 if pipeline == "interleaved" else 1, "vocab": 64})
    return one_token(pipeline, draw.choice([1, 1, 2]), **more)


def poisoned(trainer) -> SimpleNamespace:
    """Gradients of a step in which every sum of gradients is taken, and its memory overwritten, as soon as it is."""
    weights, sums, send, finish = trainer.weights, {}, trainer.communicator.send, trainer.weights.finish_reductions

    def checked_send(x: Tensor, stage: int):
        kept = {flat.sums.untyped_storage().data_ptr() for flat in weights.buckets if flat.sums is not None}
        assert x.untyped_storage().data_ptr() not in kept
        return send(x, stage)

    def poisoning(flat, came):
        def run(name: str) -> None:
            came(name)
            memory, _ = flat.gradient_memory(name)
            sums[name] = sums.get(name, 0.0) + memory
            memory.fill_(torch.nan)
            flat._summed.discard(name)

        return run

    def restored():
        for flat in weights.buckets:
            flat.note_added_gradients = type(flat).note_added_gradients.__get__(flat)
            for name in flat.compute.keys() & sums.keys():
                flat.add_gradient(name, sums[name])
        return finish()

    for flat in weights.buckets:
        flat.note_added_gradients, flat.complete = poisoning(flat, flat.note_added_gradients), None
    weights._reduce_bucket = lambda flat: None  # `finish_reductions` does
    weights.finish_reductions, trainer.communicator.send = restored, checked_send
    trainer.compute_gradients(1)
    assert sums
    return SimpleNamespace(rank=trainer.communicator.rank, gradients=weights.gradients)


@pytest.mark.parametrize("seed", range(10))
def test_a_kept_gradient_shares_memory_with_nothing_that_is_read_later(seed):
    """What is added into it next, here as poison, reaches nothing else: no activation, other gradient or send."""
    c = drawn(seed)
    plan = make_plan(c)
    work = lambda communicator: poisoned(trainer_of(c, plan, communicator))  # noqa: E731
    results = [work(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else run_threads(plan.mesh, work)
    expected = serial(c).gradients
    largest = max(g.abs().max() for g in expected.values())
    for name, gradient in assemble(plan, results, lambda r: r.gradients).items():
        error = (gradient - expected[name]).abs().max()
        assert error <= 1e-10 * expected[name].abs().max() + 1e-13 * largest, f"{name}: {error}"

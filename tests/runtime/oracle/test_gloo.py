"""The oracle again on real processes with gloo, and gloo beside threads."""

from __future__ import annotations

import pytest
import torch

from platform.plan.step_collectives import communication
from platform.predict.make_plan import make_plan
from tests.harness.oracle import MODELS, compare, compute, configure, counted, examine, run, serial
from tests.harness.pairwise import cover, product
from tests.harness.suite import suite

FACTORS = {
    "scheme": [
        ("serial", {}),
        ("1d", {"t": 2}),
        ("1d", {"t": 4}),
        ("1d_sp", {"t": 2}),
        ("3d", {"x": 1, "y": 2, "z": 2}),
        ("3d", {"x": 2, "y": 1, "z": 2}),
        ("3d", {"x": 2, "y": 2, "z": 2}),
    ],
    "g": [1, 2],
    "data": [1, 2],
    "model": ["gpt", "llama"],
    "dropout": [0.0, 0.1],
}


def world(case) -> int:
    size = case["g"] * case["data"]
    for n in case["scheme"][1].values():
        size *= n
    return size


CASES = product(FACTORS, lambda case: 1 < world(case) <= 8)


PLAIN = {"scheme": [("1d", {"t": 2}), ("3d", {"x": 2, "y": 1, "z": 2})]}


@suite("oracle (gloo processes)", CASES, cover(CASES, plain=PLAIN))
def test_equals_one_process(case, pool):
    c = configure(
        *case["scheme"],
        branch="dsp" if case["g"] > 1 else "none",
        branch_axes={"g": case["g"]} if case["g"] > 1 else {},
        data=case["data"],
        global_batch=8,
        dropout=case["dropout"],
        **MODELS[case["model"]],
    )
    plan = make_plan(c)
    results = pool.run(compute, c, plan)
    examine(c, plan, results)


def test_threads_and_gloo_count_and_launch_the_same(pool):
    """The in-process backend stands for the real one: same launches in the same order, same bytes, same numbers."""
    c = configure("3d", {"x": 2, "y": 1, "z": 2}, data=2)
    plan, threads = run(c)
    processes = pool.run(compute, c, plan)
    for a, b in zip(threads, processes, strict=True):
        assert a.log == b.log and a.moved == b.moved
        assert a.loss == pytest.approx(b.loss, rel=1e-14)
        assert all(torch.equal(a.initial[n], b.initial[n]) for n in a.initial)


@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 2), ("zb_h1", 1)])
def test_stages_that_post_their_receives_early(schedule, chunks, pool):
    """Two stages that are each other's neighbour on both sides see their messages in one order all the same."""
    c = configure(pipeline=schedule, stages=2, chunks=chunks, microbatch=1, layers=4)
    plan = make_plan(c)
    results = pool.run(compute, c, plan)
    compare(c, plan, results, serial(c))
    assert counted(results) == communication(plan)
    posted = [[launch.group for launch in r.log if launch.op == "send"] for r in results]
    # rank 0 asks for the gradient that it awaits before it sends the next activation
    assert posted[0] != posted[1] and sorted(posted[0]) == sorted(posted[1])

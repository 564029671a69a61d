"""Asynchronous products by torch's fused operations, of ranks that share the memory of one GPU, against one process on
the CPU in fp64. No GPU has run this yet."""

from __future__ import annotations

import pytest

from platform.config.fields import Config
from platform.plan.plan import Plan
from platform.predict.make_plan import make_plan
from platform.runtime import process_groups
from platform.runtime.communicator import Communicator
from tests.harness.oracle import MODELS, Result, compute, configure, examine, on_host
from tests.harness.pool import Pool

pytestmark = pytest.mark.gpu
PLANS = {
    "t 2": configure("1d_sp", {"t": 2}, async_products="on"),
    "data 2 zero 3, t 2": configure("1d_sp", {"t": 2}, data=2, zero=3, microbatch=2, async_products="on",
                                    **MODELS["llama"]),
    "3d": configure("3d", {"x": 1, "y": 2, "z": 2}, recompute="full", async_products="on"),
}  # fmt: skip


def whole_step(c: Config, plan: Plan, communicator: Communicator) -> tuple[Result, bool]:
    """A step, and whether the rank's GPU has shared its memory."""
    return on_host(compute(c, plan, communicator)), bool(process_groups._SHARED_BEFORE)


@pytest.mark.parametrize("name", PLANS)
def test_ranks_that_share_memory_compute_what_one_process_does(name):
    c = PLANS[name]
    plan, ranks = make_plan(c), Pool(4, 90.0, "cuda")  # processes anew: the first mesh of each shares memory
    try:
        results, shared = zip(*ranks.run(whole_step, c, plan), strict=True)
        assert all(shared)
        examine(c, plan, results)
        results, shared = zip(*ranks.run(whole_step, c, plan), strict=True)  # the next mesh waits for its collectives
        examine(c, plan, results)
    finally:
        ranks.close()

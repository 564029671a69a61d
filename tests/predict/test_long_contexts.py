"""What is kept grows as length / ranks: a million tokens of an 8B on 32 GPUs of 80 GB, and half a million on one, by
the memory that their plans count."""

from __future__ import annotations

from math import inf

import pytest

from platform.launch import compose_config
from platform.plan.accelerators import nominal_memory
from platform.predict.contenders import SearchSpace
from platform.predict.footprint import Footprint
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_footprints, predict_peak_bytes
from platform.predict.search import plan_finalist
from platform.predict.step_price import read_hardware

LLAMA = ["+experiment=one_gpu", "model=llama_8b", "train.microbatch=1", "train.global_batch=1", "recompute=full"]
OF_32 = ["model.length=1_000_000", "parallel.context=32", "parallel.context_kind=heads", "parallel.zero=3"]
OF_ONE = ["model.length=500_000", "optimizer=adafactor", "train.mlp_chunks=64", "recompute_offload=true"]
SAVING = ["train.mlp_chunks=8", "recompute_offload=true"]
STREAM = 2 * 4096  # bytes of a token's input of a block


def needs(*arguments: str) -> Footprint:
    config = compose_config([*LLAMA, *arguments])
    [footprint] = predict_footprints(config, make_plan(config))
    return footprint


@pytest.mark.parametrize(("kind", "most"), {"ring": 14.5e9, "heads": 17.7e9, "gather": 30.5e9}.items())
def test_a_million_tokens_on_32_gpus(kind, most):
    footprint = needs(*OF_32, *SAVING, "cluster.gpu=H100", f"parallel.context_kind={kind}")
    assert 0.95 * most < footprint.total_bytes < most
    assert footprint.host == 32 * STREAM * 1_000_000 / 32  # of 32 blocks, on 32 ranks


def test_half_a_million_on_one():
    """Weights, masters and their gradients alone are 80 GB; they are not offloaded."""
    footprint = needs(*OF_ONE)
    assert footprint.total_bytes < 0.9 * (nominal_memory("MI300X") or 0)
    assert footprint.host == 32 * STREAM * 500_000


@pytest.mark.parametrize("without", ["train.mlp_chunks=1", "recompute_offload=false"])
def test_negative_control_each_of_the_two_is_needed(without):
    assert needs(*OF_ONE, without).total_bytes > (nominal_memory("MI300X") or 0)


def test_twice_the_ranks_keep_half():
    sizes = [needs(*OF_32, *SAVING, f"parallel.context={n}").host for n in (8, 16, 32)]
    assert sizes[0] == 2 * sizes[1] == 4 * sizes[2]


# how ranks share a text -> the kinds among which that chooses, in the order of their bytes
BY_BYTES = {
    "parallel.context=4": ["gather", "heads", "ring"],
    "parallel.context=5": ["gather", "ring"],  # which cannot exchange 32 heads
    "parallel.context=8 parallel.context_kind=nested parallel.context_heads=2": ["nested", "nested_ring"],
}


@pytest.mark.parametrize("how", BY_BYTES)
def test_the_cheapest_kind_that_fits_is_chosen(how):
    """By bytes alone where no memory is stated, or the cheapest fits it, or none does."""
    long = [*LLAMA, *SAVING, "model.length=1_000_000", *how.split(), "parallel.zero=3"]
    first, second, *_ = BY_BYTES[how]
    plans, needs = {}, {}
    for kind in BY_BYTES[how]:
        c = compose_config([*long, f"parallel.context_kind={kind}"])
        plans[kind] = make_plan(c)
        needs[kind] = predict_peak_bytes(c, plans[kind]) / 1e9
    assert needs[second] < needs[first]
    between, none = (needs[first] + needs[second]) / 2, min(needs.values()) / 2
    for memory, kind in ((0.0, first), (needs[first] + 1, first), (between, second), (none, first)):
        config = compose_config([*long, f"cluster.device_memory={memory}"])
        plan, space = make_plan(config), SearchSpace(config)
        quickly = plan_finalist(space, space.read_contender(), read_hardware("h100"), weighs=False)
        assert quickly.plan.scheme == plans[first].scheme and quickly.settle(memory * 1e9 or inf).plan == plan
        assert plan.scheme == plans[kind].scheme
        lines = [line for line in plan.warnings if "context_kind" in line]
        assert bool(lines) == (memory == between)
        if lines:
            assert lines == [f"parallel.context_kind={second}: with {first}, which moves fewer bytes, a worker needs "
                             f"{needs[first]:.4g} of {between:.4g} GB"]  # fmt: skip


def test_workers_choose_alike():
    """They know their devices, which the driver looked for after it had planned."""
    long = [*LLAMA, *SAVING, "model.length=1_000_000", "parallel.context=4", "parallel.zero=3", "cluster.gpu=H100"]
    c = compose_config([*long, "cluster.device_memory=80"])
    before = make_plan(c)
    c.cluster.device = "cpu"
    assert make_plan(c, stage_of=[chunk.stage for chunk in before.chunks]) == before
    assert before.warnings

"""Scales of weights in 4 bits in 8 bits (tune.double), under every plan: equal to one process, and bytes as planned."""

from __future__ import annotations

from typing import Any

import pytest

from platform.boundary.refusals import ConfigError
from platform.plan.model_types import NF4_DOUBLE, NF4_UNITS
from platform.plan.plan_check import find_unsoundness
from platform.plan.step_collectives import communication, list_decodings
from platform.predict.make_plan import make_plan
from platform.runtime import normal_floats
from tests.harness.held import check_kept_parameters, check_stages
from tests.harness.oracle import compare, prove, run, serial, trainer_of
from tests.harness.threads import run_threads
from tests.runtime.oracle import test_adapters
from tests.runtime.oracle.test_adapters import started  # noqa: F401  adapters that are not 0 at first

full = pytest.mark.full
TUNE = {"kind": "qlora", "double": True, "rank": 4, "alpha": 8.0}
WIDE = {"d_model": 128, "d_ff": 256, "heads": 4, "kv_heads": 4, "layers": 2, "length": 8}
PLANS: dict[str, dict[str, Any]] = {
    "zero 3": {"data": 2, "zero": 3},
    "stages": {"pipeline": "zb_h1", "stages": 2, "microbatch": 2},
    "stages, zero 3": {"pipeline": "1f1b", "stages": 2, "microbatch": 2, "data": 2, "zero": 3},
    "contexts": {"context": 2, "data": 2, "zero": 3},
    "vocab cut": {"tensor": "layout", "axes": {"t": 2}, "data": 2, "zero": 1},
    "recomputed": {"data": 2, "zero": 3, "recompute": "full"},
    "experts": {"experts": 4, "expert_d_ff": 128, "capacity_factor": 4.0, "data": 2, "experts_of": 2, "zero": 3},
}
FEW = ("stages, zero 3",)


def tuned(tune: dict[str, Any] = TUNE, **how: Any):
    c = test_adapters.tuned("llama", tune, **{**WIDE, **how})
    c.tensor.layout = "vocab:t" if how.get("tensor") == "layout" else c.tensor.layout
    return c


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=full) for n in PLANS])
def test_equal_to_one_process(name):
    plan, results = prove(tuned(**PLANS[name]))
    assert not find_unsoundness(plan)
    check_stages(plan)
    assert plan.quantised and plan.quantised_kind == "nf4_double"
    assert all(g.any() for r in results for n, g in r.gradients.items() if g.numel() and "expert" not in n)


@pytest.mark.parametrize("name", [n if n == "zero 3" else pytest.param(n, marks=full) for n in PLANS])
def test_ranks_hold_what_is_planned(name):
    """Bytes between uses exactly: 8,456 for each 16,384 elements."""
    c = tuned(**PLANS[name], precision="bf16")
    plan = make_plan(c)

    def kept(communicator) -> None:
        trainer = trainer_of(c, plan, communicator)
        assert any(flat.bucket.quantised for flat in trainer.weights.buckets if flat.here)
        check_kept_parameters(trainer, NF4_DOUBLE)

    assert NF4_UNITS[NF4_DOUBLE] == 8456
    run_threads(plan.mesh, kept)


def test_the_gathers_move_what_is_kept():
    moved, decoded = {}, {}
    for double in (False, True):
        plan = make_plan(tuned({**TUNE, "double": double}, data=2, zero=3, precision="bf16"))
        moved[double] = communication(plan)["all_gather/data"]
        decoded[double] = sum(x for _, x, _ in list_decodings(plan, plan.chunks[0], False))
    elements = sum(b.elements for b in plan.buckets if b.quantised)
    passes = (moved[False] - moved[True]) / (elements * (36 / 64 - 8456 / 16384))
    assert passes == round(passes) > 0
    assert decoded[True] - decoded[False] == 2 * elements * 33 / 64


@pytest.mark.parametrize("how", [{"tensor": "1d", "axes": {"t": 2}}, {"kv_heads": 2}], ids=str)
def test_a_block_of_blocks_is_never_cut(how):
    words = "is cut by t inside a block" if "axes" in how else "is not of whole blocks"
    with pytest.raises(ConfigError) as refused:
        make_plan(tuned(**how))
    assert f"{words} of 16384 elements with one scale of scales" in str(refused.value)
    assert "tune.double=true" in str(refused.value) and "nearest legal: false" in str(refused.value)
    assert make_plan(tuned({**TUNE, "double": False}, **how))


def test_a_mean_of_a_part_is_found(monkeypatch):
    """The negative control: each rank takes the mean of the scales that it has."""
    c = tuned(**PLANS["zero 3"])
    expected, real = serial(c), normal_floats.QuantisedBucket.store_weights

    def store(self, name, weights):
        self.offsets[name] = normal_floats.average_scales([normal_floats.sum_scales(weights)], weights.numel())
        real(self, name, weights)

    monkeypatch.setattr(normal_floats.QuantisedBucket, "store_weights", store)
    plan, results = run(c)
    with pytest.raises(AssertionError, match=r"initial of layers"):
        compare(c, plan, results, expected)

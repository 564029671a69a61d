"""Blocks that differ by one unit (tensor.uneven) equal one process, in bytes too, and a state moves between them."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from random import Random

import pytest

from platform.config.fields import Config
from platform.plan.plan_check import find_unsoundness
from platform.plan.step_collectives import communication
from platform.predict.make_plan import make_plan
from platform.predict.replan import replan
from platform.runtime.parallel_ops import ParallelOps
from tests.fuzz import plans
from tests.harness.oracle import MODELS, configure, prove
from tests.harness.plan_mutants import other, with_operations, with_steps
from tests.harness.replayed_bytes import pair_traffic

SIZES = {"d_kv": 4, "d_ff": 25, "vocab": 61, "length": 8, "layers": 1}
LLAMA = {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu", "bias": False, "tied": False}
CASES = {
    "7 heads over 2": {"tensor": "1d", "axes": {"t": 2}, "heads": 7},
    "5 heads over 4": {"tensor": "1d_sp", "axes": {"t": 4}, "heads": 5},
    "3 groups over 2": {"tensor": "1d_sp", "axes": {"t": 2}, "heads": 6, "kv_heads": 3, **LLAMA},
    "5 groups over 4, of heads that 4 would divide": {"tensor": "1d", "axes": {"t": 4}, "heads": 20, "kv_heads": 5},
    "2 groups over 3": {"tensor": "1d_sp", "axes": {"t": 3}, "heads": 14, "kv_heads": 2, "length": 6},
    "axes that cut a dim after another": {
        "tensor": "3d", "axes": {"x": 2, "y": 2, "z": 2}, "heads": 10, "d_ff": 27, "vocab": 63, "gathered": "again",
    },
    "SUMMA": {"tensor": "2d", "axes": {"r": 2, "c": 2}, "heads": 7, "d_ff": 27, "microbatch": 8},
    "shards": {"tensor": "1d_sp", "axes": {"t": 2}, "heads": 7, "data": 2, "zero": 3, "microbatch": 2},
    "stages": {
        "tensor": "1d_sp", "axes": {"t": 2}, "heads": 7, "pipeline": "1f1b", "stages": 2, "recompute": "full",
        "microbatch": 2,
    },
    "sequences of a microbatch": {
        "tensor": "2d_gather", "axes": {"r": 2, "c": 2}, "heads": 7, "microbatch": 3, "global_batch": 6,
        "pipeline": "1f1b", "stages": 2,
    },
    "experts": {
        "tensor": "1d_sp", "axes": {"t": 2}, "heads": 8, "data": 3, "experts_of": 3, "microbatch": 1,
        **MODELS["experts"], "experts": 5, "expert_d_ff": 11,
    },
    "norms of all heads": {
        "tensor": "1d", "axes": {"t": 2}, "heads": 5, "query_key_norm": True, "query_key_norm_over": "heads",
    },
}  # fmt: skip


def uneven(**changes) -> Config:
    c = configure(**{**SIZES, **changes})
    c.tensor.uneven = True
    return c


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name):
    c = uneven(**CASES[name])
    plan, _ = prove(c)
    assert plan.uneven_parameters and not find_unsoundness(plan)
    between = sum(moved for _, moved in pair_traffic(plan).values())
    assert between == sum(communication(plan).values()), "pairs of ranks exchange what all of them move"


def test_a_mean_that_takes_blocks_for_equal_differs(monkeypatch):
    """The negative control: a norm over heads merges the statistics of ranks as if all had as many as this one."""
    alike = lambda ops, spec, dims, over: [prod(ops.plan.block_shape(spec, ops.communicator.coordinates)[-dims:])] * 2  # noqa: E731
    monkeypatch.setattr(ParallelOps, "row_widths", alike)
    with pytest.raises(AssertionError, match=r"gradient|loss"):
        prove(uneven(**CASES["norms of all heads"]))


def test_the_static_check_knows_blocks_and_bytes():
    """A step that takes blocks for equal, and a collective that counts them so."""
    plan = make_plan(uneven(**CASES["sequences of a microbatch"]))
    name = "layers.0.mlp.down"
    forgets = with_operations(plan, "project", name, with_steps("0 0 operand", "forward", other("all_gather", cuts=())))
    counts = with_operations(plan, "project", name, lambda o: replace(
        o, collectives=tuple(replace(c, cuts=()) for c in o.collectives)
    ))  # fmt: skip
    assert "takes the 2 blocks of d_ff, of size 25, for equal ones" in find_unsoundness(forgets)[0]
    assert "elements over" in find_unsoundness(counts)[0]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_state_moves_to_other_blocks_and_back(seed):
    """Over storage and over memory, under ZeRO and without."""
    cut = uneven(tensor="1d", axes={"t": 3}, heads=5, zero=seed, data=2)
    other = uneven(tensor="1d_sp", axes={"t": 2}, heads=5)
    for configs in ([cut, other], [other, cut]):
        for c in configs:
            c.train.steps, c.model.kind = 3, "decoder"
            c.data.kind = "synthetic"
        plans.check(Random(seed), configs, [make_plan(c) for c in configs])


@pytest.mark.parametrize(("data", "t"), [(1, 8), (2, 4)])
@pytest.mark.parametrize("workers", [5, 7])
def test_all_survivors_work(data, t, workers):
    """Of 8 workers, with heads that neither number divides; without the key some are idle."""
    c = configure(tensor="1d", axes={"t": t}, data=data, heads=8, layers=1)
    assert replan(c, workers).plan.mesh.world_size < workers
    c.tensor.uneven = True
    assert replan(c, workers).plan.mesh.world_size == workers


@pytest.mark.parametrize(("changes", "line"), [
    ({"heads": 7}, "model.heads=7 is not divisible by tensor.axes.t=2"),
    ({"d_ff": 25, "heads": 8}, "model.d_ff=25 is not divisible by tensor.axes.t=2"),
])  # fmt: skip
def test_a_refusal_names_it(changes, line):
    c = uneven(tensor="1d", axes={"t": 2}, **{"d_ff": 24, **changes})
    c.tensor.uneven = False
    with pytest.raises(ValueError, match=line) as error:
        make_plan(c)
    assert "or tensor.uneven=true" in str(error.value) or "tensor.uneven=true, or" in str(error.value)

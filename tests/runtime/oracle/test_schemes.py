"""Every tensor scheme and branch choice, with data parallelism and accumulation, against one process in fp64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod

import pytest

from platform.boundary.refusals import ConfigError
from platform.plan.rule import Conversion
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import Launch
from tests.harness.oracle import MODELS, compare, configure, prove, run, serial, with_operations
from tests.harness.pairwise import cover, product
from tests.harness.replay import replay
from tests.harness.suite import suite

ROWS_COLS = {"batch": ["rows"], "heads": ["cols"], "d_ff": ["cols"], "vocab": ["cols"]}
THREE = {"batch": ["r"], "heads": ["c"], "d_ff": ["c"], "vocab": ["c"], "d_model": ["p"]}
SEQUENCE = {"length": ["rows"], "heads": ["cols"], "d_ff": ["cols"], "vocab": ["cols"]}
TWO_ON_ONE = {"batch": ["a"], "heads": ["b", "c"], "d_ff": ["b", "c"], "vocab": ["c", "b"]}
MEMORY = {"length": ["rows"], "memory_length": ["cols"], "d_ff": ["cols"], "d_kv": []}

SCHEMES = {
    "serial": ("serial", {}, None),
    "1d t2": ("1d", {"t": 2}, None),
    "1d t4": ("1d", {"t": 4}, None),
    "1d_sp t2": ("1d_sp", {"t": 2}, None),
    "1d_sp t4": ("1d_sp", {"t": 4}, None),
    "3d 1,2,4": ("3d", {"x": 1, "y": 2, "z": 4}, None),
    "3d 2,1,2": ("3d", {"x": 2, "y": 1, "z": 2}, None),
    "3d 2,1,4": ("3d", {"x": 2, "y": 1, "z": 4}, None),
    "3d 2,2,2": ("3d", {"x": 2, "y": 2, "z": 2}, None),
    "3d 1,4,1": ("3d", {"x": 1, "y": 4, "z": 1}, None),
    "3d 4,1,1": ("3d", {"x": 4, "y": 1, "z": 1}, None),
    "2d 2x2": ("2d", {"r": 2, "c": 2}, None),
    "2d 1x4": ("2d", {"r": 1, "c": 4}, None),
    "2d 4x2": ("2d", {"r": 4, "c": 2}, None),
    "2d_gather 2x2": ("2d_gather", {"r": 2, "c": 2}, None),
    "2d_gather 2x4": ("2d_gather", {"r": 2, "c": 4}, None),
    "2p5d 2,1,2": ("2p5d", {"d": 2, "r": 1, "c": 2}, None),
    "2p5d 2,2,2": ("2p5d", {"d": 2, "r": 2, "c": 2}, None),
    "3d_literal 2,1,2": ("3d_literal", {"x": 2, "y": 1, "z": 2}, None),
    "3d_literal 2,2,2": ("3d_literal", {"x": 2, "y": 2, "z": 2}, None),
    "3d_literal 1,2,4": ("3d_literal", {"x": 1, "y": 2, "z": 4}, None),
    "layout rows,cols": ("layout", {"rows": 2, "cols": 2}, ROWS_COLS),
    "layout 3 axes": ("layout", {"r": 2, "c": 2, "p": 2}, THREE),
    "layout sequence": ("layout", {"rows": 2, "cols": 2}, SEQUENCE),
    "layout two axes on heads": ("layout", {"a": 2, "b": 2, "c": 2}, TWO_ON_ONE),
    "layout memory_length": ("layout", {"rows": 2, "cols": 2}, MEMORY),
}
FACTORS = {
    "scheme": list(SCHEMES),
    "branch": [("none", {}), ("dsp", {"g": 2}), ("dsp", {"a": 2, "b": 2}), ("dsp_slice", {"g": 2})],
    "data": [1, 2],
    "microbatches": [1, 2],
    "model": ["gpt", "gpt_untied", "llama", "gqa_tied"],  # the others: test_oracle_models.py
    "dropout": [0.0, 0.2],
    "gathered": ["keep", "again"],
}
LAYERS = {"gpt_untied": 1, "gqa_tied": 1}  # where the rest of a model is what differs, one layer is enough


def build(case, **more):
    tensor, axes, rules = SCHEMES[case["scheme"]]
    branch, branch_axes = case["branch"]
    if rules and set(axes) & set(branch_axes):
        axes = {f"t_{a}": n for a, n in axes.items()}
        rules = {d: [f"t_{a}" for a in on] for d, on in rules.items()}
    c = configure(
        tensor,
        axes,
        rules=rules,
        branch=branch,
        branch_axes=branch_axes,
        data=case["data"],
        microbatch=4,
        global_batch=4 * case["data"] * case["microbatches"],
        dropout=case["dropout"],
        **{"layers": LAYERS.get(case["model"], 2), **MODELS[case["model"]], **more},
    )
    if tensor != "2d":  # whose operands come in panels
        c.tensor.gathered = case["gathered"]
    return c


def ranks(case) -> int:
    return prod([*SCHEMES[case["scheme"]][1].values(), *case["branch"][1].values(), case["data"]])


@cache
def plannable(scheme: str, branch: int, data: int) -> bool:
    """Whether the plan exists, on at most 8 ranks; the other factors do not matter for it."""
    shared = {"scheme": scheme, "branch": FACTORS["branch"][branch], "data": data}
    c = build({**shared, "microbatches": 1, "dropout": 0.0, "model": "gpt", "gathered": "keep"}, layers=1)
    if ranks(shared) > 8:
        return False
    try:
        make_plan(c)
    except ConfigError:
        return False
    return True


def legal(case) -> bool:
    if case["scheme"].startswith("2d ") and case["gathered"] == "again":
        return False
    return plannable(case["scheme"], FACTORS["branch"].index(case["branch"]), case["data"])


CASES = product(FACTORS, legal)
PLAIN = {
    "scheme": ["1d_sp t2", "3d 2,1,2", "layout rows,cols"],
    "branch": [("none", {}), ("dsp", {"g": 2})],
}
COVER = cover(CASES, plain=PLAIN, cost=lambda case: ranks(case) ** 0.5)


@suite("oracle (threads)", CASES, COVER)
def test_equals_one_process(case):
    prove(build(case))


def test_key_value_heads_fewer_than_axes():
    """kv_heads=2 on t=4: two ranks share a head, and its gradient is summed over both."""
    c = configure("1d", {"t": 4}, **MODELS["llama"])
    plan, results = run(c)
    key = next(p for p in plan.parameters if p.name.endswith("attention.key"))
    assert plan.layout(key)["kv_heads"] == ()
    compare(c, plan, results, serial(c))


def _without_backward(plan, kind):
    """The plan with one kind of operation that forgets to reduce its gradients."""

    def forget(o):
        groups = tuple(replace(g, x=Conversion(g.x.forward, ())) for g in o.groups)
        return replace(o, groups=groups)

    broken = {k: forget(o) if k[0] == kind else o for k, o in plan.operations.items()}
    return with_operations(plan, broken)


def test_negative_control_forgotten_reduction():
    """Without Megatron's f (the all-reduce of the input's gradient) the oracle must fail."""
    c = configure("1d", {"t": 2})
    plan, results = run(c, _without_backward(make_plan(c), "project"))
    with pytest.raises(AssertionError, match="gradient of|replicas of"):
        compare(c, plan, results, serial(c))


def test_negative_control_deferred_reduction():
    """Without the deferred reduction over the sequence axis, norm gradients are partial and the oracle must fail."""
    c = configure("1d_sp", {"t": 2})
    plan = make_plan(c)
    broken = replace(plan, reductions={n: () for n in plan.reductions})
    with pytest.raises(AssertionError, match="gradient of|replicas of"):
        compare(c, *run(c, broken), serial(c))


def test_negative_control_scaled_gradient():
    """A mean over branches, as DDP takes it, halves gradients: AdamW hides it, the oracle does not."""
    c = configure("serial", branch="dsp", branch_axes={"g": 2})
    plan, results = run(c)
    for r in results:
        r.gradients = {n: g / 2 if "mlp.up" in n else g for n, g in r.gradients.items()}
    with pytest.raises(AssertionError, match="gradient of"):
        compare(c, plan, results, serial(c))


def test_replay_finds_a_swapped_order():
    """Two collectives of one group in another order on one rank: gloo may forgive it, the replay does not."""
    _, results = run(configure("3d", {"x": 2, "y": 2, "z": 1}))
    logs = [list(r.log) for r in results]
    first = logs[0][0]
    other = next(i for i, x in enumerate(logs[0]) if x.group == first.group and x.elements != first.elements)
    logs[0][0], logs[0][other] = logs[0][other], logs[0][0]
    assert "rank 0 at launch 0" in replay(logs)


def test_replay_finds_a_circular_wait():
    """Every group sees one order, and yet 0 waits for 1, 1 for 2 and 2 for 0."""
    a, b, c = (Launch("all_reduce", ("t",), group, 1) for group in [(0, 1), (1, 2), (0, 2)])
    assert replay([[a, c], [b, a], [c, b]]) is not None
    assert replay([[a, c], [a, b], [c, b]]) is None

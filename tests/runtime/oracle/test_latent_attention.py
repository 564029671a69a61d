"""Multi-head latent attention, split in every way, against one process in fp64. tests/weights has transformers'."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from platform.plan.step_collectives import communication
from platform.predict.make_plan import make_plan
from tests.harness.oracle import MODELS, compare, configure, counted, prove, run, serial, with_operations
from tests.harness.pairwise import cover, product
from tests.harness.suite import suite
from tests.runtime.oracle import test_models

LATENT: dict[str, Any] = {**MODELS["latent"], "layers": 1}
KINDS: dict[str, dict[str, Any]] = {
    "queries from a latent": LATENT,
    "queries from the stream": {**LATENT, "q_latent": 0, "d_value": 0, "rope_pairs": "halves"},
    "packed, in a window": {**LATENT, "window": 5, "within_documents": True, "rope_scaling": "yarn",
                            "rope_factor": 4.0, "rope_original_length": 8, "attention_scale": 0.2},
    "both ways": {**LATENT, "kind": "encoder"},
    "experts": {**LATENT, **MODELS["experts"], "layers": 2, "dense_layers": [0], "router": "sigmoid"},
}  # fmt: skip
LAYOUTS: dict[str, dict[str, list[str]]] = {
    "latents": {"kv_latent": ["a"], "q_latent": ["a"], "heads": ["b"]},
    "one latent twice": {"kv_latent": ["a", "b"], "d_ff": ["a"]},
    "widths": {"d_kv": ["a"], "d_model": ["b"]},
    "length and latents": {"length": ["a"], "q_latent": ["b"], "kv_latent": ["b"]},
}
SCHEMES = {
    **test_models.SCHEMES,
    "2p5d": ("2p5d", {"d": 2, "r": 1, "c": 2}),
    **{name: ("layout", {"a": 2, "b": 2}) for name in LAYOUTS},
}
FACTORS = {
    "scheme": list(SCHEMES),
    "kind": list(KINDS),
    "data": [1, 2],
    "zero": [0, 1, 3],
    "recompute": ["none", "selective", "full"],
    "branch": ["none", "dsp", "dsp_slice", "dsp_csub"],
    "pipeline": ["none", "1f1b", "zb_h1"],
    "dropout": [0.0, 0.2],  # 0.2: attention by einsums
}


def legal(case) -> bool:
    g, stages = (1 if case["branch"] == "none" else 2), (1 if case["pipeline"] == "none" else 2)
    sharded = case["zero"] == 0 or (case["data"] > 1 and case["branch"] != "dsp_csub")
    ranks = case["data"] * g * stages * prod(SCHEMES[case["scheme"]][1].values())
    return ranks <= 8 and sharded and not (case["zero"] == 3 and case["pipeline"] == "zb_h1")


CASES = product(FACTORS, legal)
PLAIN = {  # the others are in every case of some plan
    "scheme": ["1d_sp", "2d", "3d", "latents"],
    "kind": ["queries from a latent", "queries from the stream"],
    "branch": ["none", "dsp"],
    "zero": [0, 3],
    "recompute": ["none", "full"],
}


def configured(scheme: str = "serial", kind: str = "queries from a latent", **more: Any):
    tensor, axes = SCHEMES[scheme]
    return configure(tensor, axes, rules=LAYOUTS.get(scheme), **{**KINDS[kind], **more})


@suite("oracle of latent attention (threads)", CASES, cover(CASES, plain=PLAIN))
def test_equals_one_process(case):
    stages = 1 if case["pipeline"] == "none" else 2
    c = configured(
        case["scheme"],
        case["kind"],
        data=case["data"],
        zero=case["zero"],
        recompute=case["recompute"],
        branch=case["branch"],
        branch_axes={} if case["branch"] == "none" else {"g": 2},
        pipeline=case["pipeline"],
        stages=stages,
        dropout=case["dropout"],
        microbatch=4 // stages,
    )
    prove(c)


def test_latents_move_in_place_of_the_stream():
    """Where t ranks share a sequence's length, they gather 12 + 20 + 4 elements of a token, not its 32 three times."""
    plan = make_plan(configured("1d_sp"))
    moved = {
        (kind, name.rpartition(".")[2]): c.elements
        for (kind, name), o in plan.operations.items()
        for c in o.collectives
        if "attention" in name and (c.op, c.phase) == ("all_gather", "forward")
    }
    tokens = 16 * 4 // 2  # of a rank
    assert moved == {
        ("project", "query_up"): tokens * 20,
        ("project", "key_up"): tokens * 12,
        ("concatenate", "key"): tokens * 4,
    }


@pytest.mark.parametrize("scheme", ["2d", "3d"])
def test_a_latent_is_a_sum_over_the_ranks_that_split_the_stream(scheme):
    plan = make_plan(configured(scheme))
    (group,) = plan.operations["project", "layers.0.attention.kv_down"].groups[:1]
    assert [s.op for s in group.x.forward] == [] and "all_reduce" in [s.op for s in group.einsums[0].output.forward]


@pytest.mark.parametrize(("scheme", "more"), [("1d_sp", {}), ("2d", {"recompute": "full"}), ("latents", {})], ids=str)
def test_in_16_bits(scheme, more):
    """Counted bytes are those of the plan, and the loss is that of fp64 to what 8 bits of a mantissa can say."""
    c = configured(scheme, precision="bf16", **more)
    plan, results = run(c)
    assert counted(results) == communication(plan)
    c.precision = "fp64"
    assert results[0].loss == pytest.approx(serial(c).loss, rel=1e-2)


def test_negative_control_a_rotary_key_of_some_heads():
    """Where its gradient is not summed over the ranks that have the other heads, the oracle must fail."""
    c = configured("1d")
    plan = make_plan(c)
    key = "concatenate", "layers.0.attention.key"
    own, shared, leave = plan.operations[key].conversions
    assert [s.op for s in shared.backward] == ["all_reduce"] and not own.backward
    broken = replace(plan.operations[key], conversions=(own, replace(shared, backward=()), leave))
    with pytest.raises(AssertionError, match="gradient of|replicas of"):
        compare(c, *run(c, with_operations(plan, {**plan.operations, key: broken})), serial(c))


def test_negative_control_a_norm_of_a_part_of_the_latent():
    """Where the norm's statistics are not merged over the ranks that split the latent, the oracle must fail."""
    c = configured("latents")
    plan = make_plan(c)
    key = "norm", "layers.0.attention.kv_latent_norm.gain"
    assert plan.operations[key].over == ("a",)
    broken = replace(plan.operations[key], over=(), collectives=())
    with pytest.raises(AssertionError):
        compare(c, *run(c, with_operations(plan, {**plan.operations, key: broken})), serial(c))

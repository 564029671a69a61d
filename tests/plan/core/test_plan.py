"""The plan of a whole model: hand-computed numbers, and what is refused or warned of."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys

import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config
from platform.plan.chunks import common_name
from platform.plan.plan import Plan
from platform.plan.plan_builder import pause_garbage_collection
from platform.plan.plan_summary import describe
from platform.plan.step_collectives import communication
from platform.predict.make_plan import make_plan
from tests.harness.oracle import configure

B, S, H, T = 4, 16, 32, 4  # sequences per microbatch, tokens, d_model, tensor ranks
BSH = B * S * H
MICROBATCHES = 2
FP32 = 4


def plan(*scheme, **more) -> Plan:
    return make_plan(configure(*scheme, **{"precision": "fp32", **more}))


def one_layer(*scheme, **more) -> dict[str, int]:
    """What one layer moves in a microbatch: the bytes of three layers without those of two."""
    three, two = (communication(plan(*scheme, layers=n, **more)) for n in (3, 2))
    return {k: (n - two[k]) // MICROBATCHES for k, n in three.items() if n != two[k]}


# Bytes by hand. All workers together: all_reduce 2(n-1) e per group, all_gather n(n-1) shards, reduce_scatter (n-1) e.


def test_megatron_reduces_four_activations_per_layer():
    """g twice forward, f twice backward: 8 (t-1)/t b s h per worker."""
    assert one_layer("1d", {"t": T}) == {"all_reduce/t": 8 * (T - 1) * BSH * FP32}


def test_sequence_parallelism_moves_the_same_in_halves():
    """Two gathers and two scatters forward, as many backward; what is new is the sum of the vectors' gradients."""
    vectors = 6 * H  # two norms' gain and bias, two output biases
    traffic = one_layer("1d_sp", {"t": T})
    assert traffic.pop("all_reduce/t") == 2 * (T - 1) * vectors * FP32 // MICROBATCHES
    assert traffic == {
        "all_gather/t": 4 * (T - 1) * BSH * FP32,
        "reduce_scatter/t": 4 * (T - 1) * BSH * FP32,
    }


def test_fsdp_gathers_weights_and_never_an_activation():
    """(n, 1, 1): each weight gathered once in the forward pass and kept, its gradient scattered."""
    weights = 12 * H * H
    vectors = 6 * H  # in blocks of d_model, gathered like the weights
    traffic = one_layer("3d", {"x": 4})
    assert set(traffic) == {"all_gather/x", "reduce_scatter/x", "all_reduce/x"}
    assert traffic["all_gather/x"] == 3 * (weights + vectors) * FP32
    assert traffic["reduce_scatter/x"] == 3 * (weights + vectors) * FP32
    assert traffic["all_reduce/x"] == 2 * 3 * (7 * H) * FP32 // MICROBATCHES  # biases without d_model: Q, K, V, up


def test_data_parallelism_reduces_every_gradient_once_a_step():
    sharded = plan(data=2)
    assert communication(sharded) == {"all_reduce/data": 2 * (sharded.parameter_count * FP32 + 2 * 8)}


def test_the_whole_table_of_one_layer_with_1d():
    """Everything: embedding and head add one all-reduce each to the layer's four, the loss adds its statistics, and
    the world sums loss and norm."""
    traffic = communication(plan("1d", {"t": T}, layers=1, vocab=64))
    tokens = B * S
    per_microbatch = (4 + 2) * BSH + (1 + 2) * tokens  # the largest logit; the sum and the label's logit
    assert traffic == {"all_reduce/t": 2 * (T - 1) * (per_microbatch * MICROBATCHES * FP32 + 2 * 8)}


def test_bf16_moves_half_and_keeps_sums_wide():
    half, full = (one_layer("1d", {"t": T}, precision=p)["all_reduce/t"] for p in ("bf16", "fp32"))
    assert half * 2 == full
    vectors = (one_layer("1d_sp", {"t": T}, precision=p)["all_reduce/t"] for p in ("bf16", "fp32"))
    assert len(set(vectors)) == 1


# Sizes and FLOPs by the closed formulas of Narayanan et al. 2021 (without recomputation).


@pytest.mark.parametrize("scheme", [(), ("1d", {"t": 4}), ("3d", {"x": 2, "y": 2, "z": 2})], ids=str)
def test_the_closed_formulas(scheme):
    layers, v = 3, 61
    planned = plan(*scheme, layers=layers, vocab=v)
    formula = 12 * layers * H**2 * (1 + 13 / (12 * H) + (v + S) / (12 * layers * H))
    assert planned.parameter_count == round(formula) + 2 * H  # and the last norm
    flops = 72 * layers * H**2 * (1 + S / (6 * H) + v / (12 * layers * H))
    assert planned.flops_per_token == pytest.approx(flops, rel=1e-12)
    assert planned.tokens_per_step == B * MICROBATCHES * S


def test_padding_is_local_only():
    padded = plan("1d", {"t": 4}, vocab=61, layers=1)
    embedding = padded.parameters[0]
    assert padded.global_shape(embedding) == (61, H) and padded.local_shape(embedding) == (16, H)
    assert [padded.locate_block(embedding, {"data": 0, "t": t})[0] for t in range(4)] == [
        (0, 16),
        (16, 16),
        (32, 16),
        (48, 16),
    ]
    assert padded.parameter_count == plan(vocab=61, layers=1).parameter_count


def test_every_collective_says_in_which_pass():
    for operation in plan("3d", {"x": 2, "y": 2, "z": 2}).operations.values():
        for c in operation.collectives:
            assert c.elements > 0 and c.phase in ("forward", "backward") and c.axes


# What cannot be.


def refused(c: Config) -> list[str]:
    with pytest.raises(ConfigError) as error:
        make_plan(c)
    return error.value.violations


def test_what_the_axes_do_not_divide():
    lines = refused(configure("1d", {"t": 3}, heads=4))
    assert len(lines) == 2  # heads and d_ff, not vocab
    heads = next(line for line in lines if line.startswith("model.heads=4 "))
    assert "tensor.axes.t=3" in heads and "tensor.axes.t=2 or 4" in heads
    assert any(line.startswith("model.d_ff=128 ") for line in lines)
    too_small = refused(configure("3d", {"x": 8}))
    assert len(too_small) == 1 and too_small[0].startswith("train.microbatch=4 ")
    assert "train.microbatch=8" in too_small[0] and "tensor.axes.x=4" in too_small[0]


def test_a_branch_axis_is_named_by_its_key():
    (line,) = refused(configure("1d", {"t": 2}, branch="dsp", branch_axes={"g": 8}, microbatch=8))
    assert "model.heads=8" in line and "branch.axes.g=8 x tensor.axes.t=2" in line and "branch.axes.g=4" in line


@pytest.mark.parametrize("vocab", [1, 7, 61, 64])
@pytest.mark.parametrize("scheme", [("1d", {"t": 4}), ("1d_sp", {"t": 8}), ("3d", {"x": 1, "y": 4, "z": 2})], ids=str)
def test_vocab_is_never_refused(scheme, vocab):
    assert plan(*scheme, vocab=vocab).sizes["vocab"] == vocab


def test_an_illegal_layout_names_axis_and_dims():
    lines = refused(configure("layout", {"cols": 2}, rules={"heads": ["cols"], "d_kv": ["cols"]}))
    assert any("axis cols" in line and "heads" in line and "d_kv" in line for line in lines), lines
    assert all("tensor: illegal layout" in line for line in lines)


def test_all_violations_at_once():
    rules = {"heads": ["c"], "d_ff": ["c"], "batch": ["r", "c"], "length": ["r"]}
    lines = refused(configure("layout", {"r": 3, "c": 5}, rules=rules))
    for what in ("axis r ", "axis c ", "model.heads=8", "model.d_ff=128", "train.microbatch=4", "model.length=16"):
        assert any(what in line for line in lines), (what, lines)
    assert len(set(lines)) == len(lines)


def test_the_last_microbatch_may_be_partial():
    plan = make_plan(configure(data=3, microbatch=2, global_batch=8))
    assert (plan.microbatches, plan.sequences, plan.tokens_per_step) == (2, 8, 8 * plan.sizes["length"])
    c = configure("1d", {"t": 2})
    c.parallel.data = -1
    with pytest.raises(ConfigError, match="parallel.data=-1: 3 workers, no multiple of 2"):
        make_plan(c, workers=3)
    assert make_plan(c, workers=4).mesh.axes == {"stage": 1, "data": 2, "t": 2}


def test_repeated_work_is_warned_of():
    assert plan("1d", {"t": 2}).warnings == ()
    assert plan("3d", {"x": 2, "y": 2, "z": 2}, branch="dsp", branch_axes={"g": 2}, microbatch=8).warnings == ()
    (mlp,) = plan("layout", {"cols": 2}, rules={"heads": ["cols"], "vocab": ["cols"]}).warnings
    assert "axes cols split no dim of mlp.up, mlp.down: computed 2 times over" in mlp
    assert "warning" in describe(plan("layout", {"cols": 2}, rules={}))


# The same everywhere, at once, without anything heavy.

SCRIPT = """
import json, sys
from platform.launch import compose_config
from platform.plan.plan_data import encode_plan, plan_digest
from platform.predict.make_plan import make_plan
plan = make_plan(compose_config(sys.argv[1:]))
print(json.dumps([encode_plan(plan), plan_digest(plan)]))
assert not {"torch", "ray", "wandb"} & set(sys.modules)
"""


def made_elsewhere(hash_seed: int, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        "+experiment=gpt175b",
        pytest.param(
            "+experiment=gpt175b model=gpt_1t tensor=3d tensor.axes={x:2,y:2,z:2} branch=dsp branch.axes.g=2"
            " train.microbatch=4 parallel.data=2 model.dropout=0.1",
            marks=pytest.mark.full,
        ),
    ],
    ids=["gpt175b", "gpt1t 3d dsp"],
)
def test_every_process_makes_the_same_plan(arguments):
    one, other = (made_elsewhere(seed, *arguments.split()) for seed in (1, 2))
    assert one == other
    whole, _ = json.loads(one)
    assert len(whole["chunks"]) == 48 or len(whole["parameters"]) > 96


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["layers.3.mlp.up", "layers.3.mlp.down", "layers.3.norm.gain"], "layers.3"),
        (["decoder.layers.10.cross.query"], "decoder.layers.10"),
        (["embedding", "position"], "embedding, position"),
        (["norm.gain", "norm.bias", "head"], "norm, head"),
        (["embedding", "layers.0.mlp.up", "layers.1.mlp.up"], "embedding ... layers.1"),
        ([], ""),
    ],
)
def test_a_bucket_has_a_short_name(names, short):
    assert common_name(names) == short


def test_what_is_exempt_from_garbage_collection_stays_so():
    """As the tests of this suite are, by tests/conftest.py: each look at all of them takes seconds."""
    exempt = gc.get_freeze_count()
    with pause_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() == exempt > 10_000

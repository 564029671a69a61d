"""Words of published families (where norms stand, what of a head rotates, factors, ...) under every kind of plan,
against one process in fp64."""

from __future__ import annotations

from typing import Any

import pytest

from platform.model import attention
from platform.plan.model_types import Parameter
from platform.plan.operations.scaling import MultiplyByOp, NormaliseOp, ScaleByOp
from platform.runtime import compilation
from tests.harness.oracle import compare, configure, prove, run, serial
from tests.runtime import test_memory

LLAMA: dict[str, Any] = {"kv_heads": 2, "norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "bias": False,
                         "tied": False}  # fmt: skip
WORDS: dict[str, dict[str, Any]] = {
    "norms of outputs": {"input_norm": False, "output_norm": True, "query_key_norm": True,
                         "query_key_norm_over": "heads"},
    "a part rotates": {"d_kv": 8, "rope_share": 0.5, "rope_scaling": "longrope", "rope_factor": 4.0,
                       "rope_original_length": 8, "rope_short": [1.0, 1.5], "rope_long": [1.0, 3.0]},
    "around a layer": {"norm": "rmsnorm_centred", "output_norm": True, "query_key_norm": True, "embedding_scale": 5.0,
                       "residual_scale": 0.5, "window": 5, "window_layers": [0], "window_rope_theta": 50.0,
                       "rope_scaling": "linear", "rope_factor": 2.0},
    "no rotations": {"no_rope_layers": [1], "norm": "rmsnorm_centred", "rope_scaling": "dynamic", "rope_factor": 2.0,
                     "rope_original_length": 8, "within_documents": True},
    "soft caps": {"attention_cap": 0.02, "logit_cap": 0.3, "window": 5, "window_layers": [0], "head_bias": True},
    "side by side": {"parallel_residual": True, "rope_share": 0.5, "bias": True, "norm": "layernorm", "tied": True,
                     "d_kv": 8},
    "other heads see all": {"window": 5, "window_layers": [0], "window_rope_theta": 50.0, "d_kv": 4, "global_d_kv": 8,
                            "global_kv_heads": 1, "values_are_keys": True, "value_norm": True, "query_key_norm": True,
                            "rope_scaling": "proportional", "rope_share": 0.5, "attention_scale": 1.0,
                            "stored_scale": True},
    "experts beside": {"experts": 4, "experts_per_token": 2, "expert_d_ff": 8, "shared_experts": 1, "shared_d_ff": 24,
                       "expert_norms": True, "expert_factors": True, "capacity_factor": 0.0, "output_norm": True},
}  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    "2d": {"tensor": "2d", "axes": {"r": 2, "c": 2}},
    "1d_sp, stages": {"tensor": "1d_sp", "axes": {"t": 2}, "pipeline": "1f1b", "stages": 2, "recompute": "full"},
    "ring": {"context": 2, "context_kind": "ring", "data": 2, "zero": 3, "global_batch": 16},
    "dsp": {"branch": "dsp", "branch_axes": {"g": 2}, "microbatch": 4},
    "3d": {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 2}},
}
CASES = [(words, plan) for i, words in enumerate(WORDS) for plan in [*PLANS][i % 4 :] + [*PLANS][: i % 4]]
FIRST = CASES[:: len(PLANS)]  # each words under one plan, each plan with some


@pytest.fixture(autouse=True)
def factors_that_matter(monkeypatch):
    """Stored factors begin at 1 in new models."""

    def declare(name, dims, role, *more, **options):
        options |= {"init": "normal", "std": 1.0} if role == "factor" else {}
        return Parameter(name, dims, role, *(more if role != "factor" else ()), **options)

    monkeypatch.setattr(attention, "Parameter", declare)


@pytest.mark.parametrize(
    ("words", "plan"), [case if case in FIRST else pytest.param(*case, marks=pytest.mark.full) for case in CASES]
)
def test_equals_one_process(words, plan):
    prove(configure(**{**LLAMA, **WORDS[words], **PLANS[plan]}))


@pytest.mark.parametrize(
    ("words", "op"),
    [("other heads see all", ScaleByOp), ("other heads see all", NormaliseOp), ("experts beside", MultiplyByOp)],
)
def test_negative_control_an_operation_that_several_ranks_leave_out(words, op, monkeypatch):
    compute = op.run_on_blocks

    def leave_out(self, ops, planned, *arguments):
        alone = ops.plan.mesh.world_size == 1
        return compute(self, ops, planned, *arguments) if alone else arguments[isinstance(arguments[0], str)]

    monkeypatch.setattr(op, "run_on_blocks", leave_out)
    with pytest.raises(AssertionError, match="gradient of"):
        prove(configure(**{**LLAMA, **WORDS[words], **PLANS["1d_sp, stages"]}))


@pytest.mark.parametrize("words", WORDS)
def test_what_is_kept_for_the_backward_pass_is_metered(words, monkeypatch):
    monkeypatch.setitem(test_memory.MODELS, "words", {**LLAMA, **WORDS[words]})
    test_memory.test_saved_for_backward(("1d_sp", {"t": 2}, "words"))
    if WORDS[words].get("norm") != "layernorm":
        test_memory.test_bytes_in_16_bits("3d", {"x": 1, "y": 2, "z": 2}, "words")


@pytest.mark.full
@pytest.mark.parametrize("words", WORDS)
def test_compiled_blocks_equal_one_process(words, monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    c = configure(**{**LLAMA, **WORDS[words]})
    c.train.compile = "on"
    compare(c, *run(c), serial(c))

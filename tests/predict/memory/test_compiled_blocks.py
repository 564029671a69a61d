"""What compiled blocks keep for their backward pass is what the meter says: as torch traces them, for every preset."""

from __future__ import annotations

import gc
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from platform.launch import CONF, compose_config
from platform.model import build_model
from platform.plan.step_collectives import compiles_whole_blocks, resolve_auto_kernels
from platform.predict.footprint import measure_passes
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_footprints, predict_peak_bytes
from platform.predict.meter import MemoryMeter
from platform.runtime import compiled_blocks, parallel_ops
from platform.runtime.communicator import SingleRank
from platform.runtime.compiled_blocks import CompiledBlock, compile_block
from platform.runtime.pipeline import StageFailed
from tests.harness.card import alone, shrunk
from tests.harness.one_attention import OneAttention
from tests.harness.oracle import MODELS, configure, trainer_of

PRESETS = {path.stem for path in (CONF / "model").glob("*.yaml")} - {"from_hf", "two_layer"}  # which has no blocks
OTHERS = {
    "cube_bert", "deepseek_v2_lite", "gpt_oss_120b", "gpt_oss_20b", "mixtral_8x7b", "olmoe_7b", "qwen3_235b_a22b",
    "t5_large_mod", "t5_tiny", "transformer_base",
}  # fmt: skip
DENSE = PRESETS - OTHERS  # of deepseek_v3, its first layers
SHORT = {"gpt2_124m", "llama_8b", "mixtral_8x7b"}


def presets(names):
    return [pytest.param(n, marks=() if n in SHORT else pytest.mark.full) for n in sorted(names)]


def configured(preset: str):
    return shrunk(
        compose_config(["+experiment=one_gpu", f"model={preset}", "train.microbatch=1", "monitor.sample=0",
                        "train.compile=on", "cluster.device=cuda"])
    )  # fmt: skip


def first_block(c) -> CompiledBlock | None:
    """The first block that a step on a GPU would trace, which ends the step; None if it traces none."""
    traced = []

    def trace(*arguments):
        traced.append(compile_block(*arguments))
        raise InterruptedError

    compiled_blocks._split_graph.cache_clear()
    with pytest.MonkeyPatch.context() as patch, suppress(StageFailed):
        patch.setattr(parallel_ops, "compile_block", trace)
        patch.setattr(parallel_ops, "compile_region", lambda function: function)
        with alone(c, 0, []) as trainer, OneAttention():
            trainer.step(1)
    compiled_blocks._split_graph.cache_clear()
    return traced[0] if traced else None


def kept_bytes(block: CompiledBlock) -> int:
    """The bytes that a block keeps, each piece of memory once, beside parameters and what all passes share."""
    forward = block.functions.forward.graph.graph
    arguments, (_, *results) = forward.find_nodes(op="placeholder"), forward.output_node().args[0]
    count = len(arguments) - len(block.tensors)
    values = [*results, *(arguments[i] for i in block.functions.kept if i < count)]
    storages = [value.meta["val"].untyped_storage() for value in values]  # of which views share one
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def metered_bytes(c, compiles: str) -> int:
    """The bytes that one layer more keeps, by the meter; without attention's statistic of a row, which OneAttention has
    not."""

    def kept(layers: int) -> int:
        deep = replace(c, model=replace(c.model, layers=layers))
        plan = resolve_auto_kernels(make_plan(deep), "cuda", 0.0)
        meter = MemoryMeter(plan, 0.0, plan.mesh.rank_coordinates(0), "cuda", compiles=compiles)
        return measure_passes(meter, build_model(deep.model), plan.chunks[0], splits_weight_gradients=False).kept

    return kept(2) - kept(1) - 4 * c.model.heads * c.model.length


@pytest.mark.parametrize("preset", presets(DENSE))
def test_a_block_keeps_what_the_meter_says(preset):
    c = configured(preset)
    assert metered_bytes(c, "blocks") == pytest.approx(kept_bytes(first_block(c)), rel=0.02)


@pytest.mark.full
@pytest.mark.parametrize("activation", ["relu", "reglu", "silu", "geglu", "swiglu_clamped"])
def test_so_it_is_of_every_activation(activation):
    """ReLU keeps which elements pass beside them."""
    c = configured("gpt_tiny")
    c.model.activation = activation
    assert metered_bytes(c, "blocks") == pytest.approx(kept_bytes(first_block(c)), rel=0.02)


@pytest.mark.parametrize("preset", presets(OTHERS))
def test_other_blocks_are_not_one_function(preset):
    """And the plan knows it: experts, padding, dropout."""
    c = configured(preset)
    plan = make_plan(c)
    assert not compiles_whole_blocks(plan, "cuda", c.model.dropout, splits_weight_gradients=False)
    assert first_block(c) is None


def test_negative_control_an_eager_meter():
    """Which makes inputs of products again, as no whole block does: its numbers are another block's."""
    c = configured("llama_8b")
    assert metered_bytes(c, "") == metered_bytes(c, "functions") < 0.7 * metered_bytes(c, "blocks")


H100 = ["+experiment=one_gpu", "cluster=processes", "cluster.device=cuda", "cluster.gpu=H100-80GB"]
LLAMA = [*H100, "model=llama_8b", "parallel.data=8", "parallel.zero=3", "train.global_batch=16", "train.microbatch=1"]


def test_llama_8b_fits_eight_h100():
    def needed(*more: str) -> float:
        c = compose_config([*LLAMA, *more])
        return predict_peak_bytes(c, make_plan(c))

    assert needed("train.compile=off") < needed() < 70e9
    assert needed("monitor.layers=10") >= needed()


SMALL = {"layers": 4, "d_model": 64, "length": 256, "vocab": 64, "heads": 4, "global_batch": 8}
LATENT = {**MODELS["latent"], "d_kv": 20, "d_rope": 8, "d_value": 12, "kv_latent": 24, "q_latent": 32}
COUNTED = {
    "gpt": {},
    "llama": {**MODELS["llama"], "d_ff": 192},
    "llama, bf16": {**MODELS["llama"], "d_ff": 192, "precision": "bf16"},
    "llama, full, bf16": {**MODELS["llama"], "d_ff": 192, "precision": "bf16", "recompute": "full", "layers": 8},
    "latent, bf16": {**LATENT, "precision": "bf16"},
    "functions of T5, bf16": {**MODELS["t5"], "length": 64, "source_length": 64, "precision": "bf16"},
    "functions with dropout": {"dropout": 0.1, "length": 64},
    "functions of experts": {**MODELS["llama"], **MODELS["experts"], "expert_d_ff": 128, "layers": 2, "length": 64},
}


@pytest.mark.full
@pytest.mark.parametrize("name", COUNTED)
def test_what_is_needed_is_what_compiled_code_allocates(name):
    """Of a step beside parameters and optimizer, by torch, with kernels of its compiler, which
    uses some memory again that the meter counts twice."""
    c = configure(**{"precision": "fp32", **SMALL, **COUNTED[name]})
    c.train.compile = "on"
    plan = make_plan(c)
    [planned] = predict_footprints(c, plan)
    step = planned.total_bytes - planned.parameters - planned.optimizer
    assert -0.05 < (step - allocated(c, plan)) / planned.total_bytes < 0.1


def allocated(c, plan) -> int:
    trainer = trainer_of(c, plan, SingleRank(plan.mesh))
    for step in (1, 2):
        trainer.step(step)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        trainer.step(3)
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert torch.is_grad_enabled() and peak
    return peak

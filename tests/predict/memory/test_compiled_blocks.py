"""What compiled blocks keep for their backward pass is what the meter says: as torch traces them, for every preset."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._functorch import partitioners
from torch.profiler import ProfilerActivity, profile

from platform.launch import CONF, compose_config
from platform.model import build_model
from platform.model.attention import has_experts
from platform.plan.step_collectives import count_kernels, resolve_auto_kernels
from platform.plan.whole_blocks import reasons_against_whole_blocks
from platform.predict.footprint import measure_passes
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_footprints, predict_peak_bytes
from platform.predict.meter import MemoryMeter
from platform.runtime import chunked_loss, compiled_blocks, einsum, parallel_ops, recompute
from platform.runtime.communicator import SingleRank
from platform.runtime.compiled_blocks import CompiledBlock, compile_block, compile_block_with_own_backward
from tests.harness.card import alone, shrunk
from tests.harness.one_attention import OneAttention
from tests.harness.oracle import MODELS, configure, trainer_of

PRESETS = {path.stem for path in (CONF / "model").glob("*.yaml")} - {"from_hf", "two_layer"}  # which has no blocks
EXPERTS = {"deepseek_v2_lite", "gpt_oss_120b", "gpt_oss_20b", "mixtral_8x7b", "olmoe_7b", "qwen3_235b_a22b"}
DENSE = PRESETS - EXPERTS  # of deepseek_v3, its first layers
APART = ("llama_8b", "cube_bert", "deepseek_v3")  # in which no product lies outside of blocks
SHORT = {"gpt2_124m", "llama_8b", "mixtral_8x7b", "transformer_base"}


def presets(names):
    return [pytest.param(n, marks=() if n in SHORT else pytest.mark.full) for n in sorted(names)]


def configured(preset: str, *more: str):
    """A model of one layer, or of one in each stack."""
    c = shrunk(
        compose_config(["+experiment=one_gpu", f"model={preset}", "train.microbatch=1", "monitor.sample=0",
                        "train.compile=on", "cluster.device=cuda", *more])
    )  # fmt: skip
    c.model.layers, c.model.predict_ahead = 1, 0
    return c


def forget_graphs() -> None:
    compiled_blocks._split_graph.cache_clear()
    compiled_blocks._partition_graph.cache_clear()


def traced_blocks(c) -> list[CompiledBlock | None]:
    """What becomes of the blocks that a step on a GPU would trace."""
    traced: list[CompiledBlock | None] = []

    def trace(compile_one, *arguments):
        traced.append(compile_one(*arguments))
        return traced[-1]

    forget_graphs()
    with pytest.MonkeyPatch.context() as patch:
        for compile_one in (compile_block, compile_block_with_own_backward):
            patch.setattr(parallel_ops, compile_one.__name__, partial(trace, compile_one))
        patch.setattr(parallel_ops, "compile_region", lambda function: function)
        with alone(c, 0, []) as trainer, OneAttention():
            trainer.step(1)
    forget_graphs()
    return traced


def pending_bytes(*blocks: CompiledBlock | None) -> int:
    """The bytes that blocks keep for the gradients of their weights, where these are computed later."""
    storages = []
    for block in filter(None, blocks):
        whole, parts = block.functions, block.functions.apart
        graph, parameters = parts.input_gradients.graph.graph, [i >= whole.count for i in whole.kept]
        arguments, results = graph.find_nodes(op="placeholder"), graph.output_node().args[0]
        kept = [arguments[i] for i in parts.kept if i >= len(parameters) or not parameters[i]]
        storages += [value.meta["val"].untyped_storage() for value in (*kept, *results[len(parts.early) :])]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def kept_bytes(*blocks: CompiledBlock | None) -> int:
    """The bytes that blocks keep, each piece of memory once, beside parameters and what all passes share."""
    storages = []
    for block in filter(None, blocks):
        forward = block.functions.forward.graph.graph
        arguments, results = forward.find_nodes(op="placeholder"), forward.output_node().args[0]
        count = len(arguments) - len(block.tensors)
        values = [*results[block.functions.outputs :], *(arguments[i] for i in block.functions.kept if i < count)]
        storages += [value.meta["val"].untyped_storage() for value in values]  # of which views share one
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def metered_bytes(c, compiles: str, *, pending: bool = False) -> int:
    """The bytes that one layer more keeps, by the meter; without the statistic of a row that a kernel of attention has,
    but not OneAttention. `pending`: those that are left when its weights' gradients alone are."""
    rate = c.model.dropout

    def kept(layers: int) -> tuple[int, int]:
        deep = replace(c, model=replace(c.model, layers=layers))
        plan = resolve_auto_kernels(make_plan(deep), "cuda", rate)
        meter = MemoryMeter(plan, rate, plan.mesh.rank_coordinates(0), "cuda", compiles=compiles)
        passes = measure_passes(meter, build_model(deep.model), plan.chunks[0], splits_weight_gradients=pending)
        return (passes.pending, 0) if pending else (passes.kept, sum(count_kernels(plan).values()))

    (most, kernels), (least, fewer) = kept(2), kept(1)
    return most - least - (kernels - fewer) * 4 * c.model.heads * c.model.length


@pytest.mark.parametrize("preset", presets(DENSE))
def test_a_block_keeps_what_the_meter_says(preset):
    c = configured(preset)
    assert metered_bytes(c, "blocks") == pytest.approx(kept_bytes(*traced_blocks(c)), rel=0.02)


@pytest.mark.parametrize("preset", presets(DENSE))
def test_a_block_with_its_own_backward_pass_keeps_as_much(preset, monkeypatch):
    """As blocks with collectives are traced, here without any; of attention without a kernel, less: one matrix of
    probabilities of two."""
    monkeypatch.setattr(parallel_ops, "find_blocks_with_own_backward", find_all_blocks)
    c = configured(preset)
    assert 0.98 < metered_bytes(c, "blocks") / kept_bytes(*traced_blocks(c)) < 1.15


def find_all_blocks(plan) -> set[str]:
    return {name for chunk in plan.chunks for name, _ in chunk.blocks}


def test_negative_control_a_gate_that_is_written_in_place(monkeypatch):
    """A block keeps what it cannot make again: a quarter more."""
    monkeypatch.setattr(parallel_ops, "find_blocks_with_own_backward", find_all_blocks)
    monkeypatch.setattr(recompute, "get_proxy_mode", lambda: None)
    c = configured("llama_8b")
    assert kept_bytes(*traced_blocks(c)) > 1.2 * metered_bytes(c, "blocks")


@pytest.mark.parametrize("scale", ["block", *(pytest.param(s, marks=pytest.mark.full) for s in ("row", "tensor"))])
@pytest.mark.parametrize("preset", ["gpt2_124m", "llama_8b"])
def test_products_in_8_bits_keep_their_operands(preset, scale):
    """Once each, and round them again: neither the 8 bits nor the numbers that these stand for are kept."""
    c = configured(preset, "precision=fp8", f"quantise.scale={scale}")
    blocks = traced_blocks(c)
    assert blocks and all(blocks)
    assert metered_bytes(c, "blocks") == pytest.approx(kept_bytes(*blocks), rel=0.02)


def test_negative_control_rounded_numbers_that_are_kept(monkeypatch):
    c = configured("llama_8b", "precision=fp8")
    monkeypatch.setattr(partitioners, "must_recompute", lambda node: False)
    assert kept_bytes(*traced_blocks(c)) > 1.3 * metered_bytes(c, "blocks")


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(["model.dropout=0.1"], marks=pytest.mark.full),
        ["model.dropout=0.1", "model.fused_dropout=true"],
        ["data.document_mask=true"],
        pytest.param(["data.document_mask=true", "model.dropout=0.1"], marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_masks_are_drawn_again_and_shared(more):
    """Dropout keeps nothing but the probabilities; the mask of documents is the pass's."""
    c = configured("gpt2_124m", *more)
    assert metered_bytes(c, "blocks") == pytest.approx(kept_bytes(*traced_blocks(c)), rel=0.02)


@pytest.mark.parametrize(
    "more",
    [
        ["model=llama_8b", "tune=lora"],
        pytest.param(["model=gpt2_124m", "tune=lora", "tune.dropout=0.1"], marks=pytest.mark.full),
        pytest.param(["model=gpt2_124m", "train.freeze=[layers.*]"], marks=pytest.mark.full),
        ["model=llama_8b", "train.freeze=['*.mlp.*', '*.attention.*']"],
        pytest.param(["model=llama_8b", "train.freeze=[layers.*.query, '*.gate']"], marks=pytest.mark.full),
        pytest.param(["model=transformer_base", "train.freeze=['*norm*', '*bias']"], marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_of_frozen_products_no_inputs_are_kept(more):
    """Which are those of adapters too, and of norms."""
    model, *others = more
    c = configured(model.removeprefix("model="), *others)
    blocks = traced_blocks(c)
    assert blocks and all(blocks)
    assert metered_bytes(c, "blocks") == pytest.approx(kept_bytes(*blocks), rel=0.02)


@pytest.mark.parametrize("preset", ["gpt2_124m", *(pytest.param(n, marks=pytest.mark.full) for n in APART)])
def test_weight_gradients_left_for_later_keep_what_the_meter_says(preset):
    c = configured(preset)
    assert metered_bytes(c, "blocks", pending=True) == pytest.approx(pending_bytes(*traced_blocks(c)), rel=0.02)


CAPACITY, CHUNKS = "model.capacity_factor=1.25", "train.mlp_chunks=4"
OWN = [
    ("mixtral_8x7b", CAPACITY),
    ("llama_8b", CHUNKS),
    *((name, CAPACITY) for name in sorted(EXPERTS - {"mixtral_8x7b", "gpt_oss_20b", "gpt_oss_120b"})),
    ("gpt2_124m", CHUNKS),
    ("deepseek_v2_lite", CAPACITY, CHUNKS),
    ("gpt2_124m", CHUNKS, "model.dropout=0.1"),
]


@pytest.mark.parametrize("how", [pytest.param(h, marks=pytest.mark.full if i > 1 else ()) for i, h in enumerate(OWN)])
def test_of_its_own_backward_pass_a_block_keeps_what_the_meter_says(how):
    """Experts keep their slots, or the rows that tokens have there, which are fewer, and not what their router reads in
    the type of statistics; chunks no hidden rows."""
    c = configured(*how)
    c.model.dense_layers = []
    blocks = traced_blocks(c)
    assert all(blocks) and -0.02 < metered_bytes(c, "blocks") / kept_bytes(*blocks) - 1 < 0.06


@pytest.mark.parametrize("how", OWN[:2])
def test_negative_control_rows_that_are_not_read_again(how, monkeypatch):
    """The compiler then keeps what a backward pass computes from them again."""
    for module in (chunked_loss, einsum):
        monkeypatch.setattr(module, "read_again", lambda x, after: x)
    c = configured(*how)
    assert metered_bytes(c, "blocks") < 0.98 * kept_bytes(*traced_blocks(c))


@pytest.mark.full
@pytest.mark.parametrize("activation", ["relu", "reglu", "silu", "geglu", "swiglu_clamped"])
def test_so_it_is_of_every_activation(activation):
    """ReLU keeps which elements pass beside them."""
    c = configured("gpt_tiny")
    c.model.activation = activation
    assert metered_bytes(c, "blocks") == pytest.approx(kept_bytes(*traced_blocks(c)), rel=0.02)


@pytest.mark.parametrize("preset", presets(EXPERTS))
def test_blocks_of_experts_without_a_capacity_are_not_one_function(preset):
    """And the plan knows it, block by block."""
    c = configured(preset)
    c.model.layers = 2
    reasons = reasons_against_whole_blocks(make_plan(c), "cuda", c.model.dropout)
    rows = not c.model.capacity_factor
    assert list(map(bool, reasons.values())) == [rows and has_experts(c.model, i) for i in range(2)]
    assert len(traced_blocks(c)) == list(reasons.values()).count("")


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
    "experts": {**MODELS["llama"], **MODELS["experts"], "expert_d_ff": 128, "layers": 2, "length": 64},
    "functions of experts": {
        **MODELS["llama"],
        **MODELS["experts"],
        "expert_d_ff": 128,
        "layers": 2,
        "length": 64,
        "capacity_factor": 0.0,
    },
    "in chunks": {**MODELS["llama"], "d_ff": 512, "mlp_chunks": 8},
}


@pytest.mark.full
@pytest.mark.parametrize("name", COUNTED)
def test_what_is_needed_is_what_compiled_code_allocates(name):
    """Of a step beside parameters and optimizer, by torch, with kernels of its compiler, which uses some memory again
    that the meter counts twice, and writes sums over chunks anew."""
    c = configure(**{"precision": "fp32", **SMALL, **COUNTED[name]})
    c.train.compile = "on"
    plan = make_plan(c)
    [planned] = predict_footprints(c, plan)
    step = planned.total_bytes - planned.parameters - planned.optimizer
    assert (-0.1 if plan.mlp_chunks > 1 else -0.05) < (step - allocated(c, plan)) / planned.total_bytes < 0.1


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

"""What a plan needs is what its workers hold, counted storage by storage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from platform.optimizer.optimizers import OPTIMIZERS
from platform.plan.chunks import ADDS_WIDE
from platform.plan.operation_plan import JOINS_GRADIENTS
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_footprints, predict_peak_bytes
from tests.harness.live import count
from tests.harness.oracle import MODELS, configure
from tests.harness.routing import to_the_first
from tests.harness.wide_sums import kernels_on_cpus
from tests.runtime.oracle.test_delta_rule import NEXT

MODEL: dict[str, Any] = {"layers": 3, "d_model": 64, "length": 32, "vocab": 256, "heads": 4, "precision": "fp32"}
STAGES: dict[str, Any] = {"stages": 2, "microbatch": 2, "global_batch": 16, "layers": 4}
PLANS: dict[str, dict[str, Any]] = {
    "serial": {},
    "serial, bf16, one microbatch": {"precision": "bf16", "microbatch": 8},
    "1d": {"tensor": "1d", "axes": {"t": 2}},
    "1d_sp, bf16": {"tensor": "1d_sp", "axes": {"t": 2}, "precision": "bf16"},
    "1d_sp, asynchronous": {"tensor": "1d_sp", "axes": {"t": 2}, "async_products": "on"},
    "1d_sp, asynchronous, llama, bf16": {**MODELS["llama"], "tensor": "1d_sp", "axes": {"t": 2}, "layers": 3,
                                         "async_products": "on", "precision": "bf16"},
    "2d": {"tensor": "2d", "axes": {"r": 2, "c": 2}},
    "3d": {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 1}},
    "2d_gather, again": {"tensor": "2d_gather", "axes": {"r": 2, "c": 2}, "gathered": "again"},
    "fsdp, again": {"tensor": "3d", "axes": {"x": 4, "y": 1, "z": 1}, "gathered": "again", "global_batch": 4,
                    "length": 8},
    "dsp": {"branch": "dsp", "branch_axes": {"g": 2}, **MODELS["t5"], "layers": 2},
    "1f1b": {"pipeline": "1f1b", **STAGES},
    "interleaved, bf16": {"pipeline": "interleaved", "chunks": 2, **STAGES, "precision": "bf16"},
    "zb_h1, 1d": {"pipeline": "zb_h1", **STAGES, "tensor": "1d", "axes": {"t": 2}},
    "zb_h1, zero 2, bf16": {"pipeline": "zb_h1", **STAGES, "data": 2, "zero": 2, "microbatch": 4, "precision": "bf16"},
    "zero 1, bf16": {"data": 2, "zero": 1, "microbatch": 2, "precision": "bf16"},
    "zero 3": {"data": 2, "zero": 3, "microbatch": 2},
    "zero 3, blocks together": {"data": 2, "zero": 3, "microbatch": 2, "bucket_mib": 1, "layers": 8},
    "zero 3, blocks together, full, bf16": {"data": 2, "zero": 3, "microbatch": 2, "bucket_mib": 1, "layers": 8,
                                            "recompute": "full", "precision": "bf16"},
    "zero 2, block by block, bf16": {"data": 2, "zero": 2, "microbatch": 2, "bucket_mib": 0, "precision": "bf16"},
    "zero 1, block by block": {"data": 2, "zero": 1, "microbatch": 2, "bucket_mib": 0},
    "selective, bf16": {"tensor": "1d_sp", "axes": {"t": 2}, "recompute": "selective", "dropout": 0.1,
                        "precision": "bf16"},
    "full, offloaded": {"recompute": "full", "offload": True, "layers": 4},
    "full, offloaded, 1d, 1f1b, bf16": {"tensor": "1d", "axes": {"t": 2}, "recompute": "full", "offload": True,
                                        "pipeline": "1f1b", **STAGES, "precision": "bf16"},
    "feed-forward in chunks": {"d_ff": 512, "vocab": 64, "mlp_chunks": 8},
    "feed-forward in chunks, full, bf16": {**MODELS["llama"], "d_ff": 512, "vocab": 64, "mlp_chunks": 8,
                                           "recompute": "full", "precision": "bf16"},
    "feed-forward in chunks, zb_h1, 1d": {"pipeline": "zb_h1", **STAGES, "tensor": "1d", "axes": {"t": 2},
                                          "d_ff": 512, "mlp_chunks": 3},
    "full, 1d": {"tensor": "1d", "axes": {"t": 2}, "recompute": "full", "vocab": 64},
    "a window of a long sequence": {"length": 2048, "window": 128, "heads": 2, "layers": 2, "global_batch": 4},
    "soft caps": {"length": 512, "attention_cap": 1.0, "logit_cap": 1.0, "layers": 2},
    "soft caps, bf16, documents": {"length": 512, "attention_cap": 1.0, "logit_cap": 1.0, "precision": "bf16",
                                   "layers": 2, "within_documents": True},
    "delta rules": {**NEXT, "length": 160, "layers": 2},
    "delta rules, bf16, 1d": {**NEXT, "length": 160, "layers": 2, "precision": "bf16", "tensor": "1d",
                              "axes": {"t": 2}},
    "sinks, bf16": {"length": 512, "attention_sinks": True, "precision": "bf16", "layers": 2},
    "sinks and a window, 1d": {"length": 512, "window": 64, "attention_sinks": True, "tensor": "1d", "axes": {"t": 2}},
}  # fmt: skip
SMALL: dict[str, Any] = {"vocab": 512, "length": 8, "layers": 2}  # the norm of the gradient takes most of it
PLANS |= {
    "small, 1d": {**SMALL, "tensor": "1d", "axes": {"t": 2}},
    "smaller, 1d": {**SMALL, "tensor": "1d", "axes": {"t": 2}, "d_model": 56},
    "small, stages": {**SMALL, "pipeline": "1f1b", "stages": 2, "microbatch": 2},
    "small, zero": {**SMALL, "data": 2, "zero": 1, "microbatch": 2},
    "tiny": {"vocab": 64, "length": 16, "d_model": 8},
}
ROUTED: dict[str, Any] = {**MODELS["experts"], "expert_d_ff": 128, "layers": 2}
PLANS |= {
    "experts": ROUTED,
    "experts, bf16": {**ROUTED, "precision": "bf16", "microbatch": 8},
    "experts of two replicas": {**ROUTED, "data": 2, "experts_of": 2, "microbatch": 2},
    "experts of two replicas, 1d_sp, bf16": {**ROUTED, "data": 2, "experts_of": 2, "microbatch": 2, "tensor": "1d_sp",
                                             "axes": {"t": 2}, "precision": "bf16"},
    "experts of two replicas, full, zero 3": {**ROUTED, "data": 4, "experts_of": 2, "microbatch": 2, "zero": 3,
                                              "recompute": "full"},
    "experts of four replicas, zero 1, bf16": {**ROUTED, "data": 4, "experts_of": 4, "microbatch": 2, "zero": 1,
                                               "precision": "bf16"},
    "experts of four replicas, zero 3": {**ROUTED, "data": 4, "experts_of": 4, "microbatch": 2, "zero": 3},
    "experts, 2d, bf16": {**ROUTED, "tensor": "2d", "axes": {"r": 2, "c": 2}, "precision": "bf16"},
    "experts, 3d_literal, bf16": {**ROUTED, "tensor": "3d_literal", "axes": {"x": 2, "y": 1, "z": 2},
                                  "precision": "bf16"},
    **{f"many small experts, {name}": {**ROUTED, "experts": 64, "expert_d_ff": 8, "d_model": 8, "heads": 2,
                                       "shared_experts": 0, **more}
       for name, more in {"of few slots": {"length": 64, "capacity_factor": 0.5}, "of all": {"capacity_factor": 0.0},
                          "bf16": {"precision": "bf16"}}.items()},
    "experts of both stacks, bf16": {**MODELS["t5"], **ROUTED, "data": 2, "experts_of": 2, "microbatch": 4,
                                     "precision": "bf16"},
    "many experts, bf16": {**ROUTED, "experts": 64, "expert_d_ff": 16, "precision": "bf16", "router_groups": 8,
                           "router_groups_kept": 4, "router_group_best": 2, "router_bias": True},
    "many experts, over a batch": {**ROUTED, "experts": 64, "expert_d_ff": 16, "balance_over": "batch",
                                   "router_jitter": 0.1},
    "experts, zb_h1, zero 2, bf16": {**ROUTED, **STAGES, "pipeline": "zb_h1", "data": 2, "zero": 2, "microbatch": 4,
                                     "precision": "bf16"},
    "experts in pairs": {**ROUTED, "data": 2, "experts_of": 2, "microbatch": 2, "pair_passes": "on"},
    "experts in pairs, 1f1b, zero 1, bf16": {**ROUTED, **STAGES, "pipeline": "1f1b", "data": 2, "experts_of": 2,
                                             "zero": 1, "microbatch": 1, "precision": "bf16", "pair_passes": "on"},
    "experts without a bound, 1f1b": {**ROUTED, **STAGES, "capacity_factor": 0.0, "pipeline": "1f1b"},
}  # fmt: skip
DROPLESS: dict[str, Any] = {**ROUTED, "capacity_factor": 0.0, "microbatch": 2}
WORST: dict[str, dict[str, Any]] = {
    "serial": {},
    "bf16": {"precision": "bf16", "experts": 16},
    "two ranks": {"data": 2, "experts_of": 2},
    "four ranks, one expert each, full": {"data": 4, "experts_of": 4, "recompute": "full"},
    "two ranks, 1d_sp, bf16": {"data": 2, "experts_of": 2, "tensor": "1d_sp", "axes": {"t": 2}, "precision": "bf16"},
    "two ranks, 2d, bf16": {"data": 2, "experts_of": 2, "tensor": "2d", "axes": {"r": 1, "c": 2}, "precision": "bf16"},
    "two ranks, zb_h1": {**STAGES, "microbatch": 2, "data": 2, "experts_of": 2, "pipeline": "zb_h1"},
}
LATENT: dict[str, Any] = {**MODELS["latent"], "d_kv": 20, "d_rope": 8, "d_value": 12, "kv_latent": 24, "q_latent": 32}
PLANS |= {
    "latent, bf16": {**LATENT, "precision": "bf16"},
    "latent, 1d_sp": {**LATENT, "tensor": "1d_sp", "axes": {"t": 2}},
    "latent, 2d, full": {**LATENT, "tensor": "2d", "axes": {"r": 2, "c": 2}, "recompute": "full"},
}  # fmt: skip
PLANS |= {
    "context, gathered, bf16": {"context": 2, "context_kind": "gather", "precision": "bf16"},
    "context, heads, zero 3": {"context": 2, "context_kind": "heads", "zero": 3},
    "context, nested, 1d_sp": {"context": 4, "context_kind": "nested", "context_heads": 2, "tensor": "1d_sp",
                               "axes": {"t": 2}},
    "context, experts": {**ROUTED, "context": 2, "context_kind": "gather"},
    "context, long, grouped": {**MODELS["llama"], "context": 2, "context_kind": "gather", "length": 256, "layers": 2},
}  # fmt: skip
LONG: dict[str, Any] = {"length": 128, "d_model": 32, "vocab": 64, "layers": 2}  # scores are most of it
ATTENTION: dict[str, dict[str, Any]] = {
    "flash": {"kernel": "flash"},
    "flash, bf16": {"kernel": "flash", "precision": "bf16"},
    "flash, masked": {"kernel": "flash", **MODELS["bert"]},
    "math": {"kernel": "math"},
    "math, bf16": {"kernel": "math", "precision": "bf16"},
    "math, masked": {"kernel": "math", **MODELS["bert"]},
    "math, grouped, 1d": {"kernel": "math", **MODELS["llama"], "tensor": "1d", "axes": {"t": 2}},
    "math, latent": {"kernel": "math", **LATENT},
    "math, selective": {"kernel": "math", "recompute": "selective"},
    "dropout in the kernel": {"dropout": 0.1, "fused_dropout": True},
    "dropout in the kernel, bf16": {"dropout": 0.1, "fused_dropout": True, "precision": "bf16"},
    "biased, bf16": {**MODELS["t5"], "precision": "bf16"},
    "dropout, long": {"dropout": 0.1, "length": 256},
    "dropout, long, full": {"dropout": 0.1, "length": 256, "recompute": "full"},
    "dropout, long, selective, masked": {"dropout": 0.1, "length": 256, "recompute": "selective", **MODELS["bert"]},
    "dropout, long, biased": {"dropout": 0.1, "length": 256, **MODELS["t5"]},
    "dropout, long, full, bf16": {"dropout": 0.1, "length": 256, "recompute": "full", "precision": "bf16"},
}


def configured(kernel: str = "auto", **more: Any):
    c = configure(**{"global_batch": 8, **MODEL, **more})
    c.train.attention_kernel = kernel
    return c


@pytest.mark.parametrize("name", PLANS)
def test_what_is_needed_is_what_is_held(name):
    """Within 5 % of the largest worker's peak; and when a step is done, nothing of it lives on."""
    holds(configured(**PLANS[name]))


@pytest.mark.parametrize("name", WORST)
def test_so_it_is_of_rows_in_the_worst_routing(name, monkeypatch):
    """All tokens choose experts of one rank."""
    c = configured(**{**DROPLESS, **WORST[name]})
    to_the_first(monkeypatch, c.model.experts, 2)
    holds(c)


@pytest.mark.parametrize("more", [{}, {"recompute": "full"}], ids=["none", "full"])
def test_lent_experts_need_no_more_than_is_planned(more, monkeypatch):
    """Nor much less, though ranks are rarely as busy as they can be."""
    c = configured(**{**DROPLESS, "data": 4, "experts_of": 4, **more})
    c.parallel.lent_experts = 1
    to_the_first(monkeypatch, c.model.experts, 2)
    plan = make_plan(c)
    peak = max(rank.peak for rank in count(c, plan))
    assert 0.6 * predict_peak_bytes(c, plan) <= peak <= predict_peak_bytes(c, plan)


@pytest.mark.parametrize(
    "more",
    [{}, {"data": 2, "zero": 3}, {"tensor": "1d", "axes": {"t": 2}, "zero": 1, "data": 2},
     {**ROUTED, "data": 2, "experts_of": 2, "zero": 1, "microbatch": 2}], ids=str
)  # fmt: skip
def test_of_adafactor(more):
    c = configured(**{"layers": 2, **more})
    c.optimizer.kind = "adafactor"
    holds(c)


@pytest.mark.parametrize("name", ATTENTION)
def test_so_it_is_in_every_kernel_of_attention(name):
    holds(configured(**{**LONG, **ATTENTION[name]}))


def test_probabilities_are_what_the_kernels_differ_in():
    """The negative control of the above: what would be counted without them is far off."""
    c = configured("math", **LONG)
    flash = predict_peak_bytes(c, make_plan(configured("flash", **LONG)))
    assert predict_peak_bytes(c, make_plan(c)) > 1.25 * flash
    dropped = configured(**LONG, dropout=0.1, fused_dropout=True)
    assert predict_peak_bytes(dropped, make_plan(dropped)) > 1.75 * flash
    on_gpu = replace(dropped, precision="bf16", cluster=replace(dropped.cluster, device="cuda"))
    [footprint] = predict_footprints(on_gpu, make_plan(on_gpu))
    assert footprint.total_bytes - footprint.reserved < flash  # a kernel there draws its masks


def test_what_is_offloaded_is_not_on_the_device():
    """But for the activations of the block that is computed, and of the one before it."""
    kept, away = (configured(**LONG | {"layers": 8}, recompute="full", offload=on) for on in (False, True))
    (one,), (other,) = (predict_footprints(c, make_plan(c)) for c in (kept, away))
    size = 4 * 128 * 32 * kept.train.microbatch
    assert (one.host, other.host) == (0, 8 * size) and other.total_bytes - other.host <= one.total_bytes - 5 * size


WIDE: dict[str, Any] = {"vocab": 32, "d_ff": 16, "d_model": 32, "d_kv": 32, "length": 64, "recompute": "full"}


@pytest.mark.parametrize("more", [{}, {"tensor": "1d", "axes": {"t": 2}}], ids=["serial", "1d"])
def test_joined_gradients_count_where_a_device_joins_them(more, monkeypatch):
    """As GPUs do: the gradients of Q, K and V are copied into one storage."""
    c = configured(**WIDE, **more)
    apart = predict_peak_bytes(c, make_plan(c))
    monkeypatch.setitem(JOINS_GRADIENTS, "cpu", True)
    holds(c)
    assert predict_peak_bytes(c, make_plan(c)) > 1.05 * apart


FEW_TOKENS: dict[str, Any] = {"precision": "bf16", "vocab": 32, "length": 4, "d_model": 96, "layers": 2,
                              "recompute": "full"}  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"pipeline": "zb_h1", "stages": 2, "layers": 4}], ids=["serial", "zb_h1"])
def test_gradients_in_16_bits_count_where_a_device_does_not_add_them_at_once(more, monkeypatch):
    """As GPUs do, which have no buffer of a bucket's gradients in the compute type."""
    c = configured(**{**FEW_TOKENS, **more})
    rounded = predict_peak_bytes(c, make_plan(c))
    monkeypatch.setitem(ADDS_WIDE, "cpu", True)
    with kernels_on_cpus():
        holds(c)
    assert predict_peak_bytes(c, make_plan(c)) < 0.95 * rounded


UPDATED: dict[str, Any] = {"microbatch": 1, "global_batch": 1, "length": 4, "layers": 1, "vocab": 64, "d_model": 128,
                           "d_ff": 512}  # fmt: skip
OPTIMIZED: dict[str, dict[str, Any]] = {
    "sgd": {"kind": "sgd"},
    "sgd without momentum": {"kind": "sgd", "momentum": 0.0},
    "sgd, nesterov": {"kind": "sgd", "nesterov": True},
    "lion": {"kind": "lion"},
    "muon": {"kind": "muon"},
    "muon, nesterov": {"kind": "muon", "nesterov": True},
    "moments in bf16": {"moments": "bf16"},
    "moments in 8 bits": {"moments": "int8"},
    "lion, moments in 8 bits": {"kind": "lion", "moments": "int8"},
    "sgd, moments in bf16": {"kind": "sgd", "moments": "bf16"},
}
DIVIDED: dict[str, dict[str, Any]] = {
    "serial": {},
    "bf16": {"precision": "bf16"},
    "1d, bf16": {"tensor": "1d", "axes": {"t": 2}, "precision": "bf16"},
    "zero 3": {"data": 2, "zero": 3, "global_batch": 2},
}


def optimized(kind: str, **more: Any):
    c = configured(**{**UPDATED, **more})
    for name, value in OPTIMIZED[kind].items():
        setattr(c.optimizer, name, value)
    return c


@pytest.mark.parametrize("divided", DIVIDED)
@pytest.mark.parametrize("kind", OPTIMIZED)
def test_so_it_is_with_every_optimizer(kind, divided):
    """Whose temporary memory is what weighs, where a batch is small."""
    whole_blocks = {"d_kv": 128} if OPTIMIZED[kind].get("moments") == "int8" else {}  # of 256 elements
    holds(optimized(kind, **DIVIDED[divided], **whole_blocks))


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("divided", ["bf16", "zero 3", "zero 1"])
def test_so_it_is_with_split_masters(divided, moments):
    """Which are whole for a piece of them at a time."""
    split = DIVIDED.get(divided, {"data": 2, "zero": 1, "global_batch": 2}) | {"precision": "bf16"}
    c = optimized("moments in bf16", **split)
    c.optimizer.moments, c.optimizer.masters = moments, "split"
    holds(c)
    if moments == "fp32":
        wide = replace(c, optimizer=replace(c.optimizer, masters="fp32"))
        assert predict_peak_bytes(c, make_plan(c)) < 0.95 * predict_peak_bytes(wide, make_plan(wide))


@pytest.mark.parametrize(
    "masters, offload", [("fp32", "states"), ("fp32", "states+masters"), ("split", "states+masters")]
)
@pytest.mark.parametrize("divided", ["bf16", "zero 3"])
def test_so_it_is_with_states_that_pass_through_buffers(divided, masters, offload):
    """On a CPU, whose host memory is its own."""
    c = optimized("sgd", **DIVIDED[divided] | {"precision": "bf16"})
    c.optimizer.kind, c.optimizer.masters, c.optimizer.offload = "adamw", masters, offload
    holds(c)


def test_negative_control_an_update_that_takes_nothing(monkeypatch):
    c = optimized("muon, nesterov")
    muon = replace(OPTIMIZERS["muon"], scratch=lambda o, update: 0)
    needed = predict_peak_bytes(c, make_plan(c))
    monkeypatch.setitem(OPTIMIZERS, "muon", muon)
    assert predict_peak_bytes(c, make_plan(c)) < 0.8 * needed


def holds(c) -> None:
    plan = make_plan(c)
    ranks = count(c, plan)
    peak = max(rank.peak for rank in ranks)
    assert abs(predict_peak_bytes(c, plan) - peak) <= 0.05 * peak, (predict_peak_bytes(c, plan), peak)
    assert all(len(set(rank.after)) == 1 for rank in ranks)

"""The kernel of attention: the plan names it, it runs in every pass, and what cannot run is refused before."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.library import Library
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel
from torch.nn.attention._registry import _FLASH_ATTENTION_IMPLS
from torch.utils._python_dispatch import TorchDispatchMode

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config
from platform.config.identity import find_default_directory, run_identity, violations_of_identity
from platform.plan.model_types import AUTO, KERNELS, MATH, AttentionTraits, reason_against_kernel, resolve_auto_kernel
from platform.plan.plan_data import plan_digest, plan_summary
from platform.plan.plan_summary import describe
from platform.plan.step_collectives import attention_traits, find_fused_attentions, resolve_auto_kernels
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from platform.runtime.compilation import name_attention_kernel, reason_kernel_fails, select_attention_kernel
from tests.harness.oracle import MODELS, compare, configure, run, serial, trainer_of

# what torch calls for one attention
OPERATIONS = {
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "flash backward",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_safe_softmax": "math",
    "_softmax_backward_data": "math backward",
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


class Seen(TorchDispatchMode):
    """Counts the kernels of attention that run."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in OPERATIONS:
            self.kernels[OPERATIONS[name]] += 1
        return function(*args, **(kwargs or {}))


def configured(kernel: str, **more: Any) -> Config:
    c = configure(**more)
    c.train.attention_kernel = kernel
    return c


def seen(c: Config) -> Counter[str]:
    """Kernels of attention in one step of two microbatches and two layers."""
    plan = make_plan(c)
    trainer = trainer_of(c, plan, SingleRank(plan.mesh))
    with Seen() as mode:
        trainer.step(1)
    return mode.kernels


@pytest.mark.parametrize(("kernel", "model"), [("flash", "gpt"), ("math", "gpt"), ("math", "llama"), ("flash", "bert")])
def test_the_named_kernel_computes_what_any_does(kernel, model):
    c = configured(kernel, **MODELS[model])
    plan, results = run(c)
    assert {o.operation["kernel"] for o in find_fused_attentions(plan)} == {kernel}
    compare(c, plan, results, serial(c))


@pytest.mark.parametrize("kernel", ["flash", "math"])
@pytest.mark.parametrize(("recompute", "forward"), [("none", 4), ("selective", 8), ("full", 8)])
def test_it_runs_in_every_pass_recomputation_too(kernel, recompute, forward):
    """Two layers, two microbatches: four attentions, computed again where that is recomputed."""
    assert seen(configured(kernel, recompute=recompute)) == {kernel: forward, f"{kernel} backward": 4}


@pytest.mark.filterwarnings("ignore:.*kernel")
def test_torch_is_left_as_it_was():
    before = torch.nn.attention._cur_sdpa_kernel_backends()
    seen(configured("math"))
    assert torch.nn.attention._cur_sdpa_kernel_backends() == before
    x = torch.zeros(1, 1, 4, 4)
    with pytest.raises(RuntimeError), select_attention_kernel("flash"):  # which drops nothing on a CPU
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    assert torch.nn.attention._cur_sdpa_kernel_backends() == before


def test_the_plan_is_data_of_it_too():
    plans = {kernel: make_plan(configured(kernel)) for kernel in (AUTO, "flash", "math")}
    assert len({plan_digest(plan) for plan in plans.values()}) == 3
    for kernel, plan in plans.items():
        rows = [row for row in plan_summary(plan)["operations"] if row["kind"] == "fused_attention"]
        assert [row["kernel"] for row in rows] == [kernel] * 2
        assert (f"attention       2 in kernel {kernel}" in describe(plan)) == (kernel != AUTO)


def test_another_kernel_is_the_same_run():
    a, b = configured("flash"), configured("math")
    assert (
        run_identity(a) == run_identity(b)
        and violations_of_identity(run_identity(a), b, "run.dir", "x", "another run") == []
    )
    assert find_default_directory(a, "x") != find_default_directory(b, "x")  # as of every key that is typed


def legal_in_torch(kernel: str, device: str, t: AttentionTraits) -> bool:
    """Whether torch computes such an attention, and its gradients, in this kernel."""
    heads, n = 4, 16
    q, k, v = (
        torch.randn(2, h, n, t.d_kv, dtype=DTYPES[t.precision], device=device, requires_grad=True)
        for h in (heads, 2 if t.grouped else heads, 2 if t.grouped else heads)
    )
    mask = None
    if t.bias:
        mask = torch.randn(1, heads, n, n, dtype=q.dtype, device=device, requires_grad=True)
    elif t.mask:
        mask = torch.ones(2, 1, 1, n, dtype=torch.bool, device=device)
    try:
        with select_attention_kernel(kernel):
            y = F.scaled_dot_product_attention(q, k, v, mask, t.dropout, enable_gqa=t.grouped)
        y.sum().backward()
    except (RuntimeError, ImportError):
        return False
    return all(x.grad is not None for x in (q, k, v)) and (not t.bias or mask.grad is not None)


# before torch 2.12 cuDNN's kernel takes any dropout, and rounds it to a multiple of 1/16 (pytorch#174245)
ROUNDED = torch.__version__ < "2.12"
CASES = [
    AttentionTraits(precision, d_kv, bias, mask, dropout, grouped)
    for precision, d_kv, bias, mask, dropout, grouped in product(
        DTYPES, (4, 12, 32), (False, True), (False, True), (0.0, 0.1), (False, True)
    )
    if not (grouped and (bias or mask))  # every head comes there
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_refused_is_what_torch_refuses(device):
    packages = {"flash3": "flash_attn_interface", "flash4": "flash_attn"}
    missing = {name for name, package in packages.items() if device == "cuda" and not find_spec(package)}
    for kernel, t in product([name for name in KERNELS[1:] if name not in missing], CASES):
        if ROUNDED and (kernel, device) == ("cudnn", "cuda") and t.dropout:
            continue
        assert (reason_against_kernel(kernel, device, t) == "") == legal_in_torch(kernel, device, t), (kernel, t)


@pytest.mark.parametrize("device", DEVICES)
def test_auto_is_what_torch_chooses(device):
    for t in CASES:
        if ROUNDED and device == "cuda" and t.dropout:
            continue
        with Seen() as mode:
            assert legal_in_torch(AUTO, device, t)
        (kernel,) = (name for name in mode.kernels if "backward" not in name)
        assert kernel == resolve_auto_kernel(AUTO, device, t), t


def test_what_auto_becomes_on_each_device():
    c = configure(**MODELS["t5"], precision="bf16", d_model=64, dropout=0.1, fused_dropout=True)
    plan = make_plan(c)
    kernels = {
        d: {o.operation["kernel"] for o in find_fused_attentions(resolve_auto_kernels(plan, d, 0.1))}
        for d in ("cpu", "cuda")
    }
    assert kernels == {"cpu": {MATH}, "cuda": {"efficient"}}
    assert {o.operation["kernel"] for o in find_fused_attentions(plan)} == {AUTO}
    (grouped, *_) = (
        attention_traits(p, o, 0.0) for p in [make_plan(configure(**MODELS["llama"]))] for o in find_fused_attentions(p)
    )
    assert grouped.grouped and not grouped.bias and not grouped.mask


REFUSED = [
    ("cudnn", {}, "cpu", "on a CPU it does not run; nearest legal: auto, flash, math"),
    ("efficient", {}, "cpu", "on a CPU it does not run; nearest legal: auto, flash, math"),
    ("flash", {"attention_cap": 2.0}, "cpu", "on a CPU it has no cap of scores: model.attention_cap=0; nearest legal:"),
    ("flash", MODELS["t5"], "cpu", "on a CPU it has no gradient for a learned bias"),
    ("flash", {"dropout": 0.1, "fused_dropout": True}, "cpu", "on a CPU it draws no dropout masks"),
    ("flash", {"dropout": 0.1}, "cpu", "no attention of this plan is computed by one kernel (model.dropout draws"),
    ("flash", {"kind": "two_layer"}, "cpu", "no attention of this plan is computed by one kernel; nearest legal: auto"),
    ("flash", {}, "cuda", "on a GPU it computes in 16 bits: precision=bf16 or fp16; nearest legal: auto, math"),
    (
        "flash",
        {**MODELS["bert"], "precision": "bf16"},
        "cuda",
        "on a GPU it takes neither a bias nor a mask of padding, window or documents",
    ),
    ("cudnn", {"precision": "bf16"}, "cuda", "on a GPU it takes a d_kv that is a multiple of 8"),
    ("efficient", {**MODELS["llama"], "precision": "fp32"}, "cuda", "on a GPU it takes as many heads of K and V"),
    ("cudnn", MODELS["t5"], "auto", "on a CPU it does not run; on a GPU it has no gradient for a learned bias"),
]


@pytest.mark.parametrize(("kernel", "model", "device", "line"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_run_is_refused_with_what_can(kernel, model, device, line):
    c = configured(kernel, **model)
    c.cluster.device = device
    with pytest.raises(ConfigError) as error:
        make_plan(c)
    (violation,) = error.value.violations
    assert violation.startswith(f"train.attention_kernel={kernel}: {line}"), violation
    legal = violation.rpartition("nearest legal: ")[2].split(", ")
    assert {AUTO, MATH} <= set(legal)
    for other in legal:
        make_plan(replace(c, train=replace(c.train, attention_kernel=other)))


def test_where_the_device_is_open_what_one_kind_has_is_legal():
    c = configured("cudnn", precision="bf16", heads=4)
    assert make_plan(c)
    c.train.deterministic = True
    with pytest.raises(ConfigError, match="adds gradients in no fixed order"):
        make_plan(c)


class PackageKernel:
    """Stand-in for a package's flash kernels on a CPU, in the way that torch puts them in place of its own."""

    def __init__(self) -> None:
        self.calls, self.library = 0, Library("aten", "IMPL")
        self.library.impl("_scaled_dot_product_flash_attention_for_cpu", self.attend, "CPU", allow_override=True)

    def attend(self, q, k, v, dropout=0.0, is_causal=False, *, attn_mask=None, scale=None):
        self.calls += 1
        scores = (q @ k.mT * (scale or q.shape[-1] ** -0.5)).masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    def remove(self) -> None:
        self.library._destroy()


@pytest.mark.filterwarnings("ignore")
def test_a_package_takes_the_place_of_flash_until_another_is_named(monkeypatch):
    """Backward passes come when the choice is over; torch's own kernel is back when it is named."""
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    packages = []
    register = lambda: packages.append(PackageKernel()) or packages[-1]  # noqa: E731
    for name in ("FA3", "FA4"):
        monkeypatch.setitem(_FLASH_ATTENTION_IMPLS, name, register)

    def attend(kernel):
        with select_attention_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    torches = attend("flash")
    for kernel in ("flash3", "flash3", "math", "flash4", "flash", "flash"):
        torch.testing.assert_close(attend(kernel), torches)
        active = {"flash3": "FA3", "flash4": "FA4", "flash": None}
        assert kernel == MATH or current_flash_attention_impl() == active[kernel]
    assert [package.calls for package in packages] == [2, 1]
    assert "flash_attn_interface" in reason_kernel_fails_without(monkeypatch, "flash3")


def reason_kernel_fails_without(monkeypatch, kernel: str) -> str:
    """Return why a kernel fails where its package is not installed."""
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    return reason_kernel_fails(kernel, "cpu", torch.float32, 8)


def test_the_kernel_that_torch_chooses_has_a_name():
    assert name_attention_kernel("cpu", torch.bfloat16, 64) == "flash"
    with sdpa_kernel(SDPBackend.MATH):
        assert name_attention_kernel("cpu", torch.bfloat16, 64) == MATH


def test_a_worker_tells_what_its_device_lacks():
    assert [reason_kernel_fails(kernel, "cpu", torch.float32, 8) for kernel in (AUTO, "flash", "math")] == ["", "", ""]
    assert "backend" in reason_kernel_fails("cudnn", "cpu", torch.float32, 8)
    assert reason_kernel_fails("flash", "cpu", torch.complex64, 8).startswith(
        "Expected query, key and value to all be of dtype"
    )

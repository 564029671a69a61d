"""Products in 16 bits that are added to sums in fp32 as they are computed. A CPU has no such kernel: here it gets one
with the arithmetic of CUDA's. Real ones: tests/gpu/test_one_gpu.py."""

from __future__ import annotations

import pytest
import torch

from platform.plan.chunks import ADDS_WIDE
from platform.predict.make_plan import make_plan
from platform.runtime import products
from tests.harness.oracle import MODELS, assemble, configure, run
from tests.harness.wide_sums import errors, kernels_on_cpus

PLANS = {
    **{name: MODELS[name] for name in ("gpt", "llama", "modern", "t5", "whole_bert")},
    "1d": {"tensor": "1d", "axes": {"t": 2}},
    "2d": {"tensor": "2d", "axes": {"r": 2, "c": 2}},
    "2d_gather": {"tensor": "2d_gather", "axes": {"r": 2, "c": 2}},
    "3d": {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 2}},
    "1f1b, tied": {"pipeline": "1f1b", "stages": 2},
    "zb_h1": {"pipeline": "zb_h1", "stages": 2, "layers": 4},
    "data": {"data": 2},
    "zero 1": {"data": 2, "zero": 1},
    "recompute": {"recompute": "full"},
    "one microbatch": {"microbatch": 8},
}


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setitem(ADDS_WIDE, "cpu", True)
    with kernels_on_cpus():
        yield


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_error_of_a_sum_does_not_grow(wide, precision):
    """Nor is it that of a product that is rounded, which a CPU without such kernels has."""
    few, many = errors("cpu", precision, 4), errors("cpu", precision, 64)
    assert max(few[0], many[0]) < 2e-7
    assert many[1] > 2 * few[1] > 1e-4, "negative control: a sum in 16 bits"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_negative_control_products_that_are_rounded(precision):
    summed, narrow = errors("cpu", precision, 64)
    assert 1e-5 < summed < narrow


def gradients(c):
    plan, results = run(c)
    return assemble(plan, results, lambda r: r.gradients)


def differing(c, expected) -> list[str]:
    """The parameters whose gradients differ by more than products differ that are rounded to 16 bits."""
    return [n for n, g in gradients(c).items() if (g - expected[n]).abs().max() > 2**-7 * expected[n].abs().max()]


def planned(name: str):
    return configure(**{"precision": "bf16", "microbatch": 2, **PLANS[name]})


@pytest.mark.parametrize("name", PLANS)
def test_a_step_has_the_gradients_of_one_that_rounds_products(name, monkeypatch):
    c = planned(name)
    expected = gradients(c)
    with kernels_on_cpus(), monkeypatch.context() as patch:
        patch.setitem(ADDS_WIDE, "cpu", True)
        assert not differing(c, expected)


def test_negative_control_a_product_that_overwrites(monkeypatch):
    c = planned("gpt")
    expected = gradients(c)
    monkeypatch.setitem(ADDS_WIDE, "cpu", True)
    add = products.add_product
    monkeypatch.setattr(products, "add_product", lambda total, x, y, fresh: add(total, x, y, True))
    with kernels_on_cpus():
        assert any(name.endswith("up") for name in differing(c, expected))


def test_a_cpu_has_no_such_kernel():
    """Else it could do as CUDA does: its product is added after it."""
    x, total = torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2)
    with pytest.raises(NotImplementedError):
        torch.mm(x, x, out_dtype=total.dtype, out=total)
    products.add_product(total, x, x, False)
    assert total.tolist() == [[3.0, 3.0], [3.0, 3.0]]


@pytest.mark.parametrize("zero", range(4))
def test_what_is_added_at_once(zero):
    """Sums of ZeRO-2 and 3 are in the type of the products themselves."""
    plan = make_plan(configure(precision="bf16", data=2, zero=zero, microbatch=2))
    for bucket in plan.buckets:
        assert plan.adds_gradients_into_sums(bucket, "cuda") and plan.adds_gradients_into_sums(bucket, "cpu") is (
            zero >= 2
        )

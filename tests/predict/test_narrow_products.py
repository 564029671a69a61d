"""Products in 8 bits on GPUs that have a kernel for their scales, and on those that have none: the price, the closed
form of a search, and what a plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from platform.launch import compose_config
from platform.plan.accelerators import ACCELERATORS
from platform.plan.quantisation import Quantisation
from platform.predict.contender_grid import ContenderGrid
from platform.predict.make_plan import make_plan
from platform.predict.step_price import read_hardware, step_price
from tests.predict.search.test_estimates import estimate_typed

SCALES = {scale: Quantisation(scale, 32 if scale == "mx" else 128) for scale in ("tensor", "row", "block", "mx")}
KERNELS = {"H100": {"tensor", "row", "block"}, "B200": {*SCALES}, "GB300": {*SCALES}, "L40S": {"tensor"}, "A100": set(),
           "MI300X": set()}  # fmt: skip
LAYERS = ["model=llama_8b", "model.layers=2", "tensor=serial", "train.microbatch=1", "cluster=processes",
          "cluster.device=cuda"]  # fmt: skip


@pytest.mark.parametrize("gpu", KERNELS)
def test_scales_with_a_kernel(gpu):
    (capability,) = {a.capability for a in ACCELERATORS if a.name == gpu}
    assert {scale for scale, how in SCALES.items() if how.has_kernels(capability)} == KERNELS[gpu]
    assert not Quantisation("block", 64).has_kernels(capability)
    any_number = Quantisation("block", powers=False)
    assert any_number.has_kernels(capability) == (gpu == "H100"), "Blackwell's scales are powers of two"


def seconds(*words, gpu="h100"):
    config = compose_config([*LAYERS, f"cluster.gpu={gpu.upper()}", *words])
    return step_price(config, make_plan(config), read_hardware(gpu)).seconds


def test_what_is_emulated_is_priced_so():
    """As products in 16 bits, and the rounding beside."""
    plain, block, mx = seconds("precision=bf16"), seconds("precision=fp8"), seconds("precision=mxfp8")
    assert block < 0.9 * plain and plain < mx < 1.1 * plain
    plain, mx = seconds("precision=bf16", gpu="b200"), seconds("precision=mxfp8", gpu="b200")
    assert mx < 0.9 * plain


REAL = ContenderGrid.search_circumstances


def take_for_kernels(grid):
    return replace(REAL.func(grid), narrow="fp8")


def test_a_search_prices_them_so_too(monkeypatch):
    """The negative control takes emulated products for a kernel's."""
    typed = "model=gpt3_13b", "model.layers=4", "precision=mxfp8"
    assert 0.9 < estimate_typed(*typed, gpu="H100-80GB").seconds < 1.1
    monkeypatch.setattr(ContenderGrid, "search_circumstances", property(take_for_kernels))
    assert estimate_typed(*typed, gpu="H100-80GB").seconds < 0.9


WARNED = {
    ("precision=fp8", "H100"): "",
    ("precision=mxfp8", "B200"): "",
    ("precision=mxfp8", "H100"): "for each mx are emulated in bf16 on H100: kernels for them are on Blackwell",
    ("precision=fp8", ""): "for each block are emulated in bf16: kernels for them are on Hopper and Blackwell",
    (
        "precision=fp8 quantise.block=64",
        "H100",
    ): "for each block are emulated in bf16 on H100: kernels for them are",
}


@pytest.mark.parametrize(("words", "gpu"), WARNED, ids=str)
def test_a_plan_says_where_they_are_emulated(words, gpu):
    plan = make_plan(compose_config([*LAYERS, *words.split(), f"cluster.gpu={gpu}"]))
    warned = [line for line in plan.warnings if "emulated" in line]
    expected = WARNED[words, gpu]
    assert expected in warned[0] if expected else not warned

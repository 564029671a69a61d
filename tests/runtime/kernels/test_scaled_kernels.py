"""Kernels for matrices in 8 bits, without a GPU: which card has which, in which order they are given scales (by
torch's own checks, by NVIDIA's formula and by torch's own arrangement), and whole steps on a stand-in that reads memory
so."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType

from platform.runtime import eight_bits
from platform.runtime.eight_bits import arrange_scales, choose_scalings, multiply_scaled, quantise_matrices
from tests.harness.oracle import run
from tests.runtime.kernels.test_eight_bits import TILES, drawn
from tests.runtime.oracle.test_eight_bits import configured
from tests.runtime.test_whole_tensor_blocks import fast

__all__ = ["fast"]

HOPPER, BLACKWELL = (9, 0), (10, 0)
TENSOR, ROW, MX = ScalingType.TensorWise, ScalingType.RowWise, ScalingType.BlockWise1x32
LONG, SQUARE = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
# operands of a product: of activations or gradients alone, or with a weight
PAIRS = {
    "tensor": ("tensor", "tensor"),
    "row": ("row", "row"),
    "block": ("activation", "weight"),
    "block, turned": ("weight", "activation"),
    "block, gradient": ("activation", "activation"),
    "mx": ("mx", "mx"),
}
TAKEN = {
    HOPPER: {"tensor": [TENSOR] * 2, "row": [ROW] * 2, "block": [LONG, SQUARE], "block, turned": [SQUARE, LONG],
             "block, gradient": [LONG] * 2},
    BLACKWELL: {"tensor": [TENSOR] * 2, "row": [ROW] * 2, **dict.fromkeys([p for p in PAIRS if "," in p or p in
                ("block", "mx")], [MX] * 2)},
    (8, 9): {"tensor": [TENSOR] * 2},
    (8, 0): {},
    (0, 0): {},
}  # fmt: skip
CASES = [(capability, pair) for capability in TAKEN for pair in TAKEN[capability]]
on_cards = pytest.mark.parametrize(("capability", "pair"), CASES, ids=str)
SHAPE = 128, 256, 640  # rows, columns, k: five blocks of 128, which kernels want as eight


@pytest.fixture
def card(monkeypatch):
    """Takes this machine for one with a GPU of a compute capability."""

    def choose(capability, cuda=(13, 0)):
        monkeypatch.setattr(eight_bits, "find_capability", lambda device: capability)
        monkeypatch.setattr(eight_bits, "find_cuda_version", lambda: cuda)

    return choose


def operands(pair, shape=SHAPE, powers=True, form="e4m3"):
    rows, columns, k = shape
    of_a, of_b = (TILES[kind] for kind in PAIRS[pair])
    a = quantise_matrices(drawn(1, rows, k), of_a, "e4m3", powers)
    return a, quantise_matrices(drawn(2, columns, k), of_b, form, powers)


@pytest.mark.parametrize("capability", TAKEN, ids=str)
def test_which_card_has_which_kernel(capability, card):
    card(capability)
    chosen = {pair: choose_scalings(*operands(pair), torch.bfloat16, True) for pair in PAIRS}
    assert {pair: scalings for pair, scalings in chosen.items() if scalings} == TAKEN[capability]


def test_what_no_kernel_takes(card):
    card(HOPPER)
    for shape in ((128, 256, 192), (128, 192, 256), (120, 256, 256)):
        assert choose_scalings(*operands("block", shape), torch.bfloat16, True) is None
    assert choose_scalings(*operands("block", (48, 256, 256)), torch.bfloat16, True)
    assert choose_scalings(*operands("block"), torch.float64, True) is None
    assert choose_scalings(*operands("block", form="e5m2"), torch.bfloat16, True) is None
    assert choose_scalings(*operands("row", form="e5m2"), torch.bfloat16, True)
    a, weight = operands("block")
    assert choose_scalings(weight, weight, torch.bfloat16, True) is None
    assert choose_scalings(a, operands("row")[1], torch.bfloat16, True) is None
    card(HOPPER, cuda=(12, 6))
    assert choose_scalings(*operands("block"), torch.bfloat16, True) is None
    assert choose_scalings(*operands("row"), torch.bfloat16, True)
    card(BLACKWELL)
    assert choose_scalings(*operands("block", powers=False), torch.bfloat16, False) is None, "e8m0 holds powers of two"


def multiplied_on_meta(a, b, scalings):
    """What torch says of a product on a card, of which it knows all but the numbers."""
    scales = [arrange_scales(m, scaling) for m, scaling in zip((a, b), scalings, strict=True)]
    tensors = [x.to("meta") for x in (a.values, b.values, *scales)]
    return eight_bits._multiply(*tensors, [s.value for s in scalings], torch.bfloat16)


@on_cards
@pytest.mark.parametrize("shape", [SHAPE, (128, 128, 128), (256, 128, 512)])
def test_torch_takes_them(capability, pair, shape):
    out = multiplied_on_meta(*operands(pair, shape), TAKEN[capability][pair])
    assert out.shape == shape[:2] and out.dtype == torch.bfloat16


@pytest.mark.parametrize("pair", ["block", "block, gradient", "mx"])
def test_negative_control_scales_as_they_are(pair, monkeypatch):
    monkeypatch.setitem(globals(), "arrange_scales", lambda m, scaling: m.scales.clone())
    with pytest.raises((RuntimeError, ValueError), match="scal"):
        multiplied_on_meta(*operands(pair), TAKEN[BLACKWELL if pair == "mx" else HOPPER][pair])


def test_mx_scales_lie_as_torch_arranges_them():
    source = Path(torch.__file__).parent / "testing" / "_internal" / "common_quantized.py"
    wanted = [f for f in ast.parse(source.read_text()).body if getattr(f, "name", "") in ("to_blocked", "ceil_div")]
    names = {"torch": torch}
    exec(compile(ast.Module(wanted, []), str(source), "exec"), names)  # whose imports are of torch's own tests
    for rows, columns in ((128, 128), (256, 640), (48, 96), (400, 1056)):
        m = quantise_matrices(drawn(4, rows, columns), TILES["mx"], "e4m3", powers=True)
        exact = m.scales.to(torch.float8_e8m0fnu).view(torch.uint8)
        assert torch.equal(arrange_scales(m, MX).flatten(), names["to_blocked"](exact))


def read_scales(scales, scaling, rows, k):
    """The scale of each number of a matrix [rows, k], by its place in memory (cuBLAS, "Block scaling factors")."""
    memory = scales.as_strided((scales.numel(),), (1,)).double()
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(k), indexing="ij")
    if scaling == LONG:
        return memory[column // 128 * rows + row]
    if scaling == SQUARE:
        return memory[row // 128 * (-(-k // 512) * 4) + column // 128]
    if scaling == MX:
        tile, column = row // 128 * -(-k // 128) + column // 128, column // 32 % 4
        return memory[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column]
    return memory[row * 0 if scaling == TENSOR else row]


def by_memory(calls):
    """A kernel that computes in fp64 what its memory holds."""

    def multiply(a, b, a_scales, left, b_scales, right, a_swizzle, b_swizzle, *, output_dtype):
        assert a.is_contiguous() and b.t().is_contiguous()
        assert {a_swizzle, b_swizzle} == {SwizzleType.SWIZZLE_32_4_4 if left == MX else SwizzleType.NO_SWIZZLE}
        calls.append([left, right])
        k = a.shape[1]
        numbers = [
            m.double() * read_scales(scales, how, m.shape[0], k)
            for m, scales, how in ((a, a_scales, left), (b.t(), b_scales, right))
        ]
        return (numbers[0] @ numbers[1].t()).to(output_dtype)

    return multiply


@on_cards
def test_the_kernel_reads_what_is_meant(capability, pair, card, monkeypatch):
    a, b = operands(pair)
    exact = multiply_scaled(a, b, torch.float64, powers=True)
    card(capability)
    monkeypatch.setattr(F, "scaled_mm", by_memory(calls := []))
    assert torch.equal(multiply_scaled(a, b, torch.float32, powers=True), exact.float())
    assert calls == [TAKEN[capability][pair]]
    stacks = [m._replace(values=m.values[None].repeat(3, 1, 1), scales=m.scales[None].repeat(3, 1, 1)) for m in (a, b)]
    assert torch.equal(multiply_scaled(*stacks, torch.float32, powers=True), exact.float().expand(3, -1, -1))
    assert len(calls) == 4, "a matrix of a stack after another"


def test_negative_control_a_kernel_that_reads_in_another_order(card, monkeypatch):
    a, b = operands("block")
    exact = multiply_scaled(a, b, torch.float64, powers=True)
    card(HOPPER)
    monkeypatch.setattr(F, "scaled_mm", by_memory([]))
    turned = a._replace(scales=a.scales.flip(-1))
    assert not torch.equal(multiply_scaled(turned, b, torch.float32, powers=True), exact.float())


STEPS = {"block": HOPPER, "block on Blackwell": BLACKWELL, "mx": BLACKWELL, "row": HOPPER}


@pytest.mark.parametrize("compiled", ["off", pytest.param("on", marks=pytest.mark.full)])
@pytest.mark.parametrize("case", STEPS)
def test_a_step_on_kernels(case, compiled, card, fast, monkeypatch):
    """All products of a layer, both passes, in fp32: what is emulated gives, but for roundings of sums."""
    c = configured(case.split()[0], block=128, d_model=128, length=128, heads=2, global_batch=1, microbatch=1)
    c.precision, c.train.compile = "fp32", compiled
    (emulated,) = run(replace(c))[1]
    card(STEPS[case])
    monkeypatch.setattr(F, "scaled_mm", by_memory(calls := []))
    (result,) = run(c)[1]
    assert len(calls) == 42 + 28 * (compiled == "on"), "three products of seven weights, twice; traced, first again"
    assert result.losses == pytest.approx(emulated.losses, rel=1e-5)
    for name, gradient in emulated.gradients.items():
        assert (result.gradients[name] - gradient).norm() <= 2e-2 * gradient.norm(), name

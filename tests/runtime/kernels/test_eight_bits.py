"""Numbers in 8 bits: the nearest that there are, torchao's scales and values, and products as torch's kernel has."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest
import torch
from torch.nn.functional import ScalingType

from platform.plan.quantisation import Quantisation
from platform.runtime.eight_bits import (
    FORMS,
    ScaledMatrix,
    choose_factors,
    find_tile_maxima,
    multiply_by_kernel,
    multiply_scaled,
    quantise_matrices,
)

TILES = {"tensor": (0, 0), "row": (1, 0), "activation": (1, 128), "weight": (128, 128), "mx": (1, 32)}
TYPES = [torch.float64, torch.float32, torch.bfloat16]


def drawn(seed: int, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of very different sizes, some blocks of them zeros."""
    draw = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-5, 3, (rows, -(-columns // 32)), generator=draw)
    sizes[torch.rand(sizes.shape, generator=draw) < 0.1] = 0.0
    return (torch.randn(rows, columns, generator=draw) * sizes.repeat_interleave(32, 1)[:, :columns]).to(dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", TILES)
def test_each_number_is_the_nearest_that_there_is(kind, form):
    """By all values of the form, in fp64, with the scales as they are."""
    x = drawn(3, 130, 200, torch.float64)
    scaled = quantise_matrices(x, TILES[kind], form, powers=True)
    values = torch.arange(256, dtype=torch.uint8).view(FORMS[form]).double()
    values = values[values.isfinite()].sort().values
    spread = scaled.scales.double()
    for dim, extent in zip((0, 1), TILES[kind], strict=True):
        spread = spread.repeat_interleave(extent or x.shape[dim], dim).narrow(dim, 0, x.shape[dim])
    ratio = x / spread
    distance = (ratio.unsqueeze(-1) - values).abs().amin(-1)
    assert torch.equal((ratio - scaled.values.double()).abs(), distance)
    assert ratio.abs().max() <= values.max(), "nothing is cut off"
    assert torch.equal(torch.exp2(scaled.scales.double().log2().round()), scaled.scales.double())
    assert torch.equal(scaled.decode(torch.float64), scaled.values.double() * spread)
    assert torch.equal(scaled.decode(torch.bfloat16).double(), scaled.decode(torch.float64)), "bf16 holds them"


@pytest.mark.full
@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
@pytest.mark.parametrize("powers", [True, False])
@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_scales_of_tensors_and_rows_are_those_of_torchao(kind, powers, dtype):
    utilities = pytest.importorskip("torchao.float8.float8_utils", reason="no torchao")
    config = pytest.importorskip("torchao.float8.config")
    granularity = config.ScalingGranularity.TENSORWISE if kind == "tensor" else config.ScalingGranularity.AXISWISE
    x = drawn(5, 64, 96, dtype)
    factor = utilities.tensor_to_scale(
        x, torch.float8_e4m3fn, scaling_granularity=granularity, axiswise_dim=-1 if kind == "row" else None,
        round_scales_to_power_of_2=powers,
    )  # fmt: skip
    scaled = quantise_matrices(x, TILES[kind], "e4m3", powers)
    factors = choose_factors(find_tile_maxima(x, TILES[kind]), 448.0, powers)
    nonzero = x.abs().amax(-1, keepdim=True) > 0 if kind == "row" else x.abs().amax() > 0
    assert torch.equal(torch.where(nonzero, factors, 0.0).flatten(), torch.where(nonzero, factor, 0.0).flatten())
    values = utilities.to_fp8_saturated(x.float() * factor, torch.float8_e4m3fn)
    assert torch.equal(scaled.values.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.full
def test_blocks_are_those_of_torchao():
    package = pytest.importorskip("torchao", reason="no torchao")
    source = Path(package.__file__).parent / "prototype" / "blockwise_fp8_training" / "kernels.py"
    wanted = [f for f in ast.parse(source.read_text()).body if getattr(f, "name", "").startswith("torch_blockwise_")]
    names = {"torch": torch, "e4m3_dtype": torch.float8_e4m3fn, "EPS": 1e-12, "Tuple": tuple}
    names["FP8_E4M3_DTYPES"] = [torch.float8_e4m3fn]
    exec(compile(ast.Module(wanted, []), str(source), "exec"), names)  # without the kernels, which need triton
    x = drawn(7, 256, 384)
    for kind in ("activation", "weight"):
        reference = names[f"torch_blockwise_scale_{'act_quant_lhs' if kind == 'activation' else 'weight_quant'}"]
        values, scales = reference(x)
        scaled = quantise_matrices(x, TILES[kind], "e4m3", powers=False)
        assert torch.equal(scaled.values.view(torch.uint8), values.contiguous().view(torch.uint8))
        assert torch.equal(scaled.scales, scales.contiguous())
    values, factors = names["torch_blockwise_scale_act_quant_rhs"](x[:, :128].contiguous())
    scaled = quantise_matrices(x[:, :128].t(), TILES["activation"], "e4m3", powers=False)
    assert torch.equal(scaled.values.t().contiguous().view(torch.uint8), values.contiguous().view(torch.uint8))
    assert torch.equal(scaled.scales.t(), factors)


@pytest.mark.full
@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_mx_is_that_of_torchao(dtype):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="no torchao")
    x = drawn(9, 128, 256, dtype)
    scales, values = mx.to_mx(x, torch.float8_e4m3fn, 32, scaling_mode=mx.ScaleCalculationMode.RCEIL)
    scaled = quantise_matrices(x, TILES["mx"], "e4m3", powers=True)
    assert torch.equal(scaled.values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(scaled.scales.to(torch.float8_e8m0fnu).view(torch.uint8), scales.view(torch.uint8))


@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_the_kernel_is_what_is_emulated(kind):
    """torch's kernel takes scales of tensors and of rows on a CPU too; sums are in fp32 there."""
    x, w = (drawn(n, 48, 160, torch.float32) for n in (1, 2))
    a, b = (quantise_matrices(t, TILES[kind], "e4m3", powers=False) for t in (x, w))
    exact = multiply_scaled(a, b, torch.float64, powers=False)
    bound = 1e-5 * (a.decode(torch.float64).abs() @ b.decode(torch.float64).abs().t())
    scalings = [{"tensor": ScalingType.TensorWise, "row": ScalingType.RowWise}[kind]] * 2
    assert ((multiply_by_kernel(a, b, torch.float32, scalings).double() - exact).abs() <= bound).all()
    assert ((multiply_scaled(a, b, torch.float32, powers=False).double() - exact).abs() <= bound).all()
    wrong = ScaledMatrix(b.values, b.scales.roll(1) if kind == "row" else b.scales * 2, b.tile)
    assert not ((multiply_by_kernel(a, wrong, torch.float32, scalings).double() - exact).abs() <= bound).all()


def test_sums_of_powers_of_two_are_exact():
    """In any order, in fp64: what makes one product bit-equal under every plan."""
    x, w = (drawn(n, 40, 512, torch.float64).clamp(-8, 8) for n in (3, 4))
    a, b = (quantise_matrices(t, tile, "e4m3", powers=True) for t, tile in ((x, (1, 128)), (w, (128, 128))))
    x, w = a.decode(torch.float64), b.decode(torch.float64)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(1))
    parts = [x[:, i] @ w[:, i].t() for i in order.split(64)]
    assert torch.equal(sum(parts), multiply_scaled(a, b, torch.float64, powers=True))


@pytest.mark.parametrize("kind", ["activation", "weight", "mx", "row"])
def test_tiles_do_not_know_each_other(kind):
    """Cut at the borders of tiles, in any part, the same; and beside one that is not finite, which is no number."""
    x, r, (tall, wide) = drawn(11, 384, 384), random.Random(2), TILES[kind]
    whole = quantise_matrices(x, TILES[kind], "e4m3", powers=True)
    for _ in range(10):
        steps = tall or 384, wide or 384
        at = [sorted(r.sample(range(384 // step + 1), 2)) for step in steps]
        where = tuple(slice(a * step, b * step) for (a, b), step in zip(at, steps, strict=True))
        part = quantise_matrices(x[where], TILES[kind], "e4m3", powers=True)
        assert torch.equal(part.decode(torch.float64), whole.decode(torch.float64)[where])
    for bad in (torch.nan, torch.inf, -torch.inf):
        hostile = x.clone()
        hostile[200, 300] = bad
        numbers = quantise_matrices(hostile, TILES[kind], "e4m3", powers=True).decode(torch.float64)
        is_bad = torch.zeros(384, 384, dtype=torch.bool)
        row, column = (n // (e or 384) * (e or 384) for n, e in zip((200, 300), (tall, wide), strict=True))
        is_bad[row : row + (tall or 384), column : column + (wide or 384)] = True
        assert torch.equal(numbers.isnan(), is_bad)
        assert torch.equal(numbers[~is_bad], whole.decode(torch.float64)[~is_bad])


@pytest.mark.parametrize("powers", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_maximum_that_is_no_number_is_seen(bad, powers):
    x = torch.ones(4, 8)
    x[1, 3] = bad
    assert quantise_matrices(x, (0, 0), "e4m3", powers).decode(torch.float32).isnan().all()


def test_nothing_is_nothing():
    for tile in TILES.values():
        scaled = quantise_matrices(torch.empty(0, 256), tile, "e4m3", powers=True)
        assert scaled.decode(torch.float32).shape == (0, 256)
        assert not quantise_matrices(torch.zeros(4, 256), tile, "e4m3", powers=False).decode(torch.float32).any()


def test_tiles_by_scale():
    assert Quantisation("block").tiles == ((1, 128), (128, 128)) and Quantisation("mx", 32).tiles == ((1, 32), (1, 32))
    assert Quantisation("tensor").tiles == ((0, 0), (0, 0)) and Quantisation("row").tiles == ((1, 0), (1, 0))

"""Weights in 4 bits: the paper's values, bitsandbytes' numbers, and each block by itself."""

from __future__ import annotations

import random

import pytest
import torch

from platform.plan.model_types import NF4_BLOCK, NF4_BYTES, NF4_DOUBLE, NF4_UNITS
from platform.runtime import compilation, normal_floats
from platform.runtime.normal_floats import (
    NORMAL_FLOATS,
    average_scales,
    decode_weights,
    encode_weights,
    round_to_normal_floats,
    sum_scales,
)

VALUES = torch.tensor(NORMAL_FLOATS, dtype=torch.float64)
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def drawn(seed: int, blocks: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Weights of very different sizes, some blocks of them zeros."""
    draw = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-6, 3, (blocks, 1), generator=draw)
    sizes[torch.rand(blocks, 1, generator=draw) < 0.1] = 0.0
    return (torch.randn(blocks, NF4_BLOCK, generator=draw) * sizes).flatten().to(dtype)


def test_the_values_are_the_papers():
    """Appendix E: quantiles of a normal distribution, eight above and seven below 0, and 0, by the largest."""
    offset = 0.9677083
    above, below = (torch.special.ndtri(torch.linspace(offset, 0.5, n, dtype=torch.float64)[:-1]) for n in (9, 8))
    wanted = torch.cat((-below, torch.zeros(1), above)).sort().values
    assert torch.allclose(VALUES, wanted / wanted.max(), atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("dtype", TYPES[:3], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_numbers_are_those_of_bitsandbytes(seed, dtype):
    functional = pytest.importorskip("bitsandbytes.functional", reason="no bitsandbytes")
    weights = drawn(seed, 700, dtype)
    codes, state = functional.quantize_4bit(weights, blocksize=NF4_BLOCK, quant_type="nf4")
    stored = encode_weights(weights)
    assert torch.equal(stored[:, 4:].flatten(), codes.flatten())
    assert torch.equal(stored[:, :4].contiguous().view(torch.float32).flatten(), state.absmax)
    assert torch.equal(round_to_normal_floats(weights), functional.dequantize_4bit(codes, state).flatten())


@pytest.mark.parametrize("seed", range(6))
def test_scales_in_8_bits_are_those_of_bitsandbytes(seed):
    """Its values and numbers bit for bit, and its codes: of the definition, which its CPU kernel takes from a table, so
    that it takes a neighbour where two are about as near."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="no bitsandbytes")
    weights = drawn(seed, 256 * 5)
    codes, state = functional.quantize_4bit(weights, blocksize=NF4_BLOCK, quant_type="nf4", compress_statistics=True)
    values = normal_floats._build_scale_values(weights.device)
    assert torch.equal(values, state.state2.code)
    offset = average_scales([sum_scales(weights)], weights.numel())
    assert abs(offset / state.offset.item() - 1) < 2**-22  # a mean in fp32, of which ours is the nearest number
    stored = encode_weights(weights, NF4_DOUBLE, state.offset.item())
    wide, scales = stored[:, :8].contiguous().view(torch.float32), stored[:, 8:264].flatten()
    assert stored.nbytes == 5 * NF4_UNITS[NF4_DOUBLE] and torch.equal(stored[:, 264:].flatten(), codes.flatten())
    assert torch.equal(wide[:, 0], state.state2.absmax) and (wide[:, 1] == state.offset).all()
    # by its own code for types that its kernels do not know
    apart = weights.view(-1, NF4_BLOCK).abs().amax(1) - state.offset
    plain, _ = torch.ops.bitsandbytes.quantize_blockwise.default(apart.double(), values, 256)
    assert torch.equal(scales, plain) and (scales != state.absmax).sum() < 0.01 * len(scales)
    state.absmax = plain
    numbers = functional.dequantize_4bit(codes, state).flatten()
    assert torch.equal(decode_weights(stored, torch.empty_like(weights)), numbers)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_each_scale_is_the_nearest_value_and_no_order_of_parts_changes_the_mean(dtype):
    weights, r = drawn(3, 256 * 4, dtype), random.Random(2)
    scales = weights.float().view(-1, NF4_BLOCK).abs().amax(1)
    offset = average_scales([sum_scales(weights)], weights.numel())
    parts = list(weights.split(NF4_DOUBLE))
    r.shuffle(parts)
    assert average_scales(map(sum_scales, parts), weights.numel()) == offset
    assert offset == scales.double().mean().float().item()
    apart = (scales - offset).view(-1, 256)
    largest, values = apart.abs().amax(1, keepdim=True), normal_floats._build_scale_values(weights.device)
    nearest = (apart / largest).unsqueeze(-1).double().sub(values.double()).abs().argmin(-1)
    plain = encode_weights(weights)
    plain[:, :4] = (values[nearest] * largest + offset).view(-1, 1).view(torch.uint8)
    assert torch.equal(round_to_normal_floats(weights, NF4_DOUBLE), decode_weights(plain, torch.empty_like(weights)))


def test_a_unit_that_is_no_numbers_spoils_no_other():
    weights = drawn(3, 256 * 3).abs() + 1
    weights[NF4_DOUBLE + 5] = float("nan")
    numbers = round_to_normal_floats(weights, NF4_DOUBLE).view(3, -1)
    assert numbers[0].isfinite().all() and not numbers[1].isfinite().any() and numbers[2].isfinite().all()
    zeros = torch.zeros(NF4_DOUBLE)
    assert torch.equal(round_to_normal_floats(zeros, NF4_DOUBLE), zeros)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_each_number_is_the_nearest_value_of_its_block(dtype):
    weights = drawn(5, 300, dtype)
    blocks = weights.float().view(-1, NF4_BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks.double() / scales.double().clip(1e-300)).unsqueeze(-1).sub(VALUES).abs().argmin(-1)
    wanted = (VALUES.float()[nearest] * scales).to(dtype)
    assert torch.equal(round_to_normal_floats(weights).view(-1, NF4_BLOCK), wanted)
    assert encode_weights(weights).nbytes == 300 * NF4_BYTES == weights.numel() * 4.5 / 8


def test_blocks_do_not_know_each_other():
    """By pieces, in any order, and beside a block that is no numbers: the same; and once more, the same."""
    weights, r = drawn(7, 200), random.Random(3)
    whole = encode_weights(weights)
    for _ in range(20):
        first, last = sorted(r.sample(range(201), 2))
        part = weights[first * NF4_BLOCK : last * NF4_BLOCK]
        assert torch.equal(encode_weights(part), whole[first:last])
        assert torch.equal(decode_weights(whole[first:last], torch.empty_like(part)), round_to_normal_floats(part))
    assert torch.equal(encode_weights(round_to_normal_floats(weights)), whole)
    for bad in (torch.nan, torch.inf, -torch.inf):
        hostile = weights.clone()
        hostile[NF4_BLOCK * 3 + 5] = bad
        numbers = round_to_normal_floats(hostile).view(-1, NF4_BLOCK)
        assert not numbers[3].isfinite().any() and numbers.isfinite().all(1).sum() == 199
        others = torch.cat((weights[: NF4_BLOCK * 3], weights[NF4_BLOCK * 4 :]))
        assert torch.equal(torch.cat((numbers[:3], numbers[4:])).flatten(), round_to_normal_floats(others))


def test_nothing_is_nothing():
    assert round_to_normal_floats(torch.empty(0, NF4_BLOCK)).shape == (0, NF4_BLOCK)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled_they_are_the_same_numbers(backend, monkeypatch):
    """By pieces, of which those of one size have one graph; and what autograd has saved counts as unchanged."""
    monkeypatch.setattr(compilation, "BACKEND", backend)
    monkeypatch.setitem(normal_floats.NF4_PIECE, "cpu", 10 * NF4_BLOCK)
    weights = drawn(9, 57)
    stored, make = encode_weights(weights), compilation.compile_region(normal_floats.make_numbers)
    for dtype in TYPES[:2]:
        whole = torch.zeros(weights.numel(), dtype=dtype)
        with torch.no_grad():
            decode_weights(stored, whole.data, make)
        assert torch.equal(whole, decode_weights(stored, torch.empty_like(whole))) and not whole._version

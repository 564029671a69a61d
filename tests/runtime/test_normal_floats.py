"""Weights in 4 bits: the paper's values, bitsandbytes' numbers, and each block by itself."""

from __future__ import annotations

import random

import pytest
import torch

from platform.plan.model_types import NF4_BLOCK, NF4_BYTES
from platform.runtime import compilation, normal_floats
from platform.runtime.normal_floats import NORMAL_FLOATS, decode_weights, encode_weights, round_to_normal_floats

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

"""Random numbers are a function of key and element alone: uniform, normal, and the same in every block."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from platform.runtime import residual
from tests.conftest import ROOT

N = 1 << 18
KEY = residual.derive_key(0, "init", "embedding")


def keep_mask(key, elements, rate) -> torch.Tensor:
    return (residual.random_bits(key, elements) & 0xFFFFFFFF) >= int(rate * 2**32)


def normal(block, shape, key=KEY, std=1.0, dtype=torch.float64) -> torch.Tensor:
    out = torch.full([n for _, n in block], torch.nan, dtype=dtype)
    residual.fill_normal_(out, key, std, block, shape)
    return out


def test_bits_are_uniform():
    """Chi-square of each of the eight bytes over 255 degrees of freedom (mean 255, deviation 23): six deviations."""
    bits = residual.random_bits(KEY, torch.arange(N))
    for byte in range(8):
        count = torch.bincount((bits >> (8 * byte)) & 255, minlength=256).double()
        chi = ((count - N / 256) ** 2 / (N / 256)).sum().item()
        assert 120 < chi < 390, (byte, chi)


def test_neighbouring_elements_and_keys_share_nothing():
    """Half of the bits differ between neighbours and between keys; the parts of a key are kept apart."""
    bits = residual.random_bits(KEY, torch.arange(N))
    for other in (residual.random_bits(KEY, torch.arange(1, N + 1)), residual.random_bits(KEY + 1, torch.arange(N))):
        difference = bits ^ other
        share = sum(((difference >> i) & 1).sum().item() for i in range(64)) / (64 * N)
        assert share == pytest.approx(0.5, abs=6 * 0.5 / math.sqrt(64 * N))
    keys = [
        residual.derive_key(*parts) for parts in [(0, "a"), (1, "a"), (0, "b"), (0, "a", 1), (0, "dropout", 1, "a")]
    ]
    assert len(set(keys)) == len(keys) and all(-(2**63) <= k < 2**63 for k in keys)


def test_normal_numbers():
    x = normal([(0, 512), (0, 512)], [512, 512], std=0.02) / 0.02
    n = x.numel()
    assert abs(x.mean()) < 6 / math.sqrt(n)
    assert x.std() == pytest.approx(1, abs=6 / math.sqrt(2 * n))
    assert (x**3).mean().abs() < 6 * math.sqrt(15 / n)
    assert (x**4).mean() == pytest.approx(3, abs=6 * math.sqrt(96 / n))
    assert x.abs().max() < 6.7  # 32 bits reach sqrt(2 ln 2^33)
    inside = torch.stack([(x.abs() < k).double().mean() for k in (1, 2, 3)])
    assert torch.allclose(inside, inside.new_tensor([0.68269, 0.95450, 0.99730]), atol=6 / math.sqrt(n))
    assert (x[:, 1:] * x[:, :-1]).mean().abs() < 6 / math.sqrt(n)


@st.composite
def blocks(draw):
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    where = []
    for n in shape:
        first = draw(st.integers(0, n - 1))
        where.append((first, draw(st.integers(1, n - first))))
    return shape, where


@given(blocks(), st.sampled_from([1, 7, 1 << 18]))
def test_a_block_is_the_slice_of_the_whole(drawn, chunk):
    """Whatever is drawn at once."""
    shape, block = drawn
    part = tuple(slice(o, o + n) for o, n in block)
    whole = normal([(0, n) for n in shape], shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(residual.RANDOM_DRAWN_AT_ONCE, "cpu", chunk)
        assert torch.equal(normal(block, shape), whole[part])


def test_padding_is_zero():
    whole = normal([(0, 5), (0, 3)], [5, 3])
    padded = normal([(4, 4), (0, 4)], [5, 3])
    assert torch.equal(padded[:1, :3], whole[4:])
    assert not padded[1:].any() and not padded[:, 3:].any()
    assert not normal([(8, 4), (0, 3)], [5, 3]).any()  # a block of nothing but padding


def test_lower_precision_is_rounded_from_the_same_numbers():
    block, shape = [(3, 40), (0, 64)], [64, 64]
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(normal(block, shape, dtype=dtype), normal(block, shape).to(dtype))


def of_the_old_way(key, elements):
    """The same numbers by torch's log and cos."""
    z = residual.random_bits(key, elements)
    u, v = ((z >> 32) & 0xFFFFFFFF).double(), (z & 0xFFFFFFFF).double()
    return ((u + 0.5) * 2.0**-32).log().mul(-2).sqrt() * (v * 2 * math.pi * 2.0**-32).cos()


def test_normal_numbers_are_those_of_box_and_muller():
    elements = torch.arange(N)
    assert (residual.draw_normal(KEY, elements) - of_the_old_way(KEY, elements)).abs().max() < 1e-14


@pytest.mark.parametrize("high", [0, 1, 1 << 31, (1 << 31) - 1, (1 << 32) - 1])
@pytest.mark.parametrize("low", [0, 1, 1 << 30, 1 << 31, 3 << 30, (1 << 32) - 1])
def test_the_ends_of_both_uniform_numbers(high, low, monkeypatch):
    drawn = torch.tensor([high - ((high >> 31) << 32)]) * (1 << 32) + low
    monkeypatch.setattr(residual, "random_bits", lambda key, elements: drawn)
    exact = math.sqrt(-2 * math.log((high + 0.5) / 2**32)) * math.cos(2 * math.pi * low / 2**32)
    assert residual.draw_normal(0, drawn).item() == pytest.approx(exact, rel=1e-14, abs=1e-14)


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()[:16]


def test_numbers_have_the_same_bits_everywhere():
    """Those of one processor, written down; and of each element by itself, backwards, strided, in odd lengths
    at odd offsets, and where denormal numbers are flushed to zero."""
    elements = torch.arange(2048)
    whole = residual.draw_normal(KEY, elements)
    assert digest(whole) == "88aa1bdd087a0321"
    assert digest(keep_mask(KEY, elements, 0.1)) == "82b6df204b6b625a"
    for length in range(1, 70):
        first = 13 * length
        assert torch.equal(residual.draw_normal(KEY, elements[first : first + length]), whole[first : first + length])
    assert torch.equal(residual.draw_normal(KEY, elements.flip(0)), whole.flip(0))
    assert torch.equal(residual.draw_normal(KEY, elements.view(64, 32).t()), whole.view(64, 32).t())
    assert torch.equal(residual.draw_normal(KEY, elements[3::7]), whole[3::7])
    flushed = torch.set_flush_denormal(True)
    try:
        assert not flushed or torch.equal(residual.draw_normal(KEY, elements), whole)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.gpu
def test_numbers_have_the_same_bits_on_a_gpu():
    elements = torch.arange(N)
    for draw in (residual.draw_normal, lambda key, where: keep_mask(key, where, 0.1)):
        assert torch.equal(draw(KEY, elements.cuda()).cpu(), draw(KEY, elements))


OTHER_KERNELS = """
import os, sys
if sys.argv[1] == "before":
    os.environ["MKL_VML_DEBUG_CPU_TYPE"] = "9"
import torch
from platform.runtime import communicator as base
from platform.runtime.kernels import residual as random
os.environ["MKL_VML_DEBUG_CPU_TYPE"] = "9"
from tests.runtime.kernels.test_random import KEY, digest, of_the_old_way
elements = torch.arange(2048)
print(digest(random.draw_normal(KEY, elements)), digest(of_the_old_way(KEY, elements)))
"""


@pytest.mark.skipif(
    not torch.backends.mkl.is_available() or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="MKL's kernels for AVX2",
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_neither_mkls_choice_of_kernels_nor_a_thread_that_sees_it_unfinished_changes_a_number(when):
    """9 is what a thread reads, on processors with AVX-512, while another one's first call of MKL's vector math is not
    done; set in the environment, everybody does. `platform.runtime.communicator` makes that first call at import:
    set `after`, it changes nothing. Set `before`, it takes the old way's digits (the control), not `draw_normal`'s."""
    environment = {k: v for k, v in os.environ.items() if k != "MKL_VML_DEBUG_CPU_TYPE"}
    command = [sys.executable, "-c", OTHER_KERNELS, when]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    digests = [digest(draw(KEY, torch.arange(2048))) for draw in (residual.draw_normal, of_the_old_way)]
    printed = done.stdout.split()
    assert printed[0] == digests[0]
    assert (printed[1] == digests[1]) == (when == "after")


def test_elements_are_global():
    assert residual.element_numbers([(1, 2), (2, 3)], [10, 1]).tolist() == [[12, 13, 14], [22, 23, 24]]


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_the_share_that_dropout_keeps(rate):
    keep = keep_mask(residual.derive_key(0, "dropout", 1, "embedding"), torch.arange(N), rate).double()
    assert keep.mean() == pytest.approx(1 - rate, abs=6 * math.sqrt(rate * (1 - rate) / N) + 1e-12)
    other = keep_mask(residual.derive_key(0, "dropout", 2, "embedding"), torch.arange(N), rate).double()
    assert (keep * other).mean() == pytest.approx((1 - rate) ** 2, abs=6 / math.sqrt(N))


MEMORY = """
from tests.harness.threads import ThreadGroups, ThreadWorld
from platform.predict.make_plan import make_plan
from platform.train.rank_parameters import Weights
from tests.harness.oracle import configure

def memory(field):  # ru_maxrss would start at the size of the process that started this one
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

def weights(vocab):
    plan = make_plan(configure("1d", {"t": 2}, layers=1, d_model=256, vocab=vocab))
    return Weights(plan, ThreadGroups(plan.mesh, 1, ThreadWorld()), 0)

small = weights(4096)  # what torch allocates once
before = memory('VmRSS')
large = weights(200_000)
peak = memory('VmHWM')
print((peak - before) / sum(w.nbytes for w in large.master.values()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_initialisation_needs_little_more_than_the_workers_own_blocks():
    """At most 1.1 times 200 MB, half of the embedding: whole tensors are nowhere."""
    done = subprocess.run([sys.executable, "-c", MEMORY], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert 0.95 < float(done.stdout) <= 1.1

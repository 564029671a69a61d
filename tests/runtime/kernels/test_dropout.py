"""Dropout's masks are those of its key and elements, however they are drawn; nothing is saved, and little is held."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from platform.runtime import residual
from platform.runtime.residual import (
    DRAWN_AT_ONCE,
    Drawing,
    apply_draw_in_pieces,
    apply_dropout,
    apply_jitter,
    drop_elements,
    tile_pieces,
)

BLOCK, STRIDES, RATE = [(3, 12), (1, 4), (0, 20)], (20, 700, 1), 0.3
KEY = residual.derive_key(0, "dropout", 1, "layers.0.mlp.residual")


def drawing(first: int = 0) -> Drawing:
    return Drawing(
        residual.random_counters([torch.arange(i, i + n) for i, n in BLOCK], STRIDES),
        residual.random_start(KEY, first, "cpu"),
        RATE,
    )


def by_elements(x: torch.Tensor, first: int = 0) -> torch.Tensor:
    mask = (residual.random_bits(KEY, residual.element_numbers(BLOCK, STRIDES) + first) & 0xFFFFFFFF) >= int(
        RATE * 2**32
    )
    return torch.where(mask, x * (1 / (1 - RATE)), 0)


@pytest.mark.parametrize("first", [0, 5600, 2**40])
@pytest.mark.parametrize("at_once", [1, 7, 20, 81, 960, 1 << 15])
def test_masks_are_those_of_the_elements(at_once, first, monkeypatch):
    monkeypatch.setitem(DRAWN_AT_ONCE, "cpu", at_once)
    x = torch.randn(12, 4, 20, dtype=torch.float64)
    assert torch.equal(apply_draw_in_pieces(x, *drawing(first)), by_elements(x, first))
    assert torch.equal(drop_elements(x, *drawing(first)), by_elements(x, first))
    turned = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)  # laid out otherwise in memory
    assert torch.equal(apply_draw_in_pieces(turned, *drawing(first)), by_elements(x, first))


@pytest.mark.parametrize("shape", [(), (5,), (3, 4, 7), (1, 90), (4, 1, 1, 9)])
@pytest.mark.parametrize("most", [1, 3, 10, 64])
def test_pieces_tile_a_tensor(shape, most):
    seen = torch.zeros(shape)
    for where in tile_pieces(shape, most):
        part = seen
        for dim, (first, n) in enumerate(where):
            part = part.narrow(dim, first, n)
        assert part.numel() <= most
        part += 1
    assert torch.equal(seen, torch.ones(shape))


@pytest.mark.parametrize("draw", [drop_elements, apply_draw_in_pieces])
def test_the_gradient_has_the_mask_and_nothing_is_saved(draw):
    x = torch.randn(12, 4, 20, dtype=torch.float64, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = apply_dropout(x, drawing(), draw)
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    assert torch.equal(x.grad, by_elements(weights)) and not kept


class Largest(TorchDispatchMode):
    """Bytes of the largest tensors that operations give, those of the result's shape apart."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.nbytes = shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape != self.shape:
            self.nbytes = max(self.nbytes, out.untyped_storage().nbytes() if out.dtype == torch.int64 else 0)
        return out


def test_integers_stay_in_the_cache():
    """Eager too: those of a whole activation would take 8 bytes per element several times."""
    block = [(0, 64), (0, 16), (0, 512)]
    shape = torch.Size(n for _, n in block)
    d = Drawing(
        residual.random_counters([torch.arange(i, i + n) for i, n in block], (512, 64 * 512, 1)),
        residual.random_start(KEY, 0, "cpu"),
        RATE,
    )
    x = torch.randn(shape)
    for draw, most in ((apply_draw_in_pieces, 8 * DRAWN_AT_ONCE["cpu"]), (drop_elements, 0)):
        with Largest(shape if draw is apply_draw_in_pieces else None) as seen:
            draw(x, *d)
        assert seen.nbytes == (most or 8 * prod(shape))  # the control: as a whole, all of it


@pytest.mark.parametrize("at_once", [7, 1 << 15])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_jitter_is_drawn_by_elements_too(dtype, at_once, monkeypatch):
    """Uniform in 1 - rate to 1 + rate; the gradient has the factors of the forward pass."""
    monkeypatch.setitem(DRAWN_AT_ONCE, "cpu", at_once)
    x = torch.randn(12, 4, 20, dtype=dtype).requires_grad_()
    half = (residual.random_bits(KEY, residual.element_numbers(BLOCK, STRIDES)) & 0xFFFFFFFF).double() / 2**32
    factors = 1 + RATE * (2 * half - 1)
    y = apply_jitter(x, drawing())
    assert torch.allclose(y.double(), x.double() * factors, rtol=2 * torch.finfo(dtype).eps, atol=0)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(gradient.double(), factors, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert abs(factors.mean() - 1) < 0.02 and factors.min() < 1 - 0.98 * RATE and factors.max() > 1 + 0.98 * RATE

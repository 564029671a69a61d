"""Products of experts: a batch of matrix products, for operands and results in any order of neighbours."""

from __future__ import annotations

import pytest
import torch

from platform.runtime import products

SIZES = {"experts": 3, "batch": 2, "slots": 5, "d_model": 4, "d_ff": 6}
UP = ("experts batch slots d_model", "experts d_ff d_model", "experts batch slots d_ff")
FORWARD = {
    "up": UP,
    "down": ("experts batch slots d_ff", "experts d_model d_ff", "experts batch slots d_model"),
    "gradient of the slots": ("experts batch slots d_ff", "experts d_ff d_model", "experts batch slots d_model"),
    "gradient of the weights": ("experts batch slots d_model", "experts batch slots d_ff", "experts d_ff d_model"),
    "the other way round": ("experts batch slots d_model", "experts batch slots d_ff", "experts d_model d_ff"),
}


@pytest.mark.parametrize("name", FORWARD)
def test_equals_einsum(name, monkeypatch):
    a, b, out = (tuple(dims.split()) for dims in FORWARD[name])
    x, y = (torch.randn([SIZES[d] for d in dims], dtype=torch.float64) for dims in (a, b))
    letters = {d: chr(ord("a") + i) for i, d in enumerate(SIZES)}
    wanted = torch.einsum(
        ",".join("".join(map(letters.get, dims)) for dims in (a, b)) + "->" + "".join(map(letters.get, out)), x, y
    )
    monkeypatch.setattr(torch, "einsum", None)  # not needed
    multiply = products.local_einsum_function(a, b, out)
    assert torch.allclose(multiply(x, y), wanted, rtol=1e-12, atol=1e-13)
    into = torch.ones_like(wanted)
    assert multiply(x, y, into=into) is into and torch.allclose(into, wanted + 1, rtol=1e-12, atol=1e-13)
    assert torch.allclose(multiply(x, y, into=into, fresh=True), wanted, rtol=1e-12, atol=1e-13)
    wide = torch.ones_like(wanted)
    narrow = multiply(x.float(), y.float(), into=wide)
    summed = multiply(x.abs(), y.abs())  # what rounding to fp32 is a share of, also where products cancel
    assert narrow is wide and ((wide - 1 - wanted).abs() <= 1e-6 * summed).all()


def test_a_dim_of_one_element_that_an_operand_alone_has():
    """The gradient of a gate, of which a product sums the one element."""
    x, y = (torch.randn(5, 2, 4, dtype=torch.float64) for _ in range(2))
    dims = ("length", "batch", "d_model")
    multiply, wanted = products.local_einsum_function(dims, dims, ("length", "batch", "gates")), (x * y).sum(2, True)
    into = torch.ones_like(wanted)
    assert torch.allclose(multiply(x, y), wanted, rtol=1e-12, atol=1e-13)
    assert multiply(x, y, into=into) is into and torch.allclose(into, wanted + 1, rtol=1e-12, atol=1e-13)

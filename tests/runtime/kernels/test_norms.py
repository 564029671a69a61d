"""RMSNorm, and LayerNorm of 16 bits, as they are computed on a CPU, against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from platform.plan.layout import Mesh
from platform.runtime import statistics
from platform.runtime.communicator import SingleRank

GAINS = {"rows": (8,), "heads": (4,), "all heads": (2, 4)}


def results(compute, dims, dtype=torch.float64):
    """Result and gradients of a norm of [length, batch, *dims] that does not lie in one piece."""
    draw = torch.Generator().manual_seed(3)
    shape = (5, 3, 2, 4) if dims != (8,) else (5, 3, 8)
    whole = torch.randn(*shape[:-1], 2 * shape[-1], generator=draw, dtype=torch.float64).to(dtype)
    x = whole[..., : shape[-1]].transpose(0, 1).requires_grad_()
    gain = torch.randn(dims, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    out = compute(x, gain, 1e-2)
    weights = torch.randn(out.shape, generator=draw, dtype=torch.float64).to(dtype)
    return out.detach(), *torch.autograd.grad((out * weights).sum(), (x, gain))


def ours(x, gain, eps):
    return statistics.apply_norm(x, gain, None, "rmsnorm", eps, SingleRank(Mesh.arrange_axes({"t": 1})), ())


@pytest.mark.parametrize("name", GAINS)
def test_equals_torch(name):
    actual = results(ours, GAINS[name])
    expected = results(lambda x, g, eps: F.rms_norm(x, g.shape, g, eps), GAINS[name])
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_16_bits_are_computed_in_32():
    """What comes and what goes is in 16 bits, no further from the result of 64 than by their last digit."""
    actual, expected = results(ours, (8,), torch.bfloat16), results(ours, (8,))
    assert all(x.dtype == torch.bfloat16 for x in actual)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2**-5, atol=2**-5)


def layer_norm(compute, rows, dtype):
    """LayerNorm of rows, and gradients of all that it reads; numbers are those that 16 bits have."""
    draw = torch.Generator().manual_seed(4)
    numbers = [torch.randn(n, 64, generator=draw).bfloat16() for n in (rows, 1, 1, rows)]
    x, gain, bias, weights = (
        n.to(dtype).requires_grad_() for n in (numbers[0], *(n[0] for n in numbers[1:3]), numbers[3] + 0.5)
    )
    out = compute(x, gain, bias)
    return out.detach(), *torch.autograd.grad((out * weights).sum(), (x, gain, bias))


def ours_of_layers(x, gain, bias):
    return statistics.apply_norm(x, gain, bias, "layernorm", 1e-5, SingleRank(Mesh.arrange_axes({"t": 1})), ())


def test_16_bits_are_summed_in_32_over_many_rows():
    """LayerNorm's gradients of gain and bias; the negative control is torch's own."""
    exact = layer_norm(lambda x, g, b: F.layer_norm(x, g.shape, g, b), 8192, torch.float64)
    of_torch = layer_norm(lambda x, g, b: F.layer_norm(x, g.shape, g, b), 8192, torch.bfloat16)
    of_ours = layer_norm(ours_of_layers, 8192, torch.bfloat16)
    errors = [
        [float((x.double() - y).norm() / y.norm()) for x, y in zip(of, exact, strict=True)]
        for of in (of_ours, of_torch)
    ]
    assert max(errors[0]) < 2**-8, errors
    assert errors[1][3] > 0.1, "torch sums in 32 bits too: `_LayerNorm` is no longer needed"


def test_negative_control_a_gradient_without_the_statistic(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "addcmul_", lambda self, *_, **__: self)
    actual, expected = results(ours, (8,)), results(lambda x, g, eps: F.rms_norm(x, g.shape, g, eps), (8,))
    assert (actual[1] - expected[1]).abs().max() > 1e-3

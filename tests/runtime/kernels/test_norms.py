"""RMSNorm as it is computed on a CPU, against torch's."""

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
    found, expected = results(ours, GAINS[name]), results(lambda x, g, eps: F.rms_norm(x, g.shape, g, eps), GAINS[name])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_16_bits_are_computed_in_32():
    """What comes and what goes is in 16 bits, no further from the result of 64 than by their last digit."""
    found, expected = results(ours, (8,), torch.bfloat16), results(ours, (8,))
    assert all(x.dtype == torch.bfloat16 for x in found)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2**-5, atol=2**-5)


def test_negative_control_a_gradient_without_the_statistic(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "addcmul_", lambda self, *_, **__: self)
    found, expected = results(ours, (8,)), results(lambda x, g, eps: F.rms_norm(x, g.shape, g, eps), (8,))
    assert (found[1] - expected[1]).abs().max() > 1e-3

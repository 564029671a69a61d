"""Products of matrices in 8 bits by the kernels of a GPU, beside what they stand for; no GPU has run this yet."""

from __future__ import annotations

import pytest
import torch

from platform.runtime.eight_bits import ScaledMatrix, choose_scalings, multiply_by_kernel, multiply_scaled
from tests.runtime.kernels.test_scaled_kernels import PAIRS, operands

pytestmark = pytest.mark.gpu
SHAPES = [(128, 256, 640), (48, 384, 1024), (4096, 1024, 2048)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_the_kernel_is_what_is_emulated(pair, shape, dtype):
    """To the roundings of its sums; scales of other tiles are seen."""
    a, b = (m._replace(values=m.values.cuda(), scales=m.scales.cuda()) for m in operands(pair, shape))
    if (scalings := choose_scalings(a, b, dtype, True)) is None:
        pytest.skip("no kernel of this GPU takes such scales, or sides")
    x, y = (m.decode(torch.float64) for m in (a, b))
    bound = 2**-7 * (x.abs() @ y.abs().mT)
    exact = x @ y.mT
    assert ((multiply_scaled(a, b, dtype, True).double() - exact).abs() <= bound).all()
    wrong = ScaledMatrix(a.values, a.scales.roll(1, 0) * 2, a.tile)
    assert not ((multiply_by_kernel(wrong, b, dtype, scalings).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("pair", PAIRS)
def test_compiled_products_are_the_same(pair):
    """Scales that a compiler's kernel writes lie as the kernel of the product reads them."""
    a, b = (m._replace(values=m.values.cuda(), scales=m.scales.cuda()) for m in operands(pair))
    multiply = torch.compile(lambda *tensors: multiply_scaled(
        ScaledMatrix(*tensors[:2], a.tile), ScaledMatrix(*tensors[2:], b.tile), torch.bfloat16, True
    ))  # fmt: skip
    actual = multiply(a.values, a.scales, b.values, b.scales)
    torch.testing.assert_close(actual, multiply_scaled(a, b, torch.bfloat16, True), rtol=2**-6, atol=0)

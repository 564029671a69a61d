"""Weighted sums of rows by index, and the gradients of the weights: as plain sums say, in every type, always alike."""

from __future__ import annotations

import pytest
import torch

from platform.runtime.expert_rows import products_of_rows, sum_weighted_rows

TYPES = [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)]


def drawn(rows_type: torch.dtype, weights_type: torch.dtype):
    """Rows, indices [token, sequence, place] with some -1, and weights, 0 where there is no row."""
    rows, at = torch.randn(11, 8).to(rows_type), torch.randint(-1, 11, (5, 3, 4))
    return rows, at, torch.rand(at.shape).to(weights_type).masked_fill_(at < 0, 0)


@pytest.mark.parametrize(("rows_type", "weights_type"), TYPES, ids=str)
def test_equal_plain_sums(rows_type, weights_type):
    rows, at, weights = drawn(rows_type, weights_type)
    loose = {"rtol": 1e-12, "atol": 1e-12} if rows_type == torch.float64 else {"rtol": 1e-2, "atol": 1e-2}
    wanted = sum(weights[..., i, None].double() * rows.double()[at[..., i].clamp_min(0)] for i in range(4))
    sums = sum_weighted_rows(rows, at, weights)
    assert sums.dtype == rows_type and torch.allclose(sums.double(), wanted, **loose)
    assert torch.equal(sums, sum_weighted_rows(rows, at, weights))
    factors = torch.randn(5, 3, 8).to(rows_type)
    products = products_of_rows(rows, at, factors)
    each = (rows.double()[at.clamp_min(0)] * factors.double().unsqueeze(-2)).sum(-1)
    assert products.dtype == weights_type and torch.allclose(products.double(), each, **loose)


def test_narrow_rows_are_added_in_the_type_of_the_weights():
    """In bf16 alone, 256 + 1 is 256."""
    rows = torch.tensor([[256.0], [1.0]], dtype=torch.bfloat16)
    at, weights = torch.tensor([[0, 1, 1, 1, 1]]), torch.ones(1, 5)
    assert sum_weighted_rows(rows, at, weights).item() == 260.0


def test_a_row_that_is_not_there_counts_nothing():
    rows = torch.full((2, 3), 7.0)
    assert not sum_weighted_rows(rows, torch.tensor([[-1, -1]]), torch.zeros(1, 2)).any()

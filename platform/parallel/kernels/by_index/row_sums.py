"""Sums of rows at given indices, with weights, and what the weights' gradients are: a kernel of torch for all places of
a token, one pass over the rows. No sum depends on the order in which threads add: a place comes after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.parallel.kernels.statistics import widened


def sum_of_rows(rows: Tensor, at: Tensor, weights: Tensor) -> Tensor:
    """Return the sum [.., d] of the `rows` [n, d] at the indices `at` [.., places], times `weights` [.., places], in
    whose type they are added, one place after the other. Where an index is -1, the weight is 0."""
    at = at.clamp_min(0)
    if weights.dtype == rows.dtype:
        found = F.embedding_bag(at.flatten(0, -2), rows, mode="sum", per_sample_weights=weights.flatten(0, -2))
        return found.view(*at.shape[:-1], rows.shape[-1])
    total = torch.zeros((*at.shape[:-1], rows.shape[-1]), dtype=weights.dtype, device=rows.device)
    for index, weight in zip(at.unbind(-1), weights.unbind(-1), strict=True):
        total.addcmul_(_rows(rows, index).to(total.dtype), weight.unsqueeze(-1))
    return total.to(rows.dtype)


def weighted_rows(rows: Tensor, at: Tensor, weights: Tensor) -> Tensor:
    """Return the `rows` [n, d] at the indices `at` [m], times `weights` [m], in the type of the rows."""
    if weights.dtype == rows.dtype:
        return sum_of_rows(rows, at.unsqueeze(-1), weights.unsqueeze(-1))
    found = rows.index_select(0, at)
    found *= weights.unsqueeze(-1)
    return found


def products_of_rows(rows: Tensor, at: Tensor, factors: Tensor) -> Tensor:
    """Return the gradient [.., places] of the weights of `sum_of_rows`, in the type of statistics: scalar products of
    the rows at the indices `at` with `factors` [.., d], the sum's gradient; index -1 stands for any row."""
    at = at.clamp_min(0)
    if widened(rows) is not rows:
        found = [(widened(_rows(rows, index)) * widened(factors)).sum(-1) for index in at.unbind(-1)]
        return torch.stack(found, -1)
    begins = torch.arange(0, at.numel(), at.shape[-1], device=at.device)
    owner = torch.arange(len(begins), device=at.device).repeat_interleave(at.shape[-1], output_size=at.numel())
    kernel = torch.ops.aten._embedding_bag_per_sample_weights_backward  # torch differentiates its own sum by it
    return kernel(factors.reshape(-1, rows.shape[-1]), rows, at.flatten(), begins, owner, 0).view(at.shape)


def _rows(rows: Tensor, at: Tensor) -> Tensor:
    """Return the rows [n, d] at the indices `at`, as a tensor [*at, d]."""
    return rows.index_select(0, at.flatten()).view(*at.shape, -1)

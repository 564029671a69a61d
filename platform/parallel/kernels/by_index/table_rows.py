"""Rows of a parameter by index, whose gradient is added to few rows of a large table, and to no other memory."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.parallel.kernels.leaves import accumulates, add_computed


class _Rows(torch.autograd.Function):
    """Autograd function behind `rows` where the table is a leaf: its gradient is added where that stays."""

    @staticmethod
    def forward(ctx, table: Tensor, ids: Tensor):
        """Return the rows of the embedding table at `ids`."""
        ctx.table = table
        ctx.save_for_backward(ids)
        return F.embedding(ids, table.reshape(table.shape[0], -1)).view(*ids.shape, *table.shape[1:])

    @staticmethod
    def backward(ctx, gradient):
        """Add the rows' gradient to the sum of the table's gradients, at `ids`."""
        (ids,) = ctx.saved_tensors
        add_computed(ctx.table, partial(_scattered, ctx.table, ids, gradient))
        return None, None


def _scattered(table: Tensor, ids: Tensor, gradient: Tensor, into: Tensor | None, fresh: bool) -> Tensor:
    """Add the gradient of an embedding table's rows at `ids` to `into` (zeros if `fresh` or None); return it."""
    if into is None:
        into = torch.zeros_like(table, requires_grad=False)
    elif fresh:
        into.zero_()
    into.view(len(table), -1).index_add_(0, ids.flatten(), gradient.reshape(ids.numel(), -1).to(into.dtype))
    return into


def rows(table: Tensor, ids: Tensor) -> Tensor:
    """Return the rows of an embedding `table` [rows, ...] at the indices `ids`, as a tensor [*ids, ...]."""
    if accumulates(table) and table.device.type == "cpu":  # on a GPU, torch's kernel adds in a fixed order and in fp32
        return _Rows.apply(table, ids)
    return F.embedding(ids, table.reshape(table.shape[0], -1)).view(*ids.shape, *table.shape[1:])

"""Products of rows of several experts, packed one expert after the other, with the matrices of their experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.parallel.kernels.products import Dims, add_product

ALIGNED = 16  # bytes by which torch's grouped product wants matrices' rows to begin


class Groups(Protocol):
    """Groups of rows, one for each expert: how many rows each has, in host memory, and where each ends, int32 [experts]
    on the device."""

    @property
    def each(self) -> Sequence[int]:
        """Return the number of rows of each expert."""

    @property
    def ends(self) -> Tensor:
        """Return the first row that is not of each expert or one before."""


def grouped_einsum(groups: Groups, a: Dims, b: Dims, out: Dims) -> Callable[..., Tensor]:
    """Return `local_einsum` of rows [rows, d] of dims `a` with matrices of their experts [experts, ..] of dims `b`, or
    of two activations of the same rows: `out` then has a matrix for each expert, 0 where it has no rows."""
    matrices = "rows" in b
    turned = (out[1] == a[1]) if matrices else (b[2] == a[1])

    def product(
        x: Tensor, y: Tensor, bias: Tensor | None = None, into: Tensor | None = None, fresh: bool = False
    ) -> Tensor:
        """Return the product, or add it to `into`, which it overwrites if `fresh`."""
        assert bias is None
        if matrices:
            x, y = (x, y) if turned else (y, x)
            shape: tuple[int, ...] = (len(groups.each), x.shape[1], y.shape[1])
            x = x.t()
        else:
            y = y.transpose(1, 2) if turned else y
            shape = (x.shape[0], y.shape[2])
        if in_one_kernel(x, y):
            found = F.grouped_mm(x, y, offs=groups.ends)
            return found if into is None else into.copy_(found) if fresh else into.add_(found)
        fresh, there = fresh or into is None, x.new_empty(shape) if into is None else into
        for expert, (end, n) in enumerate(zip(accumulate(groups.each), groups.each, strict=True)):
            rows = slice(end - n, end)
            left, right = (x[:, rows], y[rows]) if matrices else (x[rows], y[expert])
            add_product(there[expert if matrices else rows], left, right, fresh)
        return there

    return product


def in_one_kernel(x: Tensor, y: Tensor) -> bool:
    """Return True if torch has a kernel for all products of groups of x and y together: on GPUs, in bf16. Elsewhere its
    own is a loop too, which takes fewer types."""
    wide = [max(t.stride()) * t.element_size() for t in (x, y)]
    return x.is_cuda and x.dtype == torch.bfloat16 and not any(n % ALIGNED for n in wide)

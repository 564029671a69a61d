"""Clipping where a rank holds only a part of the model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def clip(gradients: Iterable[Tensor], counted: Iterable[Tensor], most: float, group: dist.ProcessGroup | None) -> None:
    """Scale `gradients` in place so that the norm of the whole model's is at most `most`. `counted`: those of them that
    no other rank of `group` counts."""
    counted = list(counted)
    squares = torch.stack(torch._foreach_norm(counted)).square().sum() if counted else torch.zeros(())
    dist.all_reduce(squares, group=group)
    torch._foreach_mul_(list(gradients), torch.clamp(most / (squares.sqrt() + 1e-6), max=1.0))

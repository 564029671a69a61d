"""Chunks: the flattened block of a parameter, padded with zeros, in equal parts, one per rank along the sharding axes.

`Plan.shard` says which elements a rank's shard has.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch.nn.functional as F
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.plan.core.plan import Plan
from platform.plan.language.layout import padded


def flatten(block: Tensor, parts: int) -> Tensor:
    """[elements], padded with zeros to a multiple of `parts`."""
    missing = padded(block.numel(), parts) - block.numel()
    return F.pad(block.flatten(), (0, missing)) if missing else block.flatten()


def unflatten(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """The block of `shape` out of what `flatten` made of it: a view of `flat` where it is contiguous."""
    return flat.flatten()[: prod(shape)].view(shape)


def own(plan: Plan, communicator: Communicator, block: Tensor) -> Tensor:
    """A copy of this rank's shard [elements] of a parameter's local block."""
    parts = plan.mesh.extent(plan.sharded)
    return flatten(block, parts).view(parts, -1)[communicator.index(plan.sharded)].clone()

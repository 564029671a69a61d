"""Shards: equal parts of a parameter's flattened block, padded with zeros, one per rank along the sharding axes.

`Plan.shard_range` gives the elements of a rank's shard.
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
    """Flatten a block to [elements], padded with zeros to a multiple of `parts`."""
    missing = padded(block.numel(), parts) - block.numel()
    return F.pad(block.flatten(), (0, missing)) if missing else block.flatten()


def unflatten(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """Restore the block of `shape` from the result of `flatten`: a view of `flat` if that is contiguous."""
    return flat.flatten()[: prod(shape)].view(shape)


def own(plan: Plan, communicator: Communicator, block: Tensor) -> Tensor:
    """Copy this rank's shard [elements] of a parameter's local block."""
    parts = plan.mesh.extent(plan.sharded)
    return flatten(block, parts).view(parts, -1)[communicator.index(plan.sharded)].clone()

"""Equal parts of a flattened local block, padded with zeros, one per rank along some axes: the part kept or sent of a
tensor that ranks replicate."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch.nn.functional as F
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.plan.language.layout import padded


def flatten_padded(block: Tensor, parts: int) -> Tensor:
    """Flatten a local block to [elements], padded with zeros to a multiple of `parts`, for equal shards."""
    missing = padded(block.numel(), parts) - block.numel()
    return F.pad(block.flatten(), (0, missing)) if missing else block.flatten()


def unflatten_padded(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """Restore the block of `shape` from `flat`, a gathered `flatten_padded`: a view if `flat` is contiguous."""
    return flat.flatten()[: prod(shape)].view(shape)


def own_part(communicator: Communicator, block: Tensor, axes: Sequence[str]) -> Tensor:
    """Copy this rank's part [elements] of a block that the ranks along `axes` hold alike: flattened, padded with zeros
    and divided equally in the order of their index."""
    parts = communicator.mesh.extent(axes)
    return flatten_padded(block, parts).view(parts, -1)[communicator.index(axes)].clone()

"""Tensors that several ranks of a stage replicate, kept or sent as one part per rank and gathered again: equal parts of
the flattened local block, padded with zeros."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch.nn.functional as F
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.parallel.sharding.convert import absent, convert
from platform.plan.communication.rule import Step


def keep_part(communicator: Communicator, x: Tensor, axes: Sequence[str], elements: int) -> Tensor:
    """Return a copy of this rank's part [elements] of the local tensor x, flattened and padded, where the ranks along
    `axes` hold equal x: kept for recomputation, or sent to another stage, in place of x. `elements`: size of the part,
    as planned.

    Returns x itself if `axes` is empty or x is absent (empty).
    """
    if not axes or absent(x):
        return x
    parts = communicator.mesh.extent(axes)
    return flatten_padded(x, parts * elements).view(parts, -1)[communicator.index(axes)].clone()


def gather_parts(communicator: Communicator, part: Tensor, axes: tuple[str, ...], shape: Sequence[int]) -> Tensor:
    """Gather the parts that `keep_part` made of equal tensors into the whole tensor of `shape`, on every rank along
    `axes`. Returns `part` itself if `axes` is empty or the part is absent (empty)."""
    if not axes or absent(part):
        return part
    return unflatten_padded(convert(communicator, part, [Step("all_gather", axes)]).wait(), shape)


def flatten_padded(block: Tensor, elements: int) -> Tensor:
    """Flatten a local block to [elements], padded with zeros, for equal shards."""
    missing = elements - block.numel()
    return F.pad(block.flatten(), (0, missing)) if missing else block.flatten()


def unflatten_padded(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """Restore the block of `shape` from `flat`, a gathered `flatten_padded`: a view if `flat` is contiguous."""
    return flat.flatten()[: prod(shape)].view(shape)

"""Tensors that several ranks of a stage replicate, kept or sent as one part per rank and gathered again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.parallel.sharding.convert import absent, convert
from platform.parallel.sharding.shards import own_part, unflatten_padded
from platform.plan.communication.rule import Step


def keep_part(communicator: Communicator, x: Tensor, axes: Sequence[str]) -> Tensor:
    """Return a copy of this rank's part [elements] of the local tensor x, flattened and padded, where the ranks along
    `axes` hold equal x. It is kept for recomputation, or sent to another stage, in place of x.

    Returns x itself if `axes` is empty or x is absent (empty).
    """
    return x if not axes or absent(x) else own_part(communicator, x, axes)


def gather_parts(communicator: Communicator, part: Tensor, axes: tuple[str, ...], shape: Sequence[int]) -> Tensor:
    """Gather the parts that `keep_part` made of equal tensors into the whole tensor of `shape` on every rank along
    `axes`. Returns `part` itself if `axes` is empty or the part is absent (empty)."""
    if not axes or absent(part):
        return part
    return unflatten_padded(convert(communicator, part, [Step("all_gather", axes)]).wait(), shape)

"""Tensors that several ranks of a stage replicate, kept or sent as one part per rank and gathered again."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch.nn.functional as F
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.parallel.sharding.convert import absent, convert
from platform.plan.communication.rule import Step


def scatter(communicator: Communicator, x: Tensor, axes: Sequence[str], elements: int) -> Tensor:
    """Return a copy of this rank's part [elements] of x, flattened and padded; the ranks along `axes` hold equal x.

    Returns x itself without axes or if x is absent."""
    if not axes or absent(x):
        return x
    whole = F.pad(x.flatten(), (0, elements * communicator.mesh.extent(axes) - x.numel()))
    return whole.narrow(0, communicator.index(axes) * elements, elements).clone()


def gather(communicator: Communicator, part: Tensor, axes: tuple[str, ...], shape: Sequence[int]) -> Tensor:
    """Gather the parts of `scatter` into the whole tensor of `shape` on every rank along `axes`."""
    if not axes or absent(part):
        return part
    return convert(communicator, part, [Step("all_gather", axes)]).wait()[: prod(shape)].view(*shape)

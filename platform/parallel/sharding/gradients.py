"""The norm of the gradient, of which each rank counts its part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.plan.core.plan import Plan

ELEMENTS_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 24}  # to be reduced: what fits a cache, or pays a launch


def counts_here(communicator: Communicator, axes: Iterable[str]) -> bool:
    """Return True if this rank counts its part in a sum over all ranks (loss, gradient norm) of a quantity split over
    `axes` and replicated over all other axes of its stage: of the replicas, the one at index 0 counts."""
    split = {"stage", *axes}
    return all(i == 0 for axis, i in communicator.coordinates.items() if axis not in split)


@torch.no_grad()
def squared_norm(plan: Plan, communicator: Communicator, gradients: Mapping[str, Tensor]) -> Tensor:
    """Return this rank's part of the squared 2-norm of the whole model's gradient, fp64; the sum over all ranks is the
    total. Replicated gradients are counted by one rank, those of tied parameters on the owner stage. `gradients`:
    parameter name -> reduced gradient (block or shard); `plan`: that of this rank's stage.

    Padded rows of vocab and the padding of shards have zero gradient and add nothing.
    """
    here = [p for p in plan.parameters if plan.stages_of[p.name][0] == communicator.coordinates["stage"]]
    here = [p for p in here if p.name in gradients]  # of others, this rank has no part
    mine = [gradients[p.name] for p in here if counts_here(communicator, plan.split_over(p))]
    if not mine:
        return torch.zeros((), dtype=torch.float64, device=communicator.device)
    return torch.stack([_squares(g) for g in mine]).sum()


def _squares(g: Tensor) -> Tensor:
    """Sum the squares of a local gradient in fp64, converting one piece at a time to bound memory."""
    wide = (piece.double() for piece in g.flatten().split(ELEMENTS_AT_ONCE[g.device.type]))
    return torch.stack([piece.dot(piece) for piece in wide]).sum()

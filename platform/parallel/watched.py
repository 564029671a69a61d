"""Sizes of activations and gradients by layer, to monitor a run (`monitor.layers`): each rank sums the squares of what
it counts; `platform.train.step.step_report` adds them up."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.parallel.sharding.gradients import squares
from platform.plan.core.buckets import layer_of
from platform.plan.core.counted import counts_at, counts_gradient
from platform.plan.core.plan import Plan
from platform.plan.language.ops import Spec

Sums = dict[str, Any]  # name of a layer -> sum of squares that this rank counts, an fp64 scalar


class Watched:
    """Sums the mean squares of each sequence's activations that a rank's forward passes hand to `see`. `sequences`:
    their number in the next microbatch of all replicas; rows behind them are padding, and do not count."""

    sequences = 0

    def __init__(self, plan: Plan, communicator: Communicator):
        """Prepare to sum the squares of activations by layer on this rank, for monitoring; none is summed yet."""
        self._plan, self._communicator = plan, communicator
        self.sums: Sums = {}

    @torch.no_grad()
    def see(self, name: str, x: Tensor, spec: Spec) -> None:
        """Add the squares of the activation x, this rank's block of `spec`, to the sum of the layer `name`; only
        elements that this rank counts among equal copies, and no padding sequences."""
        layout = self._plan.layout(spec)
        if not x.numel() or not counts_at(self._communicator.coordinates, layout.axes):
            return
        dim = spec.dims.index("batch")
        first, extent = self._plan.block(spec, self._communicator.coordinates)[dim]
        mine = x.narrow(dim, 0, min(max(0, self.sequences - first), extent)).detach().double()
        whole = self._plan.global_shape(spec)
        self.sums[name] = self.sums.get(name, 0.0) + (mine * mine).sum() * (whole[dim] / prod(whole))


def is_due(every: int, step: int) -> bool:
    """Return True if sizes of activations and gradients are to be recorded at `step`; `every`: monitor.layers."""
    return bool(every) and step % every == 0


def layers_of(plan: Plan) -> list[str]:
    """Return the layers of a whole plan's parameters, in order, named as in the sums of `gradient_squares`."""
    return list(dict.fromkeys(layer_of(p.name) for p in plan.parameters))


@torch.no_grad()
def gradient_squares(plan: Plan, communicator: Communicator, gradients: Mapping[str, Tensor]) -> Sums:
    """Return, by layer, the sum of squares of the reduced gradients on this rank, as fp64 scalars; of a gradient that
    several ranks hold, one counts it. `plan`: the plan of this rank's stage; `gradients`: parameter name -> gradient of
    the part that this rank updates."""
    found: Sums = {}
    for p in plan.parameters:
        if p.name in gradients and counts_gradient(plan, communicator.coordinates, p):
            layer = layer_of(p.name)
            found[layer] = found.get(layer, 0.0) + squares([gradients[p.name].reshape(-1)])
    return found

"""What happens to gradients once a step: the deferred reductions, bucketed per set of axes, and the global norm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from platform.parallel import chunks
from platform.parallel.convert import Pending, convert
from platform.parallel.groups import Communicator
from platform.plan.ops import Parameter
from platform.plan.plan import Plan


class Reduction:
    """The deferred reductions of partial gradients under way: every bucket's first collective is issued at once.

    `gradients`: name -> sum over the microbatches, shaped as the compute copy, of all parameters or some. They must not
    be used any more.
    """

    @torch.no_grad()
    def __init__(self, plan: Plan, communicator: Communicator, gradients: Mapping[str, Tensor]):
        self._plan = plan
        self._done: dict[str, Tensor] = {}
        self._under_way: list[tuple[list[Parameter], Pending]] = []
        for axes, parameters in plan.buckets.items():
            present = [p for p in parameters if p.name in gradients]
            steps = plan.reduction(axes)
            if not steps:
                self._done.update((p.name, gradients[p.name]) for p in present)
                continue
            parts = plan.mesh.extent(plan.scattered(axes))
            for bucket in chunks.buckets(present, gradients):
                rows = [chunks.flatten(gradients[p.name], parts).view(parts, -1) for p in bucket]  # a row per rank
                self._under_way.append((bucket, convert(communicator, torch.cat(rows, 1), steps, owned=True)))

    @torch.no_grad()
    def wait(self) -> dict[str, Tensor]:
        """Name -> the whole sum of this rank's block or chunk, shaped as the master copy."""
        for _, pending in self._under_way:
            pending.proceed()
        for bucket, pending in self._under_way:
            shapes = [self._plan.master_shape(p) for p in bucket]
            parts = pending.wait().flatten().split([torch.Size(shape).numel() for shape in shapes])
            triples = zip(bucket, parts, shapes, strict=True)
            self._done.update((p.name, part.view(shape)) for p, part, shape in triples)
        return self._done


def owns(communicator: Communicator, axes: Iterable[str]) -> bool:
    """Whether this rank is the one that counts what is split over `axes` and replicated over all others."""
    split = set(axes)
    return all(i == 0 for axis, i in communicator.coordinates.items() if axis not in split)


@torch.no_grad()
def squared_norm(plan: Plan, communicator: Communicator, gradients: Mapping[str, Tensor]) -> Tensor:
    """This rank's part of the squared 2-norm of the whole gradient, fp64: what is replicated is counted once.

    Padded rows of vocab and the padding of chunks have zero gradient and do not count.
    """
    mine = [gradients[p.name] for p in plan.parameters if owns(communicator, plan.split_over(p))]
    if not mine:
        return torch.zeros((), dtype=torch.float64, device=communicator.device)
    return torch.stack(torch._foreach_norm(mine)).double().square().sum()

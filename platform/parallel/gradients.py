"""What happens to gradients once a step: the deferred reductions, bucketed per set of axes, and the global norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from platform.parallel.groups import Communicator
from platform.plan.layout import Layout
from platform.plan.plan import Plan

BUCKET_BYTES = 32 << 20


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for t in tensors:
        if bucket and sum(b.nbytes for b in bucket) + t.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(t)
    yield bucket


@torch.no_grad()
def reduce(plan: Plan, communicator: Communicator, gradients: Mapping[str, Tensor]) -> None:
    """Sums the partial gradients in place, over the axes that the plan names; all buckets are under way at once."""
    under_way = []
    for axes, parameters in plan.buckets.items():
        if axes:
            for bucket in _buckets([gradients[p.name] for p in parameters]):
                flat = torch.cat([g.flatten() for g in bucket])
                under_way.append((bucket, communicator.launch("all_reduce", flat, axes, owned=True)))
    for bucket, handle in under_way:
        parts = handle.wait().split([g.numel() for g in bucket])
        for g, part in zip(bucket, parts, strict=True):
            g.copy_(part.view_as(g))


def owns(communicator: Communicator, layout: Layout) -> bool:
    """Whether this rank is the one of its stage that counts a block replicated over the axes outside of `layout`."""
    return all(i == 0 for axis, i in communicator.coordinates.items() if axis != "stage" and axis not in layout.axes)


@torch.no_grad()
def squared_norm(plan: Plan, communicator: Communicator, gradients: Mapping[str, Tensor]) -> Tensor:
    """This rank's part of the squared 2-norm of the whole gradient, fp64: replicated blocks are counted once, and
    tied parameters on the stage that owns them. `plan`: of its stage.

    Padded rows of vocab have zero gradient and do not count.
    """
    here = [p for p in plan.parameters if plan.homes[p.name][0] == communicator.coordinates["stage"]]
    mine = [gradients[p.name] for p in here if owns(communicator, plan.layout(p))]
    if not mine:
        return torch.zeros((), dtype=torch.float64, device=communicator.device)
    return torch.stack(torch._foreach_norm(mine)).double().square().sum()

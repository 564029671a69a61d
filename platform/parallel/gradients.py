"""What happens to gradients once a step: the deferred reductions, bucketed per set of axes, and the global norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from platform.parallel.groups import Communicator
from platform.plan.layout import Layout, at_zero
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
    for b in plan.buckets:
        if at_zero(b.only, communicator.coordinates):
            for bucket in _buckets([gradients[p.name] for p in b.parameters]):
                flat = torch.cat([g.flatten() for g in bucket])
                under_way.append((bucket, communicator.launch("all_reduce", flat, b.axes, owned=True)))
    for bucket, handle in under_way:
        parts = handle.wait().split([g.numel() for g in bucket])
        for g, part in zip(bucket, parts, strict=True):
            g.copy_(part.view_as(g))


def owns(communicator: Communicator, layout: Layout) -> bool:
    """Whether this rank is the one that counts a block which is replicated over the axes outside of `layout`: the one
    at their index 0, which always has it."""
    return all(i == 0 for axis, i in communicator.coordinates.items() if axis not in layout.axes)


@torch.no_grad()
def squared_norm(plan: Plan, communicator: Communicator, gradients: Mapping[str, Tensor]) -> Tensor:
    """This rank's part of the squared 2-norm of the whole gradient, fp64: replicated blocks are counted once.

    Padded rows of vocab have zero gradient and do not count.
    """
    mine = [gradients[p.name] for p in plan.parameters if owns(communicator, plan.layout(p))]
    if not mine:
        return torch.zeros((), dtype=torch.float64, device=communicator.device)
    return torch.stack(torch._foreach_norm(mine)).double().square().sum()

"""Chunks: the flattened block of a parameter, padded with zeros, in equal parts, one per rank along the sharding axes.

`Plan.chunk` says which elements a rank's chunk has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.parallel.groups import Communicator
from platform.plan.layout import padded
from platform.plan.ops import Parameter
from platform.plan.plan import Plan

BUCKET_BYTES = 32 << 20


def flatten(block: Tensor, parts: int) -> Tensor:
    """[elements], padded with zeros to a multiple of `parts`."""
    missing = padded(block.numel(), parts) - block.numel()
    return F.pad(block.flatten(), (0, missing)) if missing else block.flatten()


def unflatten(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """The block of `shape` out of what `flatten` made of it: a view of `flat` where it is contiguous."""
    return flat.flatten()[: prod(shape)].view(shape)


def own(plan: Plan, communicator: Communicator, block: Tensor) -> Tensor:
    """A copy of this rank's chunk [elements] of a parameter's local block."""
    parts = plan.mesh.extent(plan.sharded)
    return flatten(block, parts).view(parts, -1)[communicator.index(plan.sharded)].clone()


def buckets(parameters: Sequence[Parameter], tensors: Mapping[str, Tensor]) -> Iterator[list[Parameter]]:
    """The parameters in runs whose `tensors` are launched together."""
    bucket: list[Parameter] = []
    size = 0
    for p in parameters:
        nbytes = tensors[p.name].nbytes
        if bucket and size + nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(p)
        size += nbytes
    if bucket:
        yield bucket


@torch.no_grad()
def gather(plan: Plan, communicator: Communicator, chunks: Mapping[str, Tensor], blocks: Mapping[str, Tensor]) -> None:
    """Copies the chunks of all ranks, in the type of `blocks`, into the whole local blocks; all buckets are under way
    at once."""
    under_way = []
    for bucket in buckets(plan.parameters, chunks):
        flat = torch.cat([chunks[p.name].to(blocks[p.name].dtype) for p in bucket])
        under_way.append((bucket, communicator.launch("all_gather", flat, plan.sharded)))
    for bucket, handle in under_way:
        ranks = handle.wait().view(plan.mesh.extent(plan.sharded), -1)
        parts = ranks.split([chunks[p.name].numel() for p in bucket], 1)
        for p, part in zip(bucket, parts, strict=True):
            block = blocks[p.name]
            block.copy_(unflatten(part, block.shape))

"""Communication once a step, in buckets: deferred gradient reductions and all-gathers of updated shards. Also the norm
of the gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.parallel.sharding import shards
from platform.parallel.sharding.convert import Pending, convert
from platform.plan.core.plan import Plan
from platform.plan.language.layout import at_zero
from platform.plan.language.ops import Parameter

BUCKET_BYTES = 32 << 20
ELEMENTS_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 24}  # to be reduced: what fits a cache, or pays a launch


def _buckets(parameters: Sequence[Parameter], tensors: Mapping[str, Tensor]) -> Iterator[list[Parameter]]:
    """Yield the parameters, in order, in buckets that are communicated together: at most BUCKET_BYTES of their
    `tensors` (by name), or a single parameter."""
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


class GradientReduction:
    """Deferred reductions of a step's partial gradients in progress: every bucket's first collective is issued at once.

    `gradients`: parameter name -> this rank's gradient summed over the microbatches, shaped as the compute copy, of
    some or all parameters. The tensors must not be used afterwards.
    """

    @torch.no_grad()
    def __init__(self, plan: Plan, communicator: Communicator, gradients: Mapping[str, Tensor]):
        self._plan = plan
        self._done: dict[str, Tensor] = {}
        self._under_way: list[tuple[list[Parameter], Pending]] = []
        reduced = {p.name for b in plan.buckets for p in b.parameters}
        self._done.update((name, g) for name, g in gradients.items() if name not in reduced)
        for b in plan.buckets:
            if not at_zero(b.only, communicator.coordinates):
                continue
            steps, parts = plan.reduction(b), plan.mesh.extent(plan.scattered(b.axes))
            for bucket in _buckets([p for p in b.parameters if p.name in gradients], gradients):
                flat = (shards.flatten_padded(gradients[p.name], parts) for p in bucket)
                rows = torch.cat([part.view(parts, -1) for part in flat], 1)  # a row per rank
                self._under_way.append((bucket, convert(communicator, rows, steps, owned=True)))

    @torch.no_grad()
    def wait(self) -> dict[str, Tensor]:
        """Wait for the reductions and return the fully summed gradients: parameter name -> this rank's block or shard,
        shaped as the master copy."""
        for _, pending in self._under_way:
            pending.proceed()
        for bucket, pending in self._under_way:
            shapes = [self._plan.master_shape(p) for p in bucket]
            parts = pending.wait().flatten().split([torch.Size(shape).numel() for shape in shapes])
            triples = zip(bucket, parts, shapes, strict=True)
            self._done.update((p.name, part.view(shape)) for p, part, shape in triples)
        return self._done


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
    mine = [gradients[p.name] for p in here if counts_here(communicator, plan.split_over(p))]
    if not mine:
        return torch.zeros((), dtype=torch.float64, device=communicator.device)
    return torch.stack([_squares(g) for g in mine]).sum()


def _squares(g: Tensor) -> Tensor:
    """Sum the squares of a local gradient in fp64, converting one piece at a time to bound memory."""
    wide = (piece.double() for piece in g.flatten().split(ELEMENTS_AT_ONCE[g.device.type]))
    return torch.stack([piece.dot(piece) for piece in wide]).sum()


@torch.no_grad()
def gather_masters(
    plan: Plan, communicator: Communicator, masters: Mapping[str, Tensor], blocks: Mapping[str, Tensor]
) -> None:
    """Gather the updated master copies, of which each rank has a shard, into `blocks`, the whole local compute copies,
    in place and cast to their dtype (ZeRO-1); the all-gathers of all buckets run at once. `masters`, `blocks`: by
    parameter name."""
    under_way = []
    for bucket in _buckets(plan.parameters, masters):
        flat = torch.cat([masters[p.name].to(blocks[p.name].dtype) for p in bucket])
        under_way.append((bucket, convert(communicator, flat, plan.gathering)))
    for bucket, pending in under_way:
        ranks = pending.wait().view(plan.mesh.extent(plan.sharded), -1)
        parts = ranks.split([masters[p.name].numel() for p in bucket], 1)
        for p, part in zip(bucket, parts, strict=True):
            block = blocks[p.name]
            block.copy_(shards.unflatten_padded(part, block.shape))

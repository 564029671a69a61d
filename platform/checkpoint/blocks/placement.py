"""The state of a job as named global tensors: which ranks hold which block, and which rank stores which part."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from platform.checkpoint.blocks.box import Box, stretch
from platform.plan.core.plan import Plan
from platform.plan.language.ops import Parameter

if TYPE_CHECKING:
    import torch  # not at run time: the driver reads manifests before it has time to import torch
    from torch import Tensor

ITEMSIZE = {  # element type, as torch names it -> bytes of an element
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1,
}  # fmt: skip
LARGEST_BLOCK = 16 << 20  # bytes: the largest stored block, which one thread hashes and one worker reads
THREADS = min(4, os.cpu_count() or 1)  # for hashing blocks, and for reading them
LARGEST_ROW = 64 << 10  # bytes: smaller blocks are not cut

S = TypeVar("S")


class Block(NamedTuple):
    """Block of a global tensor in this process, to save from or to restore into. It may reach beyond the global tensor
    (a padded vocab): that part is never stored, and is restored as zeros."""

    name: str
    box: Box
    tensor: Tensor


@dataclass(frozen=True)
class HeldTensor:
    """Global tensor and who holds it: element type, shape without padding, and `holders`: block -> ranks that have it.

    Equal on all ranks. Several ranks of one block are replicas; the blocks tile the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    holders: dict[Box, tuple[int, ...]]

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, shape: Sequence[int], blocks: Iterable[tuple[int, Box]]) -> HeldTensor:
        """Describe a global tensor by the (rank, block) pairs of all ranks, in rank order: ranks of the same block
        become its replicas. `shape`: without padding; blocks are cut down to it, and those that lie wholly in the
        padding are left out."""
        whole, holders = Box.whole(shape), defaultdict(list)
        for rank, box in blocks:
            if real := box.overlap(whole):
                holders[real].append(rank)
        ranks = {box: tuple(found) for box, found in holders.items()}
        return cls(name, str(dtype).removeprefix("torch."), tuple(shape), ranks)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]


def planned_tensors(plan: Plan, kind: str, dtype: torch.dtype) -> list[HeldTensor]:
    """Return which ranks hold which block of every tensor of one kind of training state, under the plan: the master
    copies of the parameters (`kind` = model), or a moment of the optimizer, which is laid out like them. Tensors are
    named KIND.PARAMETER."""
    ranks = [(rank, plan.mesh.coordinates(rank)) for rank in range(plan.mesh.size)]
    out, known = [], {}
    for p in plan.parameters:
        bucket = plan.bucket_of[p.name]
        # layers share layouts and shards, except for their stage
        place = p.dims, p.role, p.sizes, plan.stages_of[p.name], bucket.ranges[p.name], bucket.elements
        if place not in known:
            found = [(rank, box) for rank, at in ranks for box in _kept(plan, p, at)]
            known[place] = HeldTensor.of("", dtype, plan.global_shape(p), found)
        out.append(replace(known[place], name=f"{kind}.{p.name}"))
    return out


def local_blocks(plan: Plan, kind: str, tensors: Mapping[str, Tensor], coordinates: Mapping[str, int]) -> list[Block]:
    """Return the tensors that one rank has of a kind of training state, as views: its blocks of the `planned_tensors`
    of the same `kind`. `tensors`: parameter name -> local tensor of shape `plan.master_shape`; `coordinates`: the
    rank's place in the mesh."""
    out = []
    for p in plan.parameters:
        at = 0
        for box in _kept(plan, p, coordinates):
            flat = tensors[p.name].detach().view(-1)
            out.append(Block(f"{kind}.{p.name}", box, flat[at : at + box.size].view(box.extent)))
            at += box.size
    return out


def _kept(plan: Plan, p: Parameter, coordinates: Mapping[str, int]) -> list[Box]:
    """Return the boxes of parameter `p` of which the rank at `coordinates` keeps master copy and optimizer state: its
    block, or, if the plan shards that state, the boxes that make up its shard of the block, in order; [] if it has
    none."""
    if not plan.present(p, coordinates):
        return []
    box = Box.of(plan.block(p, coordinates))
    return stretch(box, *plan.shard_range(p, coordinates)) if plan.sharded else [box]


class Piece(NamedTuple, Generic[S]):
    """Part of a global tensor that one rank fetches, from a place on storage or in memory (`source`), and passes on to
    the ranks whose blocks it overlaps. `had`: the ranks that hold it already, and need not receive it."""

    name: str
    dtype: str
    box: Box
    source: S
    had: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.box.size * ITEMSIZE[self.dtype]


class Share(NamedTuple):
    """Block of a global tensor, or the part of a block that one rank stores or keeps a copy of."""

    tensor: HeldTensor
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.size * self.tensor.itemsize


def shares(state: Sequence[HeldTensor], rank: int) -> list[Share]:
    """Return the parts of the state that `rank` writes into a checkpoint: about 1/n of the bytes of all blocks that it
    and its n - 1 replicas hold.

    Replicas divide the blocks that they hold: laid end to end, cut into n equal stretches, each cut moved to the start
    of a row of at most LARGEST_ROW bytes. No share is larger than LARGEST_BLOCK and a row.
    """
    groups = group_by_holders(state, rank).items()
    return [part for ranks, blocks in groups for part in equal_share(blocks, ranks.index(rank), len(ranks))]


def group_by_holders(state: Sequence[HeldTensor], rank: int | None = None) -> dict[tuple[int, ...], list[Share]]:
    """Group the blocks of all tensors by the ranks that hold them (ranks -> blocks), so that replicas can divide their
    work; if `rank` is given, only the blocks that it holds."""
    found: dict[tuple[int, ...], list[Share]] = defaultdict(list)
    for tensor in state:
        for box, ranks in tensor.holders.items():
            if rank is None or rank in ranks:
                found[ranks].append(Share(tensor, box))
    return found


def equal_share(blocks: Sequence[Share], member: int, members: int) -> list[Share]:
    """Return the parts that rank number `member` gets if the `members` replicas of `blocks` divide them: blocks are
    laid end to end and cut into equal stretches of bytes, and these into parts of about LARGEST_BLOCK bytes."""
    sizes = [block.nbytes for block in blocks]
    first, last = sum(sizes) * member // members, sum(sizes) * (member + 1) // members
    out, start = [], 0
    for block, size in zip(blocks, sizes, strict=True):
        a, b = max(first - start, 0), min(last - start, size)
        if a == 0 < b == size <= LARGEST_BLOCK:
            out.append(block)
        elif a < b:
            inner = range(-(-a // LARGEST_BLOCK) * LARGEST_BLOCK, b, LARGEST_BLOCK)
            out += [part for parts in cut_share(block, (a, *inner, b)) for part in parts]
        start += size
    return out


def cut_share(block: Share, positions: Sequence[int]) -> list[list[Share]]:
    """Cut a block at `positions`, ascending offsets in its row-major bytes, each moved to the nearest start of a row
    (`_row`); return the parts between each two neighbouring positions, one list per stretch."""
    if tuple(positions) == (0, block.nbytes):
        return [[block]]
    tensor, box = block
    row = _row(box.extent, tensor.itemsize) * tensor.itemsize
    cuts = [min(round(position / row) * row, block.nbytes) // tensor.itemsize for position in positions]
    return [[Share(tensor, part) for part in stretch(box, a, b)] for a, b in pairwise(cuts)]


def _row(extent: tuple[int, ...], itemsize: int) -> int:
    """Return the number of elements of a row, the unit at whose starts `cut_share` may cut a block of `extent`: its
    largest part of whole trailing dims with at most LARGEST_ROW bytes, at least one element."""
    parts = (prod(extent[d:]) for d in range(len(extent) + 1))
    return next(n for n in parts if n * itemsize <= LARGEST_ROW or n == 1)

"""The state of a job as named global tensors, and which ranks hold which block of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from platform.checkpoint.blocks.box import Box, stretch
from platform.plan.core.plan import Plan
from platform.plan.language.ops import STATES, Parameter

if TYPE_CHECKING:
    import torch  # not at run time: the driver reads manifests before it has time to import torch
    from torch import Tensor

ITEMSIZE = {  # element type, as torch names it -> bytes of an element
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1,
}  # fmt: skip

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
    def of(
        cls, name: str, dtype: torch.dtype | str, shape: Sequence[int], blocks: Iterable[tuple[int, Box]]
    ) -> HeldTensor:
        """Describe a global tensor by the (rank, block) pairs of all ranks, in rank order: ranks of the same block
        become its replicas. `shape`: without padding; blocks are cut down to it, and a block wholly in the padding is
        left out."""
        whole, holders = Box.whole(shape), defaultdict(list)
        for rank, box in blocks:
            if real := box.overlap(whole):
                holders[real].append(rank)
        ranks = {box: tuple(found) for box, found in holders.items()}
        return cls(name, str(dtype).removeprefix("torch."), tuple(shape), ranks)

    @property
    def itemsize(self) -> int:
        """Return the bytes of one element of this global tensor of the training state."""
        return ITEMSIZE[self.dtype]


def planned_tensors(plan: Plan, kind: str, dtype: torch.dtype | str) -> list[HeldTensor]:
    """Return which ranks hold which block of every tensor of one kind of training state, under the plan: the master
    copies of the parameters (`kind` = model), or a moment of the optimizer, which is laid out like them. Tensors are
    named KIND.PARAMETER."""
    each = plan.mesh.size // plan.stages  # ranks of a stage, which follow each other
    coordinates = [plan.mesh.coordinates(rank) for rank in range(plan.mesh.size)]
    out, known = [], {}
    for p in plan.parameters:
        bucket, (first, *others) = plan.bucket_of[p.name], plan.stages_of[p.name]
        # layers share layouts and shards, on the ranks of their own stages
        before = () if plan.uneven.isdisjoint(q.name for q in bucket.parameters) else bucket.alike
        place = p.dims, p.role, p.sizes, bucket.ranges[p.name], bucket.elements, bucket.sharded, before
        key = (*place, *(stage - first for stage in others))
        if key not in known:
            here = (rank for stage in sorted((first, *others)) for rank in range(stage * each, (stage + 1) * each))
            found = [(rank, box) for rank in here for box in _kept(plan, p, coordinates[rank])]
            known[key] = first, HeldTensor.of("", dtype, plan.global_shape(p), found)
        at, held = known[key]
        out.append(replace(held, name=f"{kind}.{p.name}", holders=_on_other_ranks(held.holders, (first - at) * each)))
    return out


def _on_other_ranks(holders: dict[Box, tuple[int, ...]], by: int) -> dict[Box, tuple[int, ...]]:
    """Return the holders of blocks with so much added to their ranks."""
    return {box: tuple(rank + by for rank in ranks) for box, ranks in holders.items()} if by else holders


def planned_states(plan: Plan, dtype: torch.dtype | str) -> list[HeldTensor]:
    """Return which ranks hold the states of a plan, parameters without gradient: all of a stage have the whole."""
    out = []
    for p in plan.states:
        whole = Box.whole(plan.global_shape(p))
        ranks = (r for r in range(plan.mesh.size) if plan.present(p, plan.mesh.coordinates(r)))
        out.append(HeldTensor(state_name(p), str(dtype).removeprefix("torch."), whole.extent, {whole: tuple(ranks)}))
    return out


def state_name(p: Parameter) -> str:
    """Return the name under which a parameter without gradient is saved."""
    return f"{STATES[p.role]}.{p.name}"


def local_blocks(plan: Plan, kind: str, tensors: Mapping[str, Tensor], coordinates: Mapping[str, int]) -> list[Block]:
    """Return the blocks of a kind of training state that one rank saves or restores, as views: its blocks of the
    `planned_tensors` of the same `kind`. `tensors`: parameter name -> local tensor of shape `plan.master_shape`, for
    all parameters of which the rank has a part, or the trained ones; `coordinates`: the rank's place in the mesh."""
    out = []
    for p in plan.parameters:
        if p.name not in tensors:
            continue
        at = 0
        for box in _kept(plan, p, coordinates):
            flat = tensors[p.name].detach().view(-1)
            out.append(Block(f"{kind}.{p.name}", box, flat[at : at + box.size].view(box.extent)))
            at += box.size
    return out


def _kept(plan: Plan, p: Parameter, coordinates: Mapping[str, int]) -> list[Box]:
    """Return the blocks of parameter `p` whose master copy and optimizer state the rank at `coordinates` saves: its
    block, or, if the plan shards that state, the blocks that make up its shard, in order; [] if it has none."""
    if not plan.present(p, coordinates):
        return []
    if not plan.bucket_of[p.name].sharded:
        return [Box.of(plan.block(p, coordinates))]
    first, last = plan.shard_range(p, coordinates)
    return stretch(Box.of(plan.block(p, coordinates)), first, last) if first < last else []


class Piece(NamedTuple, Generic[S]):
    """Part of a global tensor that one rank fetches, from a place on storage or in memory (`source`), and passes on to
    the ranks whose blocks it overlaps. `had`: the ranks that hold it already, and need not receive it."""

    name: str
    dtype: str
    box: Box
    source: S
    had: Collection[int] = ()

    @property
    def nbytes(self) -> int:
        """Return the bytes of this piece of a stored tensor, which one rank reads and sends to others."""
        return self.box.size * ITEMSIZE[self.dtype]


class Share(NamedTuple):
    """Block of a global tensor, or the part of a block that one rank stores or keeps a copy of."""

    tensor: HeldTensor
    box: Box

    @property
    def nbytes(self) -> int:
        """Return the bytes of this block of a global tensor, or part of a block, that a rank stores."""
        return self.box.size * self.tensor.itemsize

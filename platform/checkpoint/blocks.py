"""The state of a job as named global tensors, and which ranks hold which block of them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from math import prod
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from platform.boundary.sealed_blocks import LARGEST_BLOCK
from platform.plan.model_types import STATES, Parameter
from platform.plan.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# Boxes: blocks of a global tensor as index ranges, and the check that a set of them tiles it.

FAULTS = 100  # reported for one tensor at most
COORDINATES = 1 << 24  # of corners, compared at most: of 700,000 blocks of a tensor that is cut along three dims


class Box(NamedTuple):
    """Block of a global tensor: the elements from `offset` (inclusive) on, `extent` of them along every dim."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @classmethod
    def of(cls, spans: Sequence[Sequence[int]]) -> Box:
        """Make the block of a stored global tensor from the (offset, extent) of every dim."""
        return cls(tuple(o for o, _ in spans), tuple(n for _, n in spans))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the block that is a whole global tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Return the number of elements in this block of a checkpoint's global tensor."""
        return prod(self.extent)

    def overlap(self, other: Box) -> Box | None:
        """Return the block of elements that this block and `other`, of the same global tensor, have in common, or None
        if there are none."""
        offset, extent = [], []
        for a, m, b, n in zip(self.offset, self.extent, other.offset, other.extent, strict=True):
            first, last = max(a, b), min(a + m, b + n)
            if first >= last:
                return None
            offset.append(first)
            extent.append(last - first)
        return Box(tuple(offset), tuple(extent))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that select this block of a global tensor in an array of the larger block `outer`."""
        spans = zip(self.offset, outer.offset, self.extent, strict=True)
        return tuple(slice(a - b, a - b + n) for a, b, n in spans)

    def __str__(self) -> str:
        """Format this block of a global tensor as index ranges, such as "[0:2, 4:8]"."""
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.extent, strict=True)) + "]"


def stretch(box: Box, first: int, last: int) -> list[Box]:
    """Return the blocks of a global tensor that together hold the elements [first, last) of a flattened (row-major)
    block `box`, in their order: the end of a row, whole rows, the beginning of a row. So a shard of a flattened block
    becomes blocks of the tensor.

    >>> [str(b) for b in stretch(Box.whole((3, 4)), 2, 12)]
    ['[0:1, 2:4]', '[1:3, 0:4]']
    """
    if first >= last:
        return []
    if not box.extent:
        return [box]
    (origin, *offset), (_, *extent) = box
    row, inner = prod(extent), Box(tuple(offset), tuple(extent))

    def rows(i: int, j: int) -> list[Box]:
        """Return the block of the whole rows [i, j) of the tensor's block `box`, as a list; [] if there are none."""
        return [Box((origin + i, *offset), (j - i, *extent))] if i < j else []

    def part(i: int, a: int, b: int) -> list[Box]:
        """Return the blocks that hold the elements [a, b) of row `i` of the tensor's block `box`."""
        return [Box((origin + i, *o), (1, *n)) for o, n in stretch(inner, a, b)]

    i, a = divmod(first, row)
    j, b = divmod(last, row)
    if i == j:
        return part(i, a, b)
    head = part(i, a, row) if a else []
    return head + rows(i + bool(a), j) + part(j, 0, b)


def gaps(shape: Sequence[int], boxes: Sequence[Box]) -> list[str]:
    """Return the faults that keep the `boxes`, a tensor's blocks in a checkpoint, from tiling its `shape`, a line each;
    [] if they cover it exactly once.

    The number of boxes that cover an element is the sum of the signs of all corners at or before it along every dim. So
    the boxes tile the tensor if at every corner their signs sum to the whole tensor's, and the first hole or overlap
    begins at the first corner where they do not. Memory grows with the corners, not with the grid that edges span.
    """
    whole = Box.whole(shape)
    outside = (
        b for b in boxes if not len(b.offset) == len(b.extent) == len(shape) or not b.size or b.overlap(whole) != b
    )
    if found := [f"{_shown(b)} lies outside of {whole}" for b in islice(outside, FAULTS)]:
        return found
    cut = [d for d, size in enumerate(shape) if any(b.extent[d] != size for b in boxes)]
    if (len(boxes) + 1) * len(cut) << len(cut) > COORDINATES:
        return [f"is cut along {len(cut)} dims into {len(boxes)} blocks, more than are ever written"]
    wrong = _first_wrong(
        np.array([[(b.offset[d], b.offset[d] + b.extent[d]) for d in cut] for b in (*boxes, whole)]), cut
    )
    if wrong is None:
        return []
    spans, covered = wrong
    cell = Box.of([spans.get(d, (0, size)) for d, size in enumerate(shape)])
    return [f"{cell} is in {'several blocks' if covered > 0 else 'no block'}"]


def _first_wrong(ends: NDArray[np.int64], cut: Sequence[int]) -> tuple[dict[int, tuple[int, int]], int] | None:
    """Find the first cell of a checkpoint's tensor, in row-major order, that its blocks do not cover exactly once, for
    `gaps`: return (cut dim -> (offset, extent) of the cell, number of blocks that cover it minus 1), or None if there
    is none.

    `cut`: the dims along which any block is smaller than the tensor. `ends`: int [blocks + 1, len(cut), 2], the start
    and end index of every block along these dims; the last row is the whole tensor.
    """
    signs = np.ones(len(ends), np.int64)
    signs[-1] = -1
    corners = np.empty((len(ends), 0), np.int64)
    for dim in range(len(cut)):
        repeats = len(corners) // len(ends)
        sides = (np.tile(ends[:, dim, side], repeats) for side in (0, 1))  # starts, then ends
        corners = np.concatenate([np.column_stack([corners, side]) for side in sides])
        signs = np.concatenate([signs, -signs])
    order = np.lexsort(corners.T[::-1]) if cut else np.arange(len(signs))
    corners, signs = corners[order], signs[order]
    begins = np.flatnonzero(np.r_[True, (corners[1:] != corners[:-1]).any(1)])
    totals = np.add.reduceat(signs, begins)
    wrong = np.flatnonzero(totals)
    if not len(wrong):
        return None
    place = corners[begins[wrong[0]]]
    following = [int(ends[:, d][ends[:, d] > place[d]].min()) for d in range(len(cut))]
    spans = {dim: (int(a), b - int(a)) for dim, a, b in zip(cut, place, following, strict=True)}
    return spans, int(totals[wrong[0]])


def _shown(box: Box) -> str:
    """Return a block of a stored tensor as text; only the numbers of dims if offset and extent have different ones."""
    return (
        str(box) if len(box.offset) == len(box.extent) else f"a block of {len(box.offset)} and {len(box.extent)} dims"
    )


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


# Chains: the blocks that the same ranks hold, laid end to end, so that a part of them is two positions.

LARGEST_ROW = 64 << 10  # bytes: blocks are cut at the start of rows no larger than this


class Chain:
    """Blocks of global tensors that the same ranks (`holders`) hold, laid end to end. A position is an offset in their
    bytes; a part is [first, last) of it, so that who has which part takes two numbers, and not a list of blocks.

    `ends`: the position after each block.
    """

    def __init__(self, holders: Iterable[int], blocks: Sequence[Share]):
        """Join `blocks` of global tensors, which all ranks in `holders` hold, end to end, to divide them by bytes."""
        self.holders, self.blocks = tuple(holders), blocks
        self.ends = list(accumulate(block.nbytes for block in blocks))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensor blocks of the chain, which is the position at its end."""
        return self.ends[-1] if self.ends else 0

    def row_at(self, position: int) -> int:
        """Return the byte position nearest to `position` in this chain of tensor blocks where a row of one starts."""
        number = bisect_right(self.ends, position)
        if number == len(self.ends):
            return self.nbytes
        tensor, box = block = self.blocks[number]
        row, start = _row(box.extent, tensor.itemsize) * tensor.itemsize, self.ends[number] - block.nbytes
        return start + min(round((position - start) / row) * row, block.nbytes)

    def share(self, member: int, members: int) -> tuple[int, int]:
        """Return the bytes [first, last) of this chain of tensor blocks that replica `member` of `members` saves."""
        first, last = (self.row_at(self.nbytes * number // members) for number in (member, member + 1))
        return first, last

    def parts(
        self, first: int, last: int, names: Collection[str] | None = None, most: int | None = None
    ) -> list[Share]:
        """Return the blocks of tensors, or parts of them, at bytes [first, last) of this chain of a checkpoint's or
        snapshot's blocks, in order; both ends are starts of rows. `names`: the tensors wanted, by default all. A block
        larger than `most` bytes is cut at the rows nearest to the multiples of `most`."""
        out: list[Share] = []
        for number in range(bisect_right(self.ends, first), len(self.ends)):
            block, end = self.blocks[number], self.ends[number]
            size, each = block.nbytes, block.tensor.itemsize
            start = end - size
            if start >= last:
                break
            if names is not None and block.tensor.name not in names:
                continue
            a, b = max(first, start), min(last, end)
            if (a, b) == (start, end) and (most is None or size <= most):
                out.append(block)
                continue
            inner = range(start - (start - a) // most * most, b, most) if most else ()
            for i, j in pairwise((a, *map(self.row_at, inner), b)):
                boxes = stretch(block.box, (i - start) // each, (j - start) // each)
                out += [Share(block.tensor, box) for box in boxes]
        return out


def chains_of(state: Iterable[HeldTensor], rank: int | None = None) -> list[Chain]:
    """Join the tensor blocks of the training state that the same ranks hold, end to end; only `rank`'s, if given."""
    found: dict[tuple[int, ...], list[Share]] = defaultdict(list)
    for tensor in state:
        for box, ranks in tensor.holders.items():
            if rank is None or rank in ranks:
                found[ranks].append(Share(tensor, box))
    return [Chain(ranks, blocks) for ranks, blocks in found.items()]


def shares(state: Iterable[HeldTensor], rank: int) -> list[Share]:
    """Return the parts of the training state that `rank` writes into a checkpoint: about 1/n of the bytes of all blocks
    that it and its n - 1 replicas hold. None is larger than LARGEST_BLOCK and a row."""
    out: list[Share] = []
    for chain in chains_of(state, rank):
        out += chain.parts(*chain.share(chain.holders.index(rank), len(chain.holders)), most=LARGEST_BLOCK)
    return out


def _row(extent: tuple[int, ...], itemsize: int) -> int:
    """Return the number of elements of a row of a tensor's block of shape `extent`, at whose starts blocks are cut: its
    largest part of whole trailing dims with at most LARGEST_ROW bytes, at least one element."""
    parts = (prod(extent[d:]) for d in range(len(extent) + 1))
    return next(n for n in parts if n * itemsize <= LARGEST_ROW or n == 1)

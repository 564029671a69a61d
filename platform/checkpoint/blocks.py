"""The state of a job as named global tensors, and which ranks hold which block of them.

A `Box` is a block as index ranges; `find_tiling_faults` checks that a set of them tiles a tensor. A `JoinedBlocks` is
the blocks that the same ranks hold, laid end to end, so that a part of them is two positions.
"""

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
from platform.plan.model_types import NF4_KINDS, NF4_UNITS, SCALE_BLOCK, SCALES, STATES, Parameter
from platform.plan.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor


FAULTS = 100  # reported for one tensor at most
COORDINATES = 1 << 24  # of corners, compared at most: of 700,000 blocks of a tensor that is cut along three dims


class Box(NamedTuple):
    """Block of a global tensor: the elements from `offset` (inclusive) on, `extent` of them along every dim."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @classmethod
    def build_box(cls, spans: Sequence[Sequence[int]]) -> Box:
        """Make the block of a stored global tensor from the (offset, extent) of every dim."""
        return cls(tuple(o for o, _ in spans), tuple(n for _, n in spans))

    @classmethod
    def whole_tensor(cls, shape: Sequence[int]) -> Box:
        """Return the block that is a whole global tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        """Return the number of elements in this block of a checkpoint's global tensor."""
        return prod(self.extent)

    def intersect_box(self, other: Box) -> Box | None:
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

    def is_covered_by(self, others: Iterable[Box]) -> bool:
        """Return True if every element of this block of a tensor is in one of `others`, which do not overlap."""
        parts = map(self.intersect_box, others)
        return sum(part.num_elements for part in parts if part) == self.num_elements

    def relative_slices(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that select this block of a global tensor in an array of the larger block `outer`."""
        spans = zip(self.offset, outer.offset, self.extent, strict=True)
        return tuple(slice(a - b, a - b + n) for a, b, n in spans)

    def __str__(self) -> str:
        """Format this block of a global tensor as index ranges, such as "[0:2, 4:8]"."""
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.extent, strict=True)) + "]"


def split_flat_range(box: Box, first: int, last: int) -> list[Box]:
    """Return the blocks of a global tensor that together hold the elements [first, last) of a flattened (row-major)
    block `box`, in their order: the end of a row, whole rows, the beginning of a row. So a shard of a flattened block
    becomes blocks of the tensor.

    >>> [str(b) for b in split_flat_range(Box.whole_tensor((3, 4)), 2, 12)]
    ['[0:1, 2:4]', '[1:3, 0:4]']
    """
    if first >= last:
        return []
    if not box.extent:
        return [box]
    (origin, *offset), (_, *extent) = box
    row, inner = prod(extent), Box(tuple(offset), tuple(extent))

    def box_whole_rows(i: int, j: int) -> list[Box]:
        """Return the block of the whole rows [i, j) of the tensor's block `box`, as a list; [] if there are none."""
        return [Box((origin + i, *offset), (j - i, *extent))] if i < j else []

    def box_row_part(i: int, a: int, b: int) -> list[Box]:
        """Return the blocks that hold the elements [a, b) of row `i` of the tensor's block `box`."""
        return [Box((origin + i, *o), (1, *n)) for o, n in split_flat_range(inner, a, b)]

    i, a = divmod(first, row)
    j, b = divmod(last, row)
    if i == j:
        return box_row_part(i, a, b)
    head = box_row_part(i, a, row) if a else []
    return head + box_whole_rows(i + bool(a), j) + box_row_part(j, 0, b)


def find_tiling_faults(shape: Sequence[int], boxes: Sequence[Box]) -> list[str]:
    """Return the faults that keep the `boxes`, a tensor's blocks in a checkpoint, from tiling its `shape`, a line each;
    [] if they cover it exactly once.

    The number of boxes that cover an element is the sum of the signs of all corners at or before it along every dim. So
    the boxes tile the tensor if at every corner their signs sum to the whole tensor's, and the first hole or overlap
    begins at the first corner where they do not. Memory grows with the corners, not with the grid that edges span.
    """
    whole_box = Box.whole_tensor(shape)
    outside = (
        b
        for b in boxes
        if not len(b.offset) == len(b.extent) == len(shape) or not b.num_elements or b.intersect_box(whole_box) != b
    )
    if outside_faults := [f"{_format_box(b)} lies outside of {whole_box}" for b in islice(outside, FAULTS)]:
        return outside_faults
    cut_dims = [d for d, size in enumerate(shape) if any(b.extent[d] != size for b in boxes)]
    if (len(boxes) + 1) * len(cut_dims) << len(cut_dims) > COORDINATES:
        return [f"is cut along {len(cut_dims)} dims into {len(boxes)} blocks, more than are ever written"]
    ends = [[(b.offset[d], b.offset[d] + b.extent[d]) for d in cut_dims] for b in (*boxes, whole_box)]
    faulty_cell = _find_bad_cell(np.array(ends), cut_dims)
    if faulty_cell is None:
        return []
    spans, covered = faulty_cell
    cell = Box.build_box([spans.get(d, (0, size)) for d, size in enumerate(shape)])
    return [f"{cell} is in {'several blocks' if covered > 0 else 'no block'}"]


def _find_bad_cell(ends: NDArray[np.int64], cut_dims: Sequence[int]) -> tuple[dict[int, tuple[int, int]], int] | None:
    """Find the first cell of a checkpoint's tensor, in row-major order, that its blocks do not cover exactly once, for
    `find_tiling_faults`: return (cut dim -> (offset, extent) of the cell, number of blocks that cover it minus 1), or
    None if there is none.

    `cut_dims`: the dims along which any block is smaller than the tensor. `ends`: int [blocks + 1, len(cut), 2], the
    start and end index of every block along these dims; the last row is the whole tensor.
    """
    signs = np.ones(len(ends), np.int64)
    signs[-1] = -1
    corners = np.empty((len(ends), 0), np.int64)
    for dim in range(len(cut_dims)):
        repeats = len(corners) // len(ends)
        sides = (np.tile(ends[:, dim, side], repeats) for side in (0, 1))  # starts, then ends
        corners = np.concatenate([np.column_stack([corners, side]) for side in sides])
        signs = np.concatenate([signs, -signs])
    order = np.lexsort(corners.T[::-1]) if cut_dims else np.arange(len(signs))
    corners, signs = corners[order], signs[order]
    begins = np.flatnonzero(np.r_[True, (corners[1:] != corners[:-1]).any(1)])
    totals = np.add.reduceat(signs, begins)
    faulty_cells = np.flatnonzero(totals)
    if not len(faulty_cells):
        return None
    first_corner = corners[begins[faulty_cells[0]]]
    cell_ends = [int(ends[:, d][ends[:, d] > first_corner[d]].min()) for d in range(len(cut_dims))]
    spans = {dim: (int(a), b - int(a)) for dim, a, b in zip(cut_dims, first_corner, cell_ends, strict=True)}
    return spans, int(totals[faulty_cells[0]])


def _format_box(box: Box) -> str:
    """Return a block of a stored tensor as text; only the numbers of dims if offset and extent have different ones."""
    starts, sizes = len(box.offset), len(box.extent)
    return str(box) if starts == sizes else f"a block of {starts} and {sizes} dims"


ITEMSIZE = {  # element type, as torch names it -> bytes of an element
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "uint8": 1,
    "bool": 1,
}  # fmt: skip

S = TypeVar("S")
Shapes = Mapping[str, Sequence[int]]  # of global tensors, by name


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
    def group_holders(
        cls, name: str, dtype: torch.dtype | str, shape: Sequence[int], blocks: Iterable[tuple[int, Box]]
    ) -> HeldTensor:
        """Describe a global tensor by the (rank, block) pairs of all ranks, in rank order: ranks of the same block
        become its replicas. `shape`: without padding; blocks are cut down to it, and a block wholly in the padding is
        left out."""
        whole_box, holders = Box.whole_tensor(shape), defaultdict(list)
        for rank, box in blocks:
            if unpadded := box.intersect_box(whole_box):
                holders[unpadded].append(rank)
        ranks_by_box = {box: tuple(sharing_ranks) for box, sharing_ranks in holders.items()}
        return cls(name, str(dtype).removeprefix("torch."), tuple(shape), ranks_by_box)

    @property
    def itemsize(self) -> int:
        """Return the bytes of one element of this global tensor of the training state."""
        return ITEMSIZE[self.dtype]


State = Sequence[HeldTensor]  # training state: its tensors


def list_held_tensors(plan: Plan, kind: str, dtype: torch.dtype | str) -> list[HeldTensor]:
    """Return which ranks hold which block of every tensor KIND.PARAMETER of one `kind` of training state: masters
    (model), a moment of the optimizer, laid out alike, scales of its blocks, or weights in 4 bits (NF4_KINDS)."""
    unit, named = find_unit(kind), frozenset(plan.quantised if kind in NF4_KINDS else plan.scaled)
    ranks_per_stage = plan.mesh.world_size // plan.num_stages  # ranks of a stage, which follow each other
    coordinates = [plan.mesh.rank_coordinates(rank) for rank in range(plan.mesh.world_size)]
    held_tensors, known_layouts = [], {}
    # in the order of the buckets' memory, so that neighbours are copied together
    for p in (p for bucket in plan.buckets for p in bucket.parameters if unit == 1 or p.name in named):
        bucket, (first, *others) = plan.bucket_by_parameter[p.name], plan.stages_of[p.name]
        # layers share layouts and shards, on the ranks of their own stages
        before = () if plan.uneven_parameters.isdisjoint(q.name for q in bucket.parameters) else bucket.block_key
        layout_key = p.dims, p.role, p.sizes, bucket.parameter_ranges[p.name], bucket.elements, bucket.sharded, before
        key = (*layout_key, *(stage - first for stage in others))
        if key not in known_layouts:
            starts = [stage * ranks_per_stage for stage in sorted((first, *others))]
            stage_ranks = (rank for start in starts for rank in range(start, start + ranks_per_stage))
            places = ((rank, coordinates[rank]) for rank in stage_ranks)
            rank_boxes = [(rank, box) for rank, at in places for box in _list_saved_boxes(plan, p, at, kind)]
            whole_box = scale_box(Box.whole_tensor(plan.global_shape(p)), plan.global_shape(p), unit)
            shape = _append_bytes(whole_box, kind).extent
            known_layouts[key] = first, HeldTensor.group_holders("", dtype, shape, rank_boxes)
        at, held = known_layouts[key]
        holders = _shift_ranks(held.holders, (first - at) * ranks_per_stage)
        held_tensors.append(replace(held, name=f"{kind}.{p.name}", holders=holders))
    return held_tensors


def _shift_ranks(holders: dict[Box, tuple[int, ...]], offset: int) -> dict[Box, tuple[int, ...]]:
    """Return the holders of blocks with so much added to their ranks."""
    return {box: tuple(rank + offset for rank in ranks) for box, ranks in holders.items()} if offset else holders


def list_held_states(plan: Plan, dtype: torch.dtype | str) -> list[HeldTensor]:
    """Return which ranks hold the states that a checkpoint has, parameters without gradient: all of a stage the
    whole."""
    held_states = []
    for p in plan.states:
        whole_box = Box.whole_tensor(plan.global_shape(p))
        ranks = (r for r in range(plan.mesh.world_size) if plan.has_block(p, plan.mesh.rank_coordinates(r)))
        holders, dtype_name = {whole_box: tuple(ranks)}, str(dtype).removeprefix("torch.")
        held_states.append(HeldTensor(state_name(p), dtype_name, whole_box.extent, holders))
    return held_states


def state_name(p: Parameter) -> str:
    """Return the name under which a checkpoint holds a parameter without gradient."""
    return f"{STATES[p.role]}.{p.name}"


def local_blocks(plan: Plan, kind: str, tensors: Mapping[str, Tensor], coordinates: Mapping[str, int]) -> list[Block]:
    """Return the blocks of a kind of training state that one rank saves or restores, as views: its blocks of the
    `list_held_tensors` of the same `kind`. `tensors`: parameter name -> local tensor of shape `plan.master_shape`, for
    all parameters of which the rank has a part, or the trained ones; `coordinates`: the rank's place in the mesh."""
    blocks = []
    for p in plan.parameters:
        if p.name not in tensors:
            continue
        at = 0
        for box in _list_saved_boxes(plan, p, coordinates, kind):
            flat = tensors[p.name].detach().view(-1)
            blocks.append(Block(f"{kind}.{p.name}", box, flat[at : at + box.num_elements].view(box.extent)))
            at += box.num_elements
    return blocks


def find_unit(kind: str) -> int:
    """Return how many elements of a parameter there are to each number of a tensor of this `kind`, or name."""
    kind = kind.partition(".")[0]
    return NF4_KINDS.get(kind) or (SCALE_BLOCK if kind.endswith(SCALES) else 1)


def scale_box(box: Box, shape: Sequence[int], unit: int) -> Box:
    """Return a block of a global tensor of this `shape` as a block of the tensor of one number per `unit` elements."""
    # its last dims are one, the fewest whose elements are whole units
    if unit == 1:
        return box
    first = next(d for d in reversed(range(len(shape))) if prod(shape[d:]) % unit == 0)
    inner = prod(shape[first + 1 :])
    offset, extent = (ends[first] * inner // unit for ends in box)
    return Box((*box.offset[:first], offset), (*box.extent[:first], extent))


def _append_bytes(box: Box, kind: str) -> Box:
    """Return a block of a tensor of this `kind` with a last dim, the bytes of each number, if they are in 4 bits."""
    return Box((*box.offset, 0), (*box.extent, NF4_UNITS[NF4_KINDS[kind]])) if kind in NF4_KINDS else box


def _list_saved_boxes(plan: Plan, p: Parameter, coordinates: Mapping[str, int], kind: str) -> list[Box]:
    """Return the blocks of a `kind` of parameter `p`'s state, such as its master copy, that the rank at `coordinates`
    saves: its block, or, if the plan shards that state, the blocks that make up its shard, in order; [] if it has
    none."""
    if not plan.has_block(p, coordinates):
        return []
    unit = find_unit(kind)
    box = scale_box(Box.build_box(plan.locate_block(p, coordinates)), plan.global_shape(p), unit)
    if not plan.bucket_by_parameter[p.name].sharded:
        return [_append_bytes(box, kind)]
    first, last = plan.shard_range(p, coordinates)
    return [_append_bytes(part, kind) for part in split_flat_range(box, first // unit, last // unit)]


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
        return self.box.num_elements * ITEMSIZE[self.dtype]


class Share(NamedTuple):
    """Block of a global tensor, or the part of a block that one rank stores or keeps a copy of."""

    tensor: HeldTensor
    box: Box

    @property
    def nbytes(self) -> int:
        """Return the bytes of this block of a global tensor, or part of a block, that a rank stores."""
        return self.box.num_elements * self.tensor.itemsize


LARGEST_ROW = 64 << 10  # bytes: blocks are cut at the start of rows no larger than this


class JoinedBlocks:
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

    def nearest_row_start(self, position: int) -> int:
        """Return the byte position nearest to `position` in this chain of tensor blocks where a row of one starts."""
        number = bisect_right(self.ends, position)
        if number == len(self.ends):
            return self.nbytes
        tensor, box = block = self.blocks[number]
        row = _count_cut_unit_elements(box.extent, tensor.itemsize) * tensor.itemsize
        start = self.ends[number] - block.nbytes
        return start + min(round((position - start) / row) * row, block.nbytes)

    def replica_byte_range(self, member: int, members: int) -> tuple[int, int]:
        """Return the bytes [first, last) of this chain of tensor blocks that replica `member` of `members` saves."""
        first, last = (self.nearest_row_start(self.nbytes * number // members) for number in (member, member + 1))
        return first, last

    def shares_of_byte_range(
        self, first: int, last: int, names: Collection[str] | None = None, max_bytes: int | None = None
    ) -> list[Share]:
        """Return the blocks of tensors, or parts of them, at bytes [first, last) of this chain of a checkpoint's or
        snapshot's blocks, in order; both ends are starts of rows. `names`: the tensors wanted, by default all. A block
        larger than `max_bytes` bytes is cut at the rows nearest to the multiples of `max_bytes`."""
        cut: list[Share] = []
        for number in range(bisect_right(self.ends, first), len(self.ends)):
            block, end = self.blocks[number], self.ends[number]
            size, each = block.nbytes, block.tensor.itemsize
            start = end - size
            if start >= last:
                break
            if names is not None and block.tensor.name not in names:
                continue
            a, b = max(first, start), min(last, end)
            if (a, b) == (start, end) and (max_bytes is None or size <= max_bytes):
                cut.append(block)
                continue
            inner = range(start - (start - a) // max_bytes * max_bytes, b, max_bytes) if max_bytes else ()
            for i, j in pairwise((a, *map(self.nearest_row_start, inner), b)):
                boxes = split_flat_range(block.box, (i - start) // each, (j - start) // each)
                cut += [Share(block.tensor, box) for box in boxes]
        return cut


def join_chains(state: Iterable[HeldTensor], rank: int | None = None) -> list[JoinedBlocks]:
    """Join the tensor blocks of the training state that the same ranks hold, end to end; only `rank`'s, if given."""
    blocks_by_holders: dict[tuple[int, ...], list[Share]] = defaultdict(list)
    for tensor in state:
        for box, ranks in tensor.holders.items():
            if rank is None or rank in ranks:
                blocks_by_holders[ranks].append(Share(tensor, box))
    return [JoinedBlocks(ranks, blocks) for ranks, blocks in blocks_by_holders.items()]


def list_written_parts(state: Iterable[HeldTensor], rank: int) -> list[Share]:
    """Return the parts of the training state that `rank` writes into a checkpoint: about 1/n of the bytes of all blocks
    that it and its n - 1 replicas hold. None is larger than LARGEST_BLOCK and a row."""
    written_parts: list[Share] = []
    for chain in join_chains(state, rank):
        byte_range = chain.replica_byte_range(chain.holders.index(rank), len(chain.holders))
        written_parts += chain.shares_of_byte_range(*byte_range, max_bytes=LARGEST_BLOCK)
    return written_parts


def _count_cut_unit_elements(extent: tuple[int, ...], itemsize: int) -> int:
    """Return the number of elements of a row of a tensor's block of shape `extent`, at whose starts blocks are cut: its
    largest part of whole trailing dims with at most LARGEST_ROW bytes, at least one element."""
    trailing_sizes = (prod(extent[d:]) for d in range(len(extent) + 1))
    return next(n for n in trailing_sizes if n * itemsize <= LARGEST_ROW or n == 1)

"""Boxes: blocks of a global tensor as index ranges, and the check that a set of them tiles it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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

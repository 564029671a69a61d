"""Boxes: blocks of a global tensor, and whether some of them tile it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np


class Box(NamedTuple):
    """The elements of a global tensor from `offset` (inclusive) on, `extent` of them along every dim."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @classmethod
    def of(cls, spans: Sequence[Sequence[int]]) -> Box:
        """From (offset, extent) of every dim, as `platform.plan.layout.block` gives them."""
        return cls(tuple(o for o, _ in spans), tuple(n for _, n in spans))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.extent)

    def overlap(self, other: Box) -> Box | None:
        """What both have; None where that is nothing."""
        offset, extent = [], []
        for a, m, b, n in zip(self.offset, self.extent, other.offset, other.extent, strict=True):
            first, last = max(a, b), min(a + m, b + n)
            if first >= last:
                return None
            offset.append(first)
            extent.append(last - first)
        return Box(tuple(offset), tuple(extent))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index of this box in an array that holds `outer`."""
        spans = zip(self.offset, outer.offset, self.extent, strict=True)
        return tuple(slice(a - b, a - b + n) for a, b, n in spans)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.extent, strict=True)) + "]"


def stretch(box: Box, first: int, last: int) -> list[Box]:
    """Boxes that hold the elements [first, last) of a row-major `box`, in order: whole rows, and their torn ends.

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
        return [Box((origin + i, *offset), (j - i, *extent))] if i < j else []

    def part(i: int, a: int, b: int) -> list[Box]:
        return [Box((origin + i, *o), (1, *n)) for o, n in stretch(inner, a, b)]

    i, a = divmod(first, row)
    j, b = divmod(last, row)
    if i == j:
        return part(i, a, b)
    head = part(i, a, row) if a else []
    return head + rows(i + bool(a), j) + part(j, 0, b)


def gaps(shape: Sequence[int], boxes: Sequence[Box]) -> list[str]:
    """What keeps `boxes` from tiling a tensor of `shape` exactly once, one line each; [] if they do.

    Counts how often each cell of the grid that the boxes' edges draw is covered: cells are as many as boxes in a
    regular tiling, and never more than elements.
    """
    whole = Box.whole(shape)
    found = [
        f"{b} lies outside of {whole}"
        for b in boxes
        if len(b.extent) != len(shape) or not b.size or b.overlap(whole) != b
    ]
    if found:
        return found
    edges = [
        sorted({0, size, *(b.offset[d] for b in boxes), *(b.offset[d] + b.extent[d] for b in boxes)})
        for d, size in enumerate(shape)
    ]
    index = [{edge: i for i, edge in enumerate(e)} for e in edges]
    count = np.zeros([len(e) - 1 for e in edges], np.int32)
    for b in boxes:
        ends = zip(index, b.offset, b.extent, strict=True)
        count[tuple(slice(at[o], at[o + n]) for at, o, n in ends)] += 1
    for wrong, what in ((count == 0, "is in no block"), (count > 1, "is in several blocks")):
        if wrong.any():
            cell = np.argwhere(wrong)[0]
            first = Box.of([(e[i], e[i + 1] - e[i]) for e, i in zip(edges, cell, strict=True)])
            found.append(f"{first} {what}")
    return found

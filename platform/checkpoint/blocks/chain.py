"""Chains: the blocks that the same ranks hold, laid end to end, so that a part of them is two positions."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, pairwise
from math import prod

from platform.boundary.files.sealed import LARGEST_BLOCK
from platform.checkpoint.blocks.box import stretch
from platform.checkpoint.blocks.placement import HeldTensor, Share

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

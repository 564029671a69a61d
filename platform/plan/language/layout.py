"""Layouts: which block of a tensor lives on which rank, as a map from tensor dims to mesh axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from platform.plan.language.mesh import Mesh

# Dim names, as in Mesh-TensorFlow (Shazeer et al. 2018): a Transformer's, then its two-layer example's (io, hidden),
# then experts' (the places that each has for the tokens of a sequence; or rows, as many as chose it), the widths of
# latent attention's latents, then stacked branches'.
DIMS = ("batch", "length", "memory_length", "d_model", "heads", "kv_heads", "d_kv", "d_ff", "vocab", "io", "hidden",
        "experts", "slots", "rows", "q_latent", "kv_latent", "branch", "d_branch")  # fmt: skip
# dims that axes may split into blocks which differ by one unit (tensor.uneven): no operation reads across their blocks,
# or it counts what each has
UNEVEN = ("batch", "heads", "kv_heads", "d_ff", "vocab", "hidden", "experts", "slots")
NO_UNITS: Mapping[str, int] = MappingProxyType({})

LENGTHS = ("length", "memory_length")  # dims along which the tokens of a sequence lie
# rounds in which their pieces are dealt, and tokens of a piece, where documents hide keys and no key says how many
# pieces: kernels are slower on shorter ones. With others, rows are packed in other orders: FORMAT of even_rows
MOST_ROUNDS, LEAST_PIECE = 8, 256


@dataclass(frozen=True)
class Layout(Mapping[str, tuple[str, ...]]):
    """Maps each tensor dim to the mesh axes that split it, major to minor.

    A dim without axes is whole on every rank; the order of the dims does not matter. `only`: the axes, in mesh order,
    at whose index 0 alone the tensor exists (D&SP puts its common layers on one sub-grid). `partial`: the axes along
    which ranks hold summands of the tensor, `gradient`: those along which they hold summands of its gradient. None of
    them splits a dim.
    """

    items_: tuple[tuple[str, tuple[str, ...]], ...] = ()
    only: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    gradient: tuple[str, ...] = ()

    @classmethod
    def of(cls, rules: Mapping[str, Sequence[str]], only: Sequence[str] = ()) -> Layout:
        """Build the layout that splits each dim of `rules` over its axes, in canonical form: dims sorted, dims without
        axes left out, and axes that split a dim left out of `only` (axes at whose index 0 alone the tensor exists)."""
        split = {a for axes in rules.values() for a in axes}
        items = tuple(sorted((dim, tuple(axes)) for dim, axes in rules.items() if axes))
        return cls(items, tuple(a for a in only if a not in split))

    def __getitem__(self, dim: str) -> tuple[str, ...]:
        """Return the mesh axes that split `dim`, outer to inner; () if none does."""
        for d, axes in self.items_:
            if d == dim:
                return axes
        return ()

    def __iter__(self) -> Iterator[str]:
        """Iterate over the dims that this layout splits, in order of their names."""
        return (dim for dim, _ in self.items_)

    def __len__(self) -> int:
        """Return the number of dims that this layout splits."""
        return len(self.items_)

    @property
    def axes(self) -> tuple[str, ...]:
        """Return all mesh axes that split some dim in this layout, dim by dim."""
        return tuple(a for _, axes in self.items_ for a in axes)

    def restrict(self, dims: Iterable[str]) -> Layout:
        """Return the layout of a complete tensor that has only the dims `dims`, split over the same mesh axes."""
        kept = set(dims)
        return Layout(tuple((d, axes) for d, axes in self.items_ if d in kept), self.only)

    def without(self, axes: Sequence[str]) -> Layout:
        """Return the layout of a complete tensor that is whole along the mesh axes `axes`, and else lies as here."""
        rules = {d: [a for a in split if a not in axes] for d, split in self.items_}
        return Layout.of(rules, [a for a in self.only if a not in axes])

    def present(self, coordinates: Mapping[str, int]) -> bool:
        """Return True if the rank at mesh `coordinates` has a block of a tensor in this layout."""
        return at_zero(self.only, coordinates)

    def conflict(self) -> tuple[str, str, str] | None:
        """Return (axis, dim, dim) for the first mesh axis that splits two dims of this layout, which no tensor allows,
        or None."""
        seen: dict[str, str] = {}
        for dim, axes in self.items_:
            for axis in axes:
                if axis in seen:
                    return axis, seen[axis], dim
                seen[axis] = dim
        return None

    def __str__(self) -> str:
        """Format this layout as text, such as "batch: data; only at b=0"."""
        split = ", ".join(f"{d}: {'+'.join(axes)}" for d, axes in self.items_) or "whole"
        partial = f"; partial over {'+'.join(self.partial)}" if self.partial else ""
        return split + (f"; only at {'+'.join(self.only)}=0" if self.only else "") + partial


def at_zero(axes: Sequence[str], coordinates: Mapping[str, int]) -> bool:
    """Return True if the mesh `coordinates` are 0 along all `axes`: the ranks at which some tensors alone exist."""
    return not any(coordinates[a] for a in axes)


def prefix(*lists: Sequence[str]) -> tuple[str, ...]:
    """Return the longest common prefix of several lists of mesh axes, each the axes that split some dim."""
    out: list[str] = []
    for column in zip(*lists, strict=False):
        if len(set(column)) > 1:
            break
        out.append(column[0])
    return tuple(out)


def padded(size: int, parts: int) -> int:
    """Return the smallest multiple of `parts` >= `size`: the padded size of a dim split equally among ranks."""
    return -(-size // parts) * parts


def zigzag(ranks: int, rounds: int = 1) -> list[int]:
    """Return the numbers of a dim's 2 x `ranks` x `rounds` equal pieces as ranks hold them, two of each round."""
    # [0, 3, 1, 2] for 2 ranks, and [0, 3, 4, 7, 1, 2, 5, 6] for 2 rounds: all have equal work where a token sees the
    # tokens before it; with more rounds, where it sees a few of them
    dealt = range(0, 2 * ranks * rounds, 2 * ranks)
    return [first + piece for rank in range(ranks) for first in dealt for piece in (rank, 2 * ranks - 1 - rank)]


def consecutive(offset: int, extent: int, size: int, ranks: int = 1, rounds: int = 1) -> list[tuple[int, int]]:
    """Return (first, count) of each range of consecutive positions in a block (`offset`, `extent`) of a dim of global
    `size`, in the order in which the block has them; `ranks`: number of ranks that hold its pieces in zigzag, or 1,
    dealt in so many `rounds`."""
    if ranks == 1:
        return [(offset, extent)]
    piece, found = size // (2 * ranks * rounds), list[tuple[int, int]]()
    for place, number in enumerate(zigzag(ranks, rounds)):
        first, end = max(offset, place * piece), min(offset + extent, (place + 1) * piece)
        if first < end:
            found.append((number * piece + first - place * piece, end - first))
    return found


def offset_of(index: int, size: int, blocks: int, unit: int = 1) -> int:
    """Return where block number `index` begins if a dim of `size` is cut into so many `blocks` of whole units."""
    # The longest and the shortest differ by one unit, the first is a longest one, and the blocks of two axes lie in the
    # blocks of the first.
    return -(-index * (size // unit) // blocks) * unit


@dataclass(frozen=True)
class Cut:
    """Blocks that differ by one `unit`, of a dim of global `size` cut into `blocks` by mesh `axes`, major to minor."""

    size: int
    axes: tuple[str, ...]
    blocks: int
    unit: int = 1

    def longest(self, joined: int = 1) -> int:
        """Return the extent of the longest block, or of the longest stretch of so many `joined` ones."""
        return offset_of(1, self.size, self.blocks // joined, self.unit)

    def extent(self, mesh: Mesh, coordinates: Mapping[str, int]) -> int:
        """Return the extent of the block of the rank at mesh `coordinates`."""
        i = mesh.index(coordinates, self.axes)
        return offset_of(i + 1, self.size, self.blocks, self.unit) - offset_of(i, self.size, self.blocks, self.unit)

    def parts(self, mesh: Mesh, coordinates: Mapping[str, int], ranks: int) -> Parts:
        """Return the blocks of the rank at `coordinates` and others of so many `ranks` along the last of the axes."""
        first = mesh.index(coordinates, self.axes) // ranks * ranks
        ends = [offset_of(first + i, self.size, self.blocks, self.unit) for i in range(ranks + 1)]
        return Parts(self.longest(), tuple(b - a for a, b in pairwise(ends)))


class Parts(NamedTuple):
    """Extents of the blocks of one dim on the ranks of a group, and the `room` that a buffer has for each of them: the
    longest block's of all groups."""

    room: int
    extents: tuple[int, ...]


Cuts = tuple[tuple[int, Cut], ...]  # (position of a dim, how it is cut) for the dims of a tensor whose blocks differ


def shape_at(shape: Sequence[int], cuts: Cuts, mesh: Mesh, coordinates: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of the block of the rank at mesh `coordinates`, of a tensor whose longest block has `shape`."""
    out = list(shape)
    for i, cut in cuts:
        out[i] = cut.extent(mesh, coordinates)
    return tuple(out)


def block(
    dims: Sequence[str],
    sizes: Mapping[str, int],
    layout: Layout,
    mesh: Mesh,
    coordinates: Mapping[str, int],
    units: Mapping[str, int] = NO_UNITS,
) -> list[tuple[int, int]]:
    """Return (offset, extent) along every dim of the block that the rank at `coordinates` holds of a global tensor with
    dims `dims` of global `sizes` in `layout`. `units`: elements of a unit, by dim, where a unit has several."""
    out = []
    for dim in dims:
        axes, unit = layout[dim], units.get(dim, 1)
        blocks, i = mesh.extent(axes), mesh.index(coordinates, axes)
        first, end = (offset_of(n, sizes[dim], blocks, unit) for n in (i, i + 1))
        out.append((first, end - first))
    return out


def local_shape(
    dims: Sequence[str],
    sizes: Mapping[str, int],
    layout: Layout,
    mesh: Mesh,
    units: Mapping[str, int] = NO_UNITS,
) -> tuple[int, ...]:
    """Return the shape of the longest block of a tensor of global `sizes`, which is every block's where axes divide all
    dims; arguments as of `block`."""
    return tuple(offset_of(1, sizes[d], mesh.extent(layout[d]), units.get(d, 1)) for d in dims)

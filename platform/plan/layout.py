"""Layouts: which block of a tensor lives on which rank of a mesh, as a map from tensor dims to mesh axes.

`Mesh`: the ranks of a run along named axes, from outer (slow links) to inner (fast links). `Stretch` and `Pair` are the
positions that ranks have of a text, and the queries and keys in which an attention computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from math import isqrt, prod
from types import MappingProxyType
from typing import NamedTuple

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
# pieces: kernels are slower on shorter ones. With others, rows are packed in other orders: FORMAT of `even_rows`
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
    def build_canonical(cls, rules: Mapping[str, Sequence[str]], only: Sequence[str] = ()) -> Layout:
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

    @property
    def shifted_axes(self) -> tuple[str, ...]:
        """Return the axes along which ranks hold the tensor in this layout elsewhere than at index 0."""
        return tuple(base_axis(a) for a in self.only if base_axis(a) != a)

    def restrict_dims(self, dims: Iterable[str]) -> Layout:
        """Return the layout of a complete tensor that has only the dims `dims`, split over the same mesh axes."""
        kept_dims = set(dims)
        return Layout(tuple((d, axes) for d, axes in self.items_ if d in kept_dims), self.only)

    def drop_axes(self, axes: Sequence[str]) -> Layout:
        """Return the layout of a complete tensor that is whole along the mesh axes `axes`, and else lies as here."""
        rules = {d: [a for a in split if a not in axes] for d, split in self.items_}
        return Layout.build_canonical(rules, [a for a in self.only if base_axis(a) not in axes])

    def has_block(self, coordinates: Mapping[str, int]) -> bool:
        """Return True if the rank at mesh `coordinates` has a block of a tensor in this layout."""
        return is_at_index_zero(self.only, coordinates)

    def find_conflict(self) -> tuple[str, str, str] | None:
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


def base_axis(axis: str) -> str:
    """Return the axis of a mesh that is shifted into `axis`, which is itself for one that is not: y for `y-z`."""
    return axis.partition("-")[0]


def is_at_index_zero(axes: Sequence[str], coordinates: Mapping[str, int]) -> bool:
    """Return True if the mesh `coordinates` are 0 along all `axes`: the ranks at which some tensors alone exist."""
    return not any(_unwrapped_index(axis, coordinates) for axis in axes)


def _unwrapped_index(axis: str, coordinates: Mapping[str, int]) -> int:
    """Return the index along a mesh axis, below 0 where one that is shifted begins before its ranks do."""
    base, _, shift = axis.partition("-")
    return coordinates[base] - (coordinates[shift] if shift in coordinates else int(shift or 0))


def common_prefix(*lists: Sequence[str]) -> tuple[str, ...]:
    """Return the longest common prefix of several lists of mesh axes, each the axes that split some dim."""
    common: list[str] = []
    for column in zip(*lists, strict=False):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    return tuple(common)


def pad_to_multiple(size: int, parts: int) -> int:
    """Return the smallest multiple of `parts` >= `size`: the padded size of a dim split equally among ranks."""
    return -(-size // parts) * parts


def zigzag_order(ranks: int, rounds: int = 1) -> list[int]:
    """Return the numbers of a dim's 2 x `ranks` x `rounds` equal pieces as ranks hold them, two of each round."""
    # [0, 3, 1, 2] for 2 ranks, and [0, 3, 4, 7, 1, 2, 5, 6] for 2 rounds: all have equal work where a token sees the
    # tokens before it; with more rounds, where it sees a few of them
    dealt = range(0, 2 * ranks * rounds, 2 * ranks)
    return [first + piece for rank in range(ranks) for first in dealt for piece in (rank, 2 * ranks - 1 - rank)]


def consecutive_ranges(offset: int, extent: int, size: int, ranks: int = 1, rounds: int = 1) -> list[tuple[int, int]]:
    """Return (first, count) of each range of consecutive positions in a block (`offset`, `extent`) of a dim of global
    `size`, in the order in which the block has them; `ranks`: number of ranks that hold its pieces in zigzag, or 1,
    dealt in so many `rounds`."""
    if ranks == 1:
        return [(offset, extent)]
    piece, ranges = size // (2 * ranks * rounds), list[tuple[int, int]]()
    for position, number in enumerate(zigzag_order(ranks, rounds)):
        first, end = max(offset, position * piece), min(offset + extent, (position + 1) * piece)
        if first < end:
            ranges.append((number * piece + first - position * piece, end - first))
    return ranges


def block_offset(index: int, size: int, blocks: int, unit: int = 1) -> int:
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

    def longest_extent(self, joined: int = 1) -> int:
        """Return the extent of the longest block, or of the longest stretch of so many `joined` ones."""
        return block_offset(1, self.size, self.blocks // joined, self.unit)

    def block_extent(self, mesh: Mesh, coordinates: Mapping[str, int]) -> int:
        """Return the extent of the block of the rank at mesh `coordinates`."""
        i = mesh.index_in_group(coordinates, self.axes)
        begin, end = (block_offset(n, self.size, self.blocks, self.unit) for n in (i, i + 1))
        return end - begin

    def parts_of_group(self, mesh: Mesh, coordinates: Mapping[str, int], ranks: int) -> Parts:
        """Return the blocks of the rank at `coordinates` and others of so many `ranks` along the last of the axes."""
        first = mesh.index_in_group(coordinates, self.axes) // ranks * ranks
        ends = [block_offset(first + i, self.size, self.blocks, self.unit) for i in range(ranks + 1)]
        return Parts(self.longest_extent(), tuple(b - a for a, b in pairwise(ends)))


class Parts(NamedTuple):
    """Extents of the blocks of one dim on the ranks of a group, and the `room` that a buffer has for each of them: the
    longest block's of all groups."""

    room: int
    extents: tuple[int, ...]


Cuts = tuple[tuple[int, Cut], ...]  # (position of a dim, how it is cut) for the dims of a tensor whose blocks differ


def block_shape(shape: Sequence[int], cuts: Cuts, mesh: Mesh, coordinates: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of the block of the rank at mesh `coordinates`, of a tensor whose longest block has `shape`."""
    extents = list(shape)
    for i, cut in cuts:
        extents[i] = cut.block_extent(mesh, coordinates)
    return tuple(extents)


def locate_block(
    dims: Sequence[str],
    sizes: Mapping[str, int],
    layout: Layout,
    mesh: Mesh,
    coordinates: Mapping[str, int],
    units: Mapping[str, int] = NO_UNITS,
) -> list[tuple[int, int]]:
    """Return (offset, extent) along every dim of the block that the rank at `coordinates` holds of a global tensor with
    dims `dims` of global `sizes` in `layout`. `units`: elements of a unit, by dim, where a unit has several."""
    bounds = []
    for dim in dims:
        axes, unit = layout[dim], units.get(dim, 1)
        blocks, i = mesh.count_ranks(axes), mesh.index_in_group(coordinates, axes)
        first, end = (block_offset(n, sizes[dim], blocks, unit) for n in (i, i + 1))
        bounds.append((first, end - first))
    return bounds


def local_shape(
    dims: Sequence[str], sizes: Mapping[str, int], layout: Layout, mesh: Mesh, units: Mapping[str, int] = NO_UNITS
) -> tuple[int, ...]:
    """Return the shape of the longest block of a tensor of global `sizes`, which is every block's where axes divide all
    dims; arguments as of `block`."""
    return tuple(block_offset(1, sizes[d], mesh.count_ranks(layout[d]), units.get(d, 1)) for d in dims)


@dataclass(frozen=True)
class Mesh:
    """Arranges ranks in row-major order over `shape`, pairs of (axis, size): the last axis varies fastest.

    Beside its axes it knows shifted ones: `y-z`, for axes of one size, numbers the ranks along y from that at which the
    index along y is the one along z. So the diagonal of the plane is index 0 of `y-z`, and of `z-y`. `g-1` numbers them
    from index 1 of g.

    >>> Mesh.arrange_axes({"data": 2, "t": 3}).rank_coordinates(4)
    {'data': 1, 't': 1}
    """

    shape: tuple[tuple[str, int], ...]

    @classmethod
    def arrange_axes(cls, axes: Mapping[str, int]) -> Mesh:
        """Build a mesh of ranks from the sizes of its axes, outer to inner."""
        return cls(tuple(axes.items()))

    def __str__(self) -> str:
        """Format the mesh for people, such as "data 2 x t 3", without axes of size 1."""
        return " x ".join(f"{a} {n}" for a, n in self.shape if n > 1) or "1"

    @cached_property
    def axes(self) -> dict[str, int]:
        """Return the size of every mesh axis by name, from outer to inner."""
        return dict(self.shape)

    @cached_property
    def world_size(self) -> int:
        """Return the number of ranks in the mesh."""
        return prod(n for _, n in self.shape)

    def count_ranks(self, axes: Sequence[str]) -> int:
        """Return the number of ranks along these mesh axes together: the product of their sizes."""
        ranks = 1
        for axis in axes:
            ranks *= self.axes[base_axis(axis)]
        return ranks

    def order_axes(self, axes) -> tuple[str, ...]:
        """Return the given axes of more than one rank in mesh order: the canonical name of their process group."""
        name_by_base = {base_axis(a): a for a in axes}
        return tuple(name_by_base[a] for a, n in self.shape if a in name_by_base and n > 1)

    def rank_coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a rank along every axis of the mesh."""
        coordinates = {}
        for axis, n in reversed(self.shape):
            rank, coordinates[axis] = divmod(rank, n)
        return {axis: coordinates[axis] for axis, _ in self.shape}

    def find_rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at the given position along every axis of the mesh."""
        rank = 0
        for axis, n in self.shape:
            rank = rank * n + coordinates[axis]
        return rank

    def index_in_group(self, coordinates: Mapping[str, int], axes: Sequence[str]) -> int:
        """Return the position of a rank at `coordinates` in its group along `axes`, the first axis being major."""
        i = 0
        for axis in axes:
            ranks = self.axes[base_axis(axis)]
            i = i * ranks + _unwrapped_index(axis, coordinates) % ranks
        return i

    def group_of_rank(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the process group of `rank`: the ranks that differ along `axes` alone, in the order of `index`."""
        return _find_group(self, rank, tuple(axes))

    def list_groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the ranks of every process group along `axes`, which partition all ranks, by first rank."""
        if any(axis not in self.axes for axis in axes):
            return list(dict.fromkeys(self.group_of_rank(rank, axes) for rank in range(self.world_size)))
        others = tuple(axis for axis in self.axes if axis not in axes)
        inside = _group_offsets(self, tuple(axes))
        return [tuple(first + offset for offset in inside) for first in _group_offsets(self, others)]

    @cached_property
    def _axis_strides(self) -> dict[str, int]:
        """Return by how many ranks two neighbours along each axis of the mesh are apart."""
        return {axis: prod(n for _, n in self.shape[i + 1 :]) for i, (axis, _) in enumerate(self.shape)}


def move_axes(mesh: Mesh, axes: Sequence[str], *, outer: bool) -> Mesh:
    """Return the mesh with `axes` moved outside (slow links) or inside of all others, to compare branch placements."""
    moved = tuple(pair for pair in mesh.shape if pair[0] in axes)
    others = tuple(pair for pair in mesh.shape if pair[0] not in axes)
    return Mesh(moved + others if outer else others + moved)


@cache
def _group_offsets(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the ranks at 0 along all mesh axes but `axes`, in the order of positions along these, first major."""
    offsets = [0]
    for axis in axes:
        steps = range(0, mesh.axes[axis] * mesh._axis_strides[axis], mesh._axis_strides[axis])
        offsets = [offset + step for offset in offsets for step in steps]
    return tuple(offsets)


@cache
def _find_group(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the process group of a `rank` of a mesh: all ranks that differ from it along `axes` alone, with itself."""
    coordinates, bases = mesh.rank_coordinates(rank), tuple(map(base_axis, axes))
    first = rank - sum(coordinates[axis] * mesh._axis_strides[axis] for axis in bases)
    group = tuple(first + offset for offset in _group_offsets(mesh, bases))
    if axes == bases:
        return group
    return tuple(sorted(group, key=lambda member: mesh.index_in_group(mesh.rank_coordinates(member), axes)))


# Stretches of consecutive positions, and the pairs of queries and keys in which an attention computes.
#
# Ranks have pieces of a text, perhaps several that do not touch. By their global positions alone it is known which keys
# a query sees: nothing is masked that a kernel can leave out, or take as its own diagonal.

WHOLE, DIAGONAL, MASKED = "whole", "diagonal", "masked"
NONE = range(0)
BLOCK, LEAST = 1024, 128  # rows, and columns, of a mask or of scores that are made; and in a window at least


def mask_sharing_limit(device: str) -> int:
    """Return how many positions documents have at most that share a mask in a plan, on a kind of device (cpu, cuda)."""
    return LEAST if device == "cpu" else BLOCK  # a launch costs a GPU as much as many scores


class Stretch(NamedTuple):
    """Consecutive positions: the first of them, and how many there are."""

    first: int
    size: int

    @property
    def end(self) -> int:
        """Return the position behind the last one of this stretch."""
        return self.first + self.size


class Pair(NamedTuple):
    """Queries and keys that one call of a kernel computes: the `rows` of a block of queries, the `columns` of a block
    of keys, and their `relation`: every query sees every key (WHOLE), or the keys up to its own position, which are as
    many as the queries (DIAGONAL), or what a mask says (MASKED). `at`, `start`: the first global positions of
    queries and keys; the positions of one that is not in blocks may go on elsewhere. `sequences`: the part of
    the batch, None for all."""

    rows: Stretch
    columns: Stretch
    relation: str
    at: int
    start: int
    sequences: Stretch | None = None

    @property
    def score_count(self) -> int:
        """Return how many scores this pair of an attention's blocks takes: in its sequences, or each of the batch."""
        n = self.rows.size
        per_sequence = n * (n + 1) // 2 if self.relation == DIAGONAL else n * self.columns.size
        return per_sequence * self.sequences.size if self.sequences else per_sequence


def pair_queries_with_keys(
    queries: Sequence[Stretch],
    keys: Sequence[Stretch],
    causal: bool,
    window: int = 0,
    halved_row_counts: range = NONE,
    block: int = 0,
    document_starts: tuple[int, int] = (0, 0),
) -> list[Pair]:
    """Plan the pairs in which queries see keys, from where blocks lie. `queries`, `keys`: the global positions of two
    blocks of a layout, in their order in the block. With a `window`, a query sees so many keys, itself included, and is
    `causal`. `block`: the most rows, and columns, of a pair, for masks and scores that have to be made, 0 for any
    number; `halved_row_counts`: numbers of rows with which a kernel is slower on a DIAGONAL one than on its parts.
    `document_starts`: positions at which the first and the last of the queries' documents begin."""
    rows, columns = place_stretches(queries), place_stretches(keys)
    ahead = all(one.end <= other.first for one, other in zip(queries, queries[1:], strict=False))
    if causal and list(queries) == list(keys) and ahead and not (block or window or document_starts[1]):
        size = sum(q.size for q in queries)  # queries see the keys up to their own places, wherever these lie
        whole = Stretch(0, size)
        return list(
            _halve_diagonals(Pair(whole, whole, DIAGONAL, queries[0].first, queries[0].first), halved_row_counts)
        )
    if causal:
        borders = sorted({p for _, s in (*rows, *columns) for p in (s.first, s.end)})
        rows, columns = ([x for x in pieces for x in _cut_at_borders(*x, borders)] for pieces in (rows, columns))
    if block:
        rows, columns = ([x for x in pieces for x in _cut_into_blocks(*x, block)] for pieces in (rows, columns))
    pieces = []
    for row, q in rows:
        # the first key that one of the queries sees, and that all see if none lies ahead of them
        first_seen, common_start = document_starts
        if window:
            first_seen, common_start = max(first_seen, q.first - window + 1), max(common_start, q.end - window)
        for column, k in columns:
            first = max(k.first, first_seen)
            seen = Stretch(first, (min(k.end, q.end) if causal else k.end) - first)
            if seen.size > 0:
                relation = _classify_mask_of_stretches(q, seen, causal, common_start)
                places = Stretch(row, q.size), Stretch(column + first - k.first, seen.size)
                pieces.append(Pair(*places, relation, q.first, first))
    pieces = pieces if block else _merge_neighbours(pieces)
    return [part for pair in pieces for part in _halve_diagonals(pair, halved_row_counts)]


def _halve_diagonals(pair: Pair, halves: range) -> Iterator[Pair]:
    """Yield a pair of planned blocks of an attention, its diagonal cut while the number of its rows is in `halves`: two
    halves of it, and the WHOLE square of the later queries and the earlier keys."""
    (row, size), column = pair.rows, pair.columns.first
    if pair.relation != DIAGONAL or size not in halves:
        yield pair
        return
    half = size // 2
    later = Stretch(row + half, size - half)
    earlier = Stretch(column, half)
    yield from _halve_diagonals(pair._replace(rows=Stretch(row, half), columns=earlier), halves)
    yield Pair(later, earlier, WHOLE, pair.at + half, pair.start)
    later_diagonal = Pair(later, Stretch(column + half, size - half), DIAGONAL, pair.at + half, pair.start + half)
    yield from _halve_diagonals(later_diagonal, halves)


def place_stretches(stretches: Sequence[Stretch]) -> list[tuple[int, Stretch]]:
    """Return stretches of positions, each with the place in a layout's block at which it begins."""
    offset, placements = 0, []
    for stretch in stretches:
        placements.append((offset, stretch))
        offset += stretch.size
    return placements


def _cut_into_blocks(offset: int, stretch: Stretch, block: int) -> Iterator[tuple[int, Stretch]]:
    """Yield a stretch, placed in a layout's block, in pieces of at most `block` positions."""
    for done in range(0, stretch.size, block):
        yield offset + done, Stretch(stretch.first + done, min(block, stretch.size - done))


def _cut_at_borders(offset: int, stretch: Stretch, borders: Sequence[int]) -> Iterator[tuple[int, Stretch]]:
    """Yield a stretch, placed in a layout's block, cut at the `borders` within it, which are in order."""
    ends = [p for p in borders if stretch.first < p < stretch.end]
    for first, end in zip([stretch.first, *ends], [*ends, stretch.end], strict=True):
        yield offset + first - stretch.first, Stretch(first, end - first)


def _classify_mask_of_stretches(q: Stretch, k: Stretch, causal: bool, common_start: int) -> str:
    """Return the relation in a plan of queries at `q` to keys at `k`, each of which one sees; all see those behind,
    from `common_start` on."""
    if not causal or (k.end <= q.first + 1 and k.first >= common_start):
        return WHOLE
    return DIAGONAL if k == q and k.first >= common_start else MASKED


def _merge_neighbours(pairs: Sequence[Pair]) -> list[Pair]:
    """Return planned pairs with neighbours in a layout's block made one, where all is seen: along keys, then
    queries."""
    merged: list[Pair] = []
    for pair in pairs:
        before = merged[-1] if merged else None
        if before and before.rows == pair.rows and _can_merge(before, pair, before.columns, pair.columns):
            columns = Stretch(before.columns.first, before.columns.size + pair.columns.size)
            merged[-1] = before._replace(columns=columns)
        else:
            merged.append(pair)
    pairs, merged = sorted(merged, key=lambda p: (p.columns, p.rows)), []
    for pair in pairs:
        before = merged[-1] if merged else None
        if before and before.columns == pair.columns and _can_merge(before, pair, before.rows, pair.rows):
            merged[-1] = before._replace(rows=Stretch(before.rows.first, before.rows.size + pair.rows.size))
        else:
            merged.append(pair)
    return merged


def _can_merge(before: Pair, pair: Pair, ahead: Stretch, behind: Stretch) -> bool:
    """Return True if two planned pairs are WHOLE, and the second's stretch follows the first's in a layout's block."""
    return before.relation == pair.relation == WHOLE and ahead.end == behind.first


def find_divisors(n: int) -> list[int]:
    """Return the divisors of n >= 1, such as the sizes of mesh axes that split a dim of size n, ascending."""
    low = [k for k in range(1, isqrt(n) + 1) if n % k == 0]
    return [*low, *(n // k for k in reversed(low) if k * k != n)]


def find_factorizations(n: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Yield every mesh shape of n ranks: n as an ordered product of `factors` sizes, in lexicographic order."""
    if factors < 2:
        yield from [(n,)] if factors else []
        return
    for first in find_divisors(n):
        yield from ((first, *others) for others in find_factorizations(n // first, factors - 1))


def format_count(number: int, noun: str, form: str = "") -> str:
    """Format a number, such as of a plan's ranks, by the specification `form`, with its noun: "2 GPUs", "1 GPU"."""
    plural = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number:{form}} {noun}" + ("" if number == 1 else plural)

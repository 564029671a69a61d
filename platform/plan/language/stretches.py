"""Stretches of consecutive positions, and the pairs of queries and keys in which an attention computes.

Ranks have pieces of a text, perhaps several that do not touch. By their global positions alone it is known which keys a
query sees: nothing is masked that a kernel can leave out, or take as its own diagonal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

WHOLE, DIAGONAL, MASKED = "whole", "diagonal", "masked"
NONE = range(0)
BLOCK, LEAST = 1024, 128  # rows, and columns, of a mask or of scores that are made; and in a window at least


def shared(device: str) -> int:
    """Return how many positions documents have at most that share a mask, on a kind of device (cpu, cuda)."""
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
    def products(self) -> int:
        """Return how many scores this pair of an attention takes: in its sequences, or in each of the batch."""
        n = self.rows.size
        each = n * (n + 1) // 2 if self.relation == DIAGONAL else n * self.columns.size
        return each * self.sequences.size if self.sequences else each


def pairs(
    queries: Sequence[Stretch],
    keys: Sequence[Stretch],
    causal: bool,
    window: int = 0,
    halves: range = NONE,
    block: int = 0,
    begins: tuple[int, int] = (0, 0),
) -> list[Pair]:
    """Return the pairs in which queries see keys. `queries`, `keys`: the global positions of two blocks, in their order
    in the block. With a `window`, a query sees so many keys, itself included, and is `causal`. `block`: the most rows,
    and columns, of a pair, for masks and scores that have to be made, 0 for any number; `halves`: numbers of rows with
    which a kernel is slower on a DIAGONAL one than on its parts. `begins`: positions at which the
    first and the last of the queries' documents begin."""
    rows, columns = placed(queries), placed(keys)
    ahead = all(one.end <= other.first for one, other in zip(queries, queries[1:], strict=False))
    if causal and list(queries) == list(keys) and ahead and not (block or window or begins[1]):
        size = sum(q.size for q in queries)  # queries see the keys up to their own places, wherever these lie
        own = Stretch(0, size)
        return [*_halved(Pair(own, own, DIAGONAL, queries[0].first, queries[0].first), halves)]
    if causal:
        borders = sorted({p for _, s in (*rows, *columns) for p in (s.first, s.end)})
        rows, columns = ([x for x in found for x in _at_borders(*x, borders)] for found in (rows, columns))
    if block:
        rows, columns = ([x for x in found for x in _in_blocks(*x, block)] for found in (rows, columns))
    found = []
    for row, q in rows:
        some, every = begins  # the first key that one of the queries sees, and that all see if none lies ahead of them
        if window:
            some, every = max(some, q.first - window + 1), max(every, q.end - window)
        for column, k in columns:
            first = max(k.first, some)
            seen = Stretch(first, (min(k.end, q.end) if causal else k.end) - first)
            if seen.size > 0:
                relation = _relation(q, seen, causal, every)
                places = Stretch(row, q.size), Stretch(column + first - k.first, seen.size)
                found.append(Pair(*places, relation, q.first, first))
    found = found if block else _coalesced(found)
    return [part for pair in found for part in _halved(pair, halves)]


def _halved(pair: Pair, halves: range) -> Iterator[Pair]:
    """Yield a pair, its diagonal cut while the number of its rows is in `halves`: two halves of it, and the WHOLE
    square of the later queries and the earlier keys."""
    (row, size), column = pair.rows, pair.columns.first
    if pair.relation != DIAGONAL or size not in halves:
        yield pair
        return
    half = size // 2
    later = Stretch(row + half, size - half)
    earlier = Stretch(column, half)
    yield from _halved(pair._replace(rows=Stretch(row, half), columns=earlier), halves)
    yield Pair(later, earlier, WHOLE, pair.at + half, pair.start)
    rest = Pair(later, Stretch(column + half, size - half), DIAGONAL, pair.at + half, pair.start + half)
    yield from _halved(rest, halves)


def placed(stretches: Sequence[Stretch]) -> list[tuple[int, Stretch]]:
    """Return stretches of positions with the place in a block at which each begins."""
    place, found = 0, []
    for stretch in stretches:
        found.append((place, stretch))
        place += stretch.size
    return found


def _in_blocks(place: int, stretch: Stretch, block: int) -> Iterator[tuple[int, Stretch]]:
    """Yield a placed stretch in pieces of at most `block` positions."""
    for done in range(0, stretch.size, block):
        yield place + done, Stretch(stretch.first + done, min(block, stretch.size - done))


def _at_borders(place: int, stretch: Stretch, borders: Sequence[int]) -> Iterator[tuple[int, Stretch]]:
    """Yield a placed stretch, cut at the `borders` within it, which are in order."""
    ends = [p for p in borders if stretch.first < p < stretch.end]
    for first, end in zip([stretch.first, *ends], [*ends, stretch.end], strict=True):
        yield place + first - stretch.first, Stretch(first, end - first)


def _relation(q: Stretch, k: Stretch, causal: bool, every: int) -> str:
    """Return what queries at `q` see of keys at `k`, each of which one sees; all see those behind, from `every` on."""
    if not causal or (k.end <= q.first + 1 and k.first >= every):
        return WHOLE
    return DIAGONAL if k == q and k.first >= every else MASKED


def _coalesced(found: Sequence[Pair]) -> list[Pair]:
    """Return pairs with neighbours in a block made one, where every query sees every key: along keys, then queries."""
    out: list[Pair] = []
    for pair in found:
        before = out[-1] if out else None
        if before and before.rows == pair.rows and _touch(before, pair, before.columns, pair.columns):
            columns = Stretch(before.columns.first, before.columns.size + pair.columns.size)
            out[-1] = before._replace(columns=columns)
        else:
            out.append(pair)
    found, out = sorted(out, key=lambda p: (p.columns, p.rows)), []
    for pair in found:
        before = out[-1] if out else None
        if before and before.columns == pair.columns and _touch(before, pair, before.rows, pair.rows):
            out[-1] = before._replace(rows=Stretch(before.rows.first, before.rows.size + pair.rows.size))
        else:
            out.append(pair)
    return out


def _touch(before: Pair, pair: Pair, ahead: Stretch, behind: Stretch) -> bool:
    """Return True if two pairs of an attention are WHOLE, and the second's stretch follows the first's in a block."""
    return before.relation == pair.relation == WHOLE and ahead.end == behind.first

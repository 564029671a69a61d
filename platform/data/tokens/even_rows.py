"""Orders of the documents in packed rows, by which ranks that share a row have equal work.

A token sees the tokens before it in its document, and a rank of a context has pieces of a row: its work follows from
where long documents lie. A few orders of each row's documents are tried, the same ones whichever plan reads the row.
"""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from platform.data.tokens.streams import Ints
from platform.plan.language.layout import LEAST_PIECE, MOST_ROUNDS, zigzag

FORMAT = 3  # raise it when the same rows would be ordered otherwise
RANKS = (2, 4, 8)  # of contexts, for all of which a row is to be even
EVEN = 1.01  # times the mean of the work, which the busiest rank may have: then no further order is tried
TRIES, TOGETHER = 64, 8  # orders that are tried of a row, and so many at once
_AT_ONCE = 1 << 20  # numbers in an array

Floats = NDArray[np.float64]


def evened(pieces: Ints, rows: Ints, length: int) -> Ints:
    """Return the pieces of packed rows of `length` tokens, each row's in an order that gives ranks of a context equal
    work; arguments as of `PackedStream`."""
    counts, found, ranks = np.diff(rows), pieces.copy(), _ranks_of_cells(length)
    for count in np.unique(counts[counts > 1]).tolist():
        every = np.flatnonzero(counts == count)
        step = max(1, _AT_ONCE // (TOGETHER * max(count, len(ranks))))
        for some in np.split(every, range(step, len(every), step)):
            place = rows[some][:, None] + np.arange(count)
            found[place] = _ordered(found[place], length, ranks)
    return found


def _ordered(pieces: Ints, length: int, ranks: Floats) -> Ints:
    """Return the pieces [rows, documents, 2] of some rows, each row's in the most even order of those tried."""
    keys, sizes = pieces[..., 0], pieces[..., 1]
    best, order = imbalance(sizes, length, ranks), np.tile(np.arange(keys.shape[1]), (len(keys), 1))
    for first in range(0, TRIES, TOGETHER):
        left = np.flatnonzero(best > EVEN)
        tries = np.argsort(_drawn(keys[left, None], np.arange(first, first + TOGETHER)[:, None]), 2, kind="stable")
        work = imbalance(np.take_along_axis(sizes[left, None], tries, 2), length, ranks)
        least = np.arange(len(left)), work.argmin(1)
        better = work[least] < best[left]
        best[left[better]], order[left[better]] = work[least][better], tries[least][better]
    return np.take_along_axis(pieces, order[..., None], 1)


def imbalance(sizes: Ints, length: int, ranks: Floats | None = None) -> Floats:
    """Return the work of the busiest rank of a context in terms of the mean, in the most uneven context, for documents
    of `sizes` [..., documents] end to end in a row of `length` tokens; padding behind them is a document too."""
    ranks = _ranks_of_cells(length) if ranks is None else ranks
    cells, ends, zero = len(ranks), np.cumsum(sizes, -1), np.zeros((*sizes.shape[:-1], 1), np.int64)
    starts, before = (np.concatenate([zero, x], -1) for x in (ends, np.cumsum(_seen(sizes), -1)))
    border, rows = np.arange(cells + 1) * length // cells, prod(zero.shape)
    next_border = -(-ends * cells // length) + np.arange(rows).reshape(zero.shape) * (cells + 1)
    ended = np.bincount(next_border.ravel(), minlength=rows * (cells + 1)).reshape(*zero.shape[:-1], cells + 1)
    document = np.cumsum(ended, -1)  # in which a border lies
    into = border - np.take_along_axis(starts, document, -1)
    seen = (np.take_along_axis(before, document, -1) + _seen(into)).astype(np.float64)
    return (np.diff(seen) @ ranks).max(-1) / seen[..., -1]


def _seen(tokens: Ints) -> Ints:
    """Return how many keys the first so many tokens of a document see together."""
    return tokens * (tokens + 1) // 2


def _ranks_of_cells(length: int) -> Floats:
    """Return which ranks have the cells of a row of `length` tokens, [cells, ranks of all contexts]: their number of
    ranks, or 0."""
    rounds = {n: min(MOST_ROUNDS, 1 << max(1, length // (2 * n * LEAST_PIECE)).bit_length() - 1) for n in RANKS}
    cells = max(2 * n * m for n, m in rounds.items())
    found = []
    for n, m in rounds.items():
        of_pieces = np.zeros((2 * n * m, n))
        of_pieces[zigzag(n, m), np.repeat(np.arange(n), 2 * m)] = n
        found.append(np.repeat(of_pieces, cells // len(of_pieces), 0))
    return np.concatenate(found, 1)


def _drawn(keys: Ints, number: Ints) -> NDArray[np.uint64]:
    """Return a random integer for each key in each draw of a `number`, the same on every machine (SplitMix64)."""
    x = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + (number.astype(np.uint64) << np.uint64(40))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))

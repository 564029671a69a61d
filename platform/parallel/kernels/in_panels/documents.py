"""Pairs of queries and keys that documents of packed sequences leave: what a query's document hides is not computed.

Queries are cut where a document begins, in each sequence by itself. Those of one document see all keys of it before
them, and of their own positions a diagonal, so no mask is needed, and no other key is touched. Only documents that are
together no longer than a block's `short` share a mask. It takes numbers on the host: a block of data on a GPU has a
copy there from where it came (`remember`), so no layer waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from platform.plan.language.stretches import Pair, Stretch, placed

Begins = np.ndarray[Any, Any]  # [length, batch]: the position at which the document of each query begins
Cut = tuple[Stretch, Stretch, tuple[int, int]]  # rows, their positions, where the first and last of documents begin


class _Known(NamedTuple):
    """What is known of a data tensor on the host: its numbers, and the pairs found so far, which all layers share."""

    begins: Begins
    pairs: dict[Any, list[Pair]]


_KNOWN = WeakTensorKeyDictionary()


def remember(tensor: Tensor, numbers: Begins) -> None:
    """Note the numbers on the host of a data tensor, which is on a device."""
    _KNOWN[tensor] = _Known(numbers, {})


def _known(begins: Tensor) -> _Known:
    """Return what the host knows of a data tensor; it waits for the device if that was the first to have it."""
    if begins not in _KNOWN:
        remember(begins, begins.cpu().numpy())
    return _KNOWN[begins]


def pairs_of(
    begins: Tensor, queries: Sequence[Stretch], short: int, key: Any, pairs: Callable[..., list[Pair]]
) -> list[Pair]:
    """Return the pairs in which queries at the positions `queries` see keys of their documents, which begin at
    `begins`. `pairs`: makes those of some consecutive queries, given them and where their first and last document
    begins, as `language.stretches.pairs` does; `key`: all on which it depends; `short`: positions of documents that
    share a mask, at most."""
    known, key = _known(begins), (tuple(queries), short, key)
    if key not in known.pairs:
        found = (
            pair._replace(rows=Stretch(rows.first + pair.rows.first, pair.rows.size), sequences=sequences)
            for sequences, (rows, positions, borders) in _cuts(known.begins, queries, short)
            for pair in pairs([positions], borders)
        )
        known.pairs[key] = list(found)
    return known.pairs[key]


def _cuts(begins: Begins, queries: Sequence[Stretch], short: int) -> Iterator[tuple[Stretch, Cut]]:
    """Yield the queries that are computed together: of which sequences, and which. Neighbours in a batch are together
    where they are cut alike, and documents of more than a few queries begin alike."""

    def of_sequence(column: Begins) -> list[Cut]:
        """Return the cuts of one sequence."""
        return list(chain.from_iterable(_cut(column, row, q, short) for row, q in placed(queries)))

    def kind(cuts: list[Cut]) -> list[Any]:
        """Return what sequences have in common that are computed together."""
        return [(rows, begins if rows.size > short else ()) for rows, _, begins in cuts]

    first = 0
    for _, group in groupby(map(of_sequence, begins.T), kind):
        alike = list(group)
        for cuts in zip(*alike, strict=True):
            rows, q, _ = cuts[0]
            earliest, latest = zip(*(borders for *_, borders in cuts), strict=True)
            yield Stretch(first, len(alike)), (rows, q, (min(earliest), max(latest)))
        first += len(alike)


def _cut(column: Begins, row: int, q: Stretch, short: int) -> list[Cut]:
    """Return a stretch of one sequence's queries, whose first row is `row`, cut between documents, but for those that
    are together short."""
    here = column[row : row + q.size]
    borders = [0, *(np.flatnonzero(np.diff(here)) + 1).tolist(), q.size]
    found: list[Cut] = []
    for start, end in zip(borders, borders[1:], strict=False):
        begin = int(here[start])
        before = found[-1] if found else None
        if before and q.first + end - min(before[2][0], begin) <= short:
            start = before[0].first - row
            borders_of = min(before[2][0], begin), max(before[2][1], begin)
            found.pop()
        else:
            borders_of = begin, begin
        found.append((Stretch(row + start, end - start), Stretch(q.first + start, end - start), borders_of))
    return found

"""Pairs of queries and keys that documents of packed sequences leave: scores that a document hides are not computed.

Queries are cut where a document begins, in each sequence by itself. A query of one document sees all its keys before
the cut, and a diagonal behind it: no mask is needed, and no other key is read. Only documents that are short together
share a mask. All of this is found on the host, where a block of data on a GPU has left its numbers (`remember`), so no
layer waits for the device.
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
    """Data tensor as the host knows it: its numbers, and the pairs found so far, which all layers share."""

    begins: Begins
    pairs: dict[Any, list[Pair]]


_ON_HOST, _KNOWN = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()


def remember(tensor: Tensor, on_host: Begins | Tensor) -> None:
    """Note a data tensor of a device as the host has it."""
    _ON_HOST[tensor] = on_host


def _known(begins: Tensor) -> _Known:
    """Return a data tensor as the host knows it; of one on a device, `remember` has noted the numbers."""
    if begins not in _KNOWN:
        here = begins if begins.device.type == "cpu" else _ON_HOST[begins]
        _KNOWN[begins] = _Known(np.asarray(here), {})
    return _KNOWN[begins]


def pairs_of(
    begins: Tensor, queries: Sequence[Stretch], short: int, key: Any, pairs: Callable[..., list[Pair]]
) -> list[Pair]:
    """Return the pairs in which `queries`, at these positions, see keys of their documents, which begin at `begins`.
    `pairs`: function of consecutive queries and of where their first and last document begins, as `stretches.pairs`;
    `key`: all on which its result depends; `short`: the most positions of documents that share a mask."""
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
    """Yield (sequences, cut) for queries to compute together: sequences cut alike whose long documents begin alike."""

    def of_sequence(column: Begins) -> list[Cut]:
        """Return the cuts of one sequence."""
        return list(chain.from_iterable(_cut(column, row, q, short) for row, q in placed(queries)))

    def kind(cuts: list[Cut]) -> list[Any]:
        """Return the key of a sequence, by which its neighbours are computed together with it."""
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
    """Return a stretch of one sequence's queries, from `row` on, cut between documents that are not short together."""
    here = column[row : row + q.size]
    borders = [0, *(int(i) + 1 for i in np.flatnonzero(np.diff(here))), q.size]
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

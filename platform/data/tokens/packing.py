"""Packing: documents laid whole into rows of one length, by best fit, once for all runs.

Documents come in order of falling length, each into the row with the least room that still holds it (best-fit
decreasing; Ding et al. 2024, "Fewer Truncations Improve Language Modeling"). The rows then stand in the order of their
first documents: a function of the documents and the length alone. Where documents are kept apart, the order of each
row's documents is chosen too (`even_rows`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from platform.boundary import schema
from platform.boundary.schema import Malformed, OneOf, Span
from platform.boundary.terminal import phase
from platform.data.tokens import cache, even_rows
from platform.data.tokens.streams import Ints, PackedStream, beginnings, mapped

logger = logging.getLogger(__name__)
FORMAT = 1  # of an entry: raise it when the same documents would give other rows
_COUNT = Annotated[int, Span(0, 1 << 50)]


def packed_streams(
    streams: Mapping[str, Any],
    tokens: Path,
    length: int,
    begin: int,
    overlong: str = "split",
    *,
    apart: bool = False,
    trusted: bool = False,
) -> dict[str, PackedStream]:
    """Return token streams packed into rows of `length` tokens, by split: whole documents laid end to end. The rows are
    kept beside `tokens`, the cache entry of the streams, made by the first process that asks; `trusted`: another
    process of this run has verified them. `begin`: the token with which a document begins, where the entry does not
    know. `overlong`: what becomes of documents that are longer than a row (`best_fit`); `apart`: no token sees another
    document. Raises ConfigError, OSError, Malformed."""
    policy = [*([] if overlong == "split" else [overlong]), *([f"even {even_rows.FORMAT}"] if apart else [])]
    place = tokens.parent / cache.hash_of(["packed", FORMAT, tokens.name, length, begin, *policy])
    sizes = {split: len(stream) for split, stream in streams.items()}
    read = partial(_read, sizes=sizes, length=length, deep=not trusted, whole=overlong == "split")

    def make(folder: Path) -> dict[str, Any]:
        """Pack each split's documents into rows, written to the cache entry `folder`; return their numbers."""
        counts = {}
        for split, stream in streams.items():
            bounds = np.append(beginnings(stream, begin), len(stream))
            if longer := int((np.diff(bounds) > length).sum()):
                what = {"split": "split over rows", "cut": "cut", "drop": "dropped"}[overlong]
                message = "%s: %d of %d documents are longer than a row of %d tokens, and are %s"
                logger.info(message, split, longer, len(bounds) - 1, length, what)
            with phase("packing documents into rows"):
                pieces, rows = best_fit(bounds, length, overlong)
                pieces = even_rows.evened(pieces, rows, length) if apart else pieces
            pieces.astype("<i8").tofile(folder / f"{split}_pieces.bin")
            rows.astype("<i8").tofile(folder / f"{split}_rows.bin")
            counts[split] = [len(pieces), len(rows)]
        return {"splits": counts}

    found = cache.open_trusted(place, read) if trusted else cache.fetch(place, make, read)
    return {split: PackedStream(stream, *found[split]) for split, stream in streams.items()}


@dataclass(frozen=True)
class _Rows:
    """Description of packed rows in the cache: of each split the numbers of pieces, and of bounds of rows."""

    splits: dict[Annotated[str, OneOf(("train", "validation"), "split")], tuple[_COUNT, _COUNT]]
    files: dict[str, Any]


def _read(
    folder: Path, meta: dict[str, Any], sizes: Mapping[str, int], length: int, deep: bool, whole: bool
) -> dict[str, tuple[Ints, Ints]]:
    """Read the packed rows of documents from the cache entry `folder`, split -> (pieces, rows), mapped into memory, and
    check them against the description `meta` and, if `deep`, against the numbers of tokens `sizes`; `whole`: rows hold
    all tokens. Raises Malformed for rows that `best_fit` cannot have made."""
    described = schema.read(_Rows, meta)
    found = {}
    for split, size in sizes.items():
        pieces, rows = (mapped(folder / f"{split}_{name}.bin", "<i8") for name in ("pieces", "rows"))
        counts = [len(pieces) / 2, len(rows)]
        if counts != list(described.splits.get(split, ())) or (
            deep and not _fits(pieces.reshape(-1, 2), rows, size, length, whole)
        ):
            raise Malformed(f"the rows of {split} are not its tokens")
        found[split] = pieces.reshape(-1, 2), rows
    return found


def _fits(pieces: Ints, rows: Ints, size: int, length: int, whole: bool) -> bool:
    """Return True if packed rows of documents are legal: each of `size` tokens in one row (at most one unless `whole`),
    and at most `length` tokens per row. `pieces`: (first token, tokens) each; `rows`: bounds of the rows among them."""
    if not len(rows) or rows[0] != 0 or rows[-1] != len(pieces) or (np.diff(rows) < 1).any():
        return False
    ordered = pieces[np.argsort(pieces[:, 0])]
    ends = ordered.sum(1)
    if whole:
        tiles = np.array_equal(ordered[:, 0], np.append(0, ends)[:-1]) and ordered[:, 1].sum() == size
    else:
        tiles = (ordered[:, 0] >= np.append(0, ends)[:-1]).all() and (ends <= size).all()
    filled = np.add.reduceat(pieces[:, 1], rows[:-1]) if len(pieces) else np.zeros(0, np.int64)
    return bool(tiles and (pieces[:, 1] > 0).all() and filled.max(initial=0) <= length)


def best_fit(bounds: Ints, length: int, overlong: str = "split") -> tuple[Ints, Ints]:
    """Pack documents, which lie between `bounds` (ascending token positions, the first 0), into rows of `length`
    tokens: return int64 pieces [n, 2] of (first token, tokens), and the bounds of rows among them. A document that is
    longer is split after every `length` tokens, or cut after so many, or dropped, as `overlong` says."""
    pieces = _cut(bounds, length)
    if overlong != "split":
        first = (
            np.isin(pieces[:, 0], bounds) if overlong == "cut" else np.diff(bounds)[_document(pieces, bounds)] <= length
        )
        pieces = pieces[first]
    row = np.empty(len(pieces), np.int64)
    rooms: list[list[int]] = [[] for _ in range(length + 1)]  # by the tokens that still fit: the rows with such room
    there, count = 0, 0  # bit n of `there` is set if rooms[n] holds a row
    sizes = pieces[:, 1].tolist()
    for number in np.argsort(-pieces[:, 1], kind="stable").tolist():
        size = sizes[number]
        if fitting := there >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            found = rooms[room].pop()
            there ^= 0 if rooms[room] else 1 << room
        else:
            room, found = length, count
            count += 1
        row[number] = found
        if left := room - size:
            rooms[left].append(found)
            there |= 1 << left
    first = np.full(count, len(pieces), np.int64)
    np.minimum.at(first, row, np.arange(len(pieces)))
    place = np.empty(count, np.int64)
    place[np.argsort(first)] = np.arange(count)
    order = np.lexsort((pieces[:, 0], place[row]))
    return pieces[order], np.append(0, np.cumsum(np.bincount(place[row], minlength=count)))


def _document(pieces: Ints, bounds: Ints) -> Ints:
    """Return, for each piece of a packed document, the number of its document, which lies between `bounds`."""
    return np.searchsorted(bounds, pieces[:, 0], "right") - 1


def _cut(bounds: Ints, length: int) -> Ints:
    """Cut documents, given by their `bounds`, into pieces of at most `length` tokens: [n, 2] of (first, tokens)."""
    sizes = np.diff(bounds)
    parts = -(-sizes // length)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)  # of a piece in its document
    starts = np.repeat(bounds[:-1], parts) + number * length
    return np.stack([starts, np.minimum(length, np.repeat(bounds[1:], parts) - starts)], 1)

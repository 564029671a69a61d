"""Packing: documents laid whole into rows of one length, by best fit, once for all runs.

Documents come in order of falling length, each into the row with the least room that still holds it (best-fit
decreasing; Ding et al. 2024, "Fewer Truncations Improve Language Modeling"). The rows then stand in the order of their
first documents: a function of the documents and the length alone. Where documents are kept apart, the order of each
row's documents is chosen too (`even_rows`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from platform.boundary import schema
from platform.boundary.schema import Malformed, OneOf, Span
from platform.boundary.terminal import show_phase
from platform.data import cache
from platform.data.streams import (
    Ints,
    PackedStream,
    find_document_starts,
    map_array,
    token_loss_mask,
)
from platform.plan.layout import LEAST_PIECE, MOST_ROUNDS, zigzag_order

# Orders of the documents in packed rows, by which ranks that share a row have equal work.
#
# A token sees the tokens before it in its document, and a rank of a context has pieces of a row: its work follows from
# where long documents lie. A few orders of each row's documents are tried, the same ones whichever plan reads the row.

EVEN_ROWS_FORMAT = 3  # raise it when the same rows would be ordered otherwise
RANKS = (2, 4, 8)  # of contexts, for all of which a row is to be even
EVEN = 1.01  # times the mean of the work, which the busiest rank may have: then no further order is tried
TRIES, TOGETHER = 64, 8  # orders that are tried of a row, and so many at once
_AT_ONCE = 1 << 20  # numbers in an array

Floats = NDArray[np.float64]


def even_rows(pieces: Ints, rows: Ints, length: int) -> Ints:
    """Return the pieces of packed rows of `length` tokens, each row's in an order that gives ranks of a context equal
    work; arguments as of `PackedStream`."""
    counts, evened_pieces, ranks = np.diff(rows), pieces.copy(), _ranks_of_cells(length)
    for count in np.unique(counts[counts > 1]).tolist():
        rows_of_count = np.flatnonzero(counts == count)
        step = max(1, _AT_ONCE // (TOGETHER * max(count, len(ranks))))
        for row_batch in np.split(rows_of_count, range(step, len(rows_of_count), step)):
            piece_index = rows[row_batch][:, None] + np.arange(count)
            evened_pieces[piece_index] = _order_pieces_evenly(evened_pieces[piece_index], length, ranks)
    return evened_pieces


def _order_pieces_evenly(pieces: Ints, length: int, ranks: Floats) -> Ints:
    """Return the pieces [rows, documents, 2] of some rows, each row's in the most even order of those tried."""
    keys, sizes = pieces[..., 0], pieces[..., 1]
    best, order = work_imbalance(sizes, length, ranks), np.tile(np.arange(keys.shape[1]), (len(keys), 1))
    for first in range(0, TRIES, TOGETHER):
        left = np.flatnonzero(best > EVEN)
        drawn = _draw_integers(keys[left, None], np.arange(first, first + TOGETHER)[:, None])
        tries = np.argsort(drawn, 2, kind="stable")
        work = work_imbalance(np.take_along_axis(sizes[left, None], tries, 2), length, ranks)
        least = np.arange(len(left)), work.argmin(1)
        better = work[least] < best[left]
        best[left[better]], order[left[better]] = work[least][better], tries[least][better]
    return np.take_along_axis(pieces, order[..., None], 1)


def work_imbalance(sizes: Ints, length: int, ranks: Floats | None = None) -> Floats:
    """Return, to lay packed documents evenly, the work of the busiest rank of a context in terms of the mean, in the
    most uneven context, for documents of `sizes` [..., documents] end to end in a row of `length` tokens; padding
    behind them is a document too."""
    ranks = _ranks_of_cells(length) if ranks is None else ranks
    cells, ends, zero = len(ranks), np.cumsum(sizes, -1), np.zeros((*sizes.shape[:-1], 1), np.int64)
    starts, before = (np.concatenate([zero, x], -1) for x in (ends, np.cumsum(_count_causal_pairs(sizes), -1)))
    border, rows = np.arange(cells + 1) * length // cells, prod(zero.shape)
    next_border = -(-ends * cells // length) + np.arange(rows).reshape(zero.shape) * (cells + 1)
    ended = np.bincount(next_border.ravel(), minlength=rows * (cells + 1)).reshape(*zero.shape[:-1], cells + 1)
    document = np.cumsum(ended, -1)  # in which a border lies
    into = border - np.take_along_axis(starts, document, -1)
    seen = (np.take_along_axis(before, document, -1) + _count_causal_pairs(into)).astype(np.float64)
    return (np.diff(seen) @ ranks).max(-1) / seen[..., -1]


def _count_causal_pairs(tokens: Ints) -> Ints:
    """Return how many keys the first so many tokens of a packed document see together."""
    return tokens * (tokens + 1) // 2


def _ranks_of_cells(length: int) -> Floats:
    """Return which ranks have the cells of a packed row of `length` tokens, [cells, ranks of all contexts]: their
    number of ranks, or 0."""
    rounds = {n: min(MOST_ROUNDS, 1 << max(1, length // (2 * n * LEAST_PIECE)).bit_length() - 1) for n in RANKS}
    cells = max(2 * n * m for n, m in rounds.items())
    blocks_of_ranks = []
    for n, m in rounds.items():
        of_pieces = np.zeros((2 * n * m, n))
        of_pieces[zigzag_order(n, m), np.repeat(np.arange(n), 2 * m)] = n
        blocks_of_ranks.append(np.repeat(of_pieces, cells // len(of_pieces), 0))
    return np.concatenate(blocks_of_ranks, 1)


def _draw_integers(keys: Ints, number: Ints) -> NDArray[np.uint64]:
    """Return a random integer for each key in each draw of a `number`, the same on every machine (SplitMix64)."""
    x = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + (number.astype(np.uint64) << np.uint64(40))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


logger = logging.getLogger(__name__)
FORMAT = 1  # of an entry: raise it when the same documents would give other rows
_TREATMENTS = {"split": "split over rows", "cut": "cut", "drop": "dropped"}  # of longer documents than a row
_COUNT = Annotated[int, Span(0, 1 << 50)]


def pack_streams(
    streams: Mapping[str, Any],
    tokens: Path,
    length: int,
    begin: int,
    overlong: str = "split",
    *,
    end: int = -1,
    keeps_documents_apart: bool = False,
    together: int = 1,
    trusted: bool = False,
) -> dict[str, PackedStream]:
    """Return token streams packed into rows of `length` tokens, by split: whole documents laid end to end. The rows are
    kept beside `tokens`, the cache entry of the streams, made by the first process that asks; `trusted`: another
    process of this run has verified them. `begin`: the token with which a document begins, where the entry does not
    know; `end`: the token with which a document ends, perhaps the same one. `overlong`: what becomes of documents
    that are longer than a row (`best_fit`); `keeps_documents_apart`: no token sees another document; `together`:
    number of documents in turn that lie in one row, as one (2 of a pair of answers). Rows without a token to learn are
    left out, unless all are. Raises ConfigError, OSError, Malformed."""
    masked = any(token_loss_mask(stream) is not None for stream in streams.values())
    policy = [
        *([] if overlong == "split" else [overlong]),
        *([f"even {EVEN_ROWS_FORMAT}"] if keeps_documents_apart else []),
    ]
    policy += ["labelled"] if masked else []
    policy += [f"by {together}"] if together > 1 else []
    entry = tokens.parent / cache.hash_cache_key(["packed", FORMAT, tokens.name, length, begin, *policy])
    sizes = {split: len(stream) for split, stream in streams.items()}
    whole = overlong == "split" and not masked
    read = partial(_read_packed_rows, sizes=sizes, length=length, deep=not trusted, whole=whole)

    def write_packed_rows(folder: Path) -> dict[str, Any]:
        """Pack each split's documents into rows, written to the cache entry `folder`; return their numbers."""
        counts, left_out = {}, {}
        for split, stream in streams.items():
            starts, remarks = find_document_starts(stream, begin), []
            bounds = np.append(starts[::together], len(stream))
            if longer := int((np.diff(bounds) > length).sum()):
                are = f"are longer than a row of {length} tokens, and are {_TREATMENTS[overlong]}"
                remarks.append(f"{longer} of {len(bounds) - 1} {'documents' if together == 1 else 'pairs'} {are}")
            with show_phase("packing documents into rows"):
                packed = best_fit(bounds, length, overlong)
                pieces, rows = _leave_out_unlabelled_rows(stream, *packed, starts, end)
                if unlabelled := len(packed[1]) - len(rows):
                    left_out[split] = unlabelled
                    remarks.append(f"{unlabelled} of {len(packed[1]) - 1} rows teach nothing and are left out")
                pieces = even_rows(pieces, rows, length) if keeps_documents_apart else pieces
            pieces.astype("<i8").tofile(folder / f"{split}_pieces.bin")
            rows.astype("<i8").tofile(folder / f"{split}_rows.bin")
            counts[split] = [len(pieces), len(rows)]
            if remarks:
                logger.info("%s: %s", split, "; ".join(remarks))
        return {"splits": counts, **({"left_out": left_out} if left_out else {})}

    rows_by_split = (
        cache.open_trusted_entry(entry, read) if trusted else cache.fetch_entry(entry, write_packed_rows, read)
    )
    unknown = {split: np.full(len(s.starts), np.nan) for split, s in streams.items() if together > 1}  # references
    return {split: PackedStream(s, *rows_by_split[split], unknown.get(split)) for split, s in streams.items()}


def _mask_learned_successors(stream: Any, starts: Ints, end: int) -> NDArray[np.bool_]:
    """Return a mask of the tokens of a stream behind which one is learned; arguments as of
    `_leave_out_unlabelled_rows`."""
    follows = np.append(np.asarray(token_loss_mask(stream))[1:], False)
    begins = starts[starts > 0]
    follows[begins - 1] &= np.asarray(stream[begins]) == end
    return follows


def find_labelled_samples(stream: Any, length: int, count: int, end: int, keeps_documents_apart: bool) -> Ints:
    """Return which of the `count` samples of `length` tokens that are cut from a stream of tokens, end to end, have a
    token to learn; all of them where none has. `end`: the token with which a document ends; `keeps_documents_apart`: no
    token sees another document. The stream has a mask of the tokens to learn."""
    starts = find_document_starts(stream, -1) if keeps_documents_apart else np.empty(0, np.int64)
    labelled = _mask_learned_successors(stream, starts, end)[: count * length].reshape(count, length).any(1)
    return np.flatnonzero(labelled if labelled.any() else ~labelled)


def _leave_out_unlabelled_rows(stream: Any, pieces: Ints, rows: Ints, starts: Ints, end: int) -> tuple[Ints, Ints]:
    """Return the packed rows, `pieces` and `rows` as of `PackedStream`, that have a token to learn; all of them where
    no row has one, or the stream says nothing of it. `starts`: the positions at which its documents begin; a token
    there is learned only if it is `end`, which ends the document before."""
    if token_loss_mask(stream) is None or not len(pieces):
        return pieces, rows
    follows, counts = _mask_learned_successors(stream, starts, end), np.diff(rows)
    order = np.argsort(pieces[:, 0])
    bounds = np.stack([pieces[order, 0], pieces[order].sum(1)], 1).ravel()  # each piece, and what lies behind it
    labelled = np.logical_or.reduceat(np.append(follows, False), bounds)[::2][np.argsort(order)]
    kept = np.logical_or.reduceat(labelled, rows[:-1])
    if not kept.any():
        return pieces, rows
    return pieces[np.repeat(kept, counts)], np.append(0, np.cumsum(counts[kept]))


@dataclass(frozen=True)
class _Rows:
    """Description of packed rows in the cache: of each split the numbers of pieces, and of bounds of rows, and of rows
    that teach nothing and are left out."""

    splits: dict[Annotated[str, OneOf(("train", "validation"), "split")], tuple[_COUNT, _COUNT]]
    files: dict[str, Any]
    left_out: dict[str, _COUNT] = field(default_factory=dict)


def _read_packed_rows(
    folder: Path, meta: dict[str, Any], sizes: Mapping[str, int], length: int, deep: bool, whole: bool
) -> dict[str, tuple[Ints, Ints, int]]:
    """Read the packed rows of documents from the cache entry `folder`, mapped into memory, split -> (pieces, rows, rows
    that were left out), and check them against the description `meta` and, if `deep`, against the numbers of tokens
    `sizes`; `whole`: rows hold all tokens. Raises Malformed for rows that `best_fit` cannot have made."""
    described = schema.parse_value(_Rows, meta)
    rows_by_split = {}
    for split, size in sizes.items():
        pieces, rows = (map_array(folder / f"{split}_{name}.bin", "<i8") for name in ("pieces", "rows"))
        counts = [len(pieces) / 2, len(rows)]
        if counts != list(described.splits.get(split, ())) or (
            deep and not _are_rows_legal(pieces.reshape(-1, 2), rows, size, length, whole)
        ):
            raise Malformed(f"the rows of {split} are not its tokens")
        rows_by_split[split] = pieces.reshape(-1, 2), rows, described.left_out.get(split, 0)
    return rows_by_split


def _are_rows_legal(pieces: Ints, rows: Ints, size: int, length: int, whole: bool) -> bool:
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


def best_fit(document_bounds: Ints, length: int, overlong: str = "split") -> tuple[Ints, Ints]:
    """Pack documents, which lie between `document_bounds` (ascending token positions, the first 0), into rows of
    `length` tokens: return int64 pieces [n, 2] of (first token, tokens), and the bounds of rows among them. A document
    that is longer is split after every `length` tokens, or cut after so many, or dropped, as `overlong` says."""
    pieces = _cut_documents(document_bounds, length)
    if overlong != "split":
        if overlong == "cut":
            first = np.isin(pieces[:, 0], document_bounds)
        else:
            first = np.diff(document_bounds)[_find_documents_of_pieces(pieces, document_bounds)] <= length
        pieces = pieces[first]
    row = np.empty(len(pieces), np.int64)
    rooms: list[list[int]] = [[] for _ in range(length + 1)]  # by the tokens that still fit: the rows with such room
    room_bits, count = 0, 0  # bit n of `room_bits` is set if rooms[n] holds a row
    sizes = pieces[:, 1].tolist()
    for number in np.argsort(-pieces[:, 1], kind="stable").tolist():
        size = sizes[number]
        if fitting := room_bits >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            target_row = rooms[room].pop()
            room_bits ^= 0 if rooms[room] else 1 << room
        else:
            room, target_row = length, count
            count += 1
        row[number] = target_row
        if left := room - size:
            rooms[left].append(target_row)
            room_bits |= 1 << left
    first = np.full(count, len(pieces), np.int64)
    np.minimum.at(first, row, np.arange(len(pieces)))
    row_rank = np.empty(count, np.int64)
    row_rank[np.argsort(first)] = np.arange(count)
    order = np.lexsort((pieces[:, 0], row_rank[row]))
    return pieces[order], np.append(0, np.cumsum(np.bincount(row_rank[row], minlength=count)))


def _find_documents_of_pieces(pieces: Ints, bounds: Ints) -> Ints:
    """Return, for each piece of a packed document, the number of its document, which lies between `bounds`."""
    return np.searchsorted(bounds, pieces[:, 0], "right") - 1


def _cut_documents(bounds: Ints, length: int) -> Ints:
    """Cut documents, given by their `bounds`, into pieces of at most `length` tokens: [n, 2] of (first, tokens)."""
    sizes = np.diff(bounds)
    parts = -(-sizes // length)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)  # of a piece in its document
    starts = np.repeat(bounds[:-1], parts) + number * length
    return np.stack([starts, np.minimum(length, np.repeat(bounds[1:], parts) - starts)], 1)

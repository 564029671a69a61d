"""Streams of tokens, from which objectives make samples: an array of ids, or one of the classes here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

PADDING = -1
_WINDOW = 1 << 22  # tokens that are looked at once
Ints = NDArray[np.int64]


def beginnings(stream: Any, end: int) -> Ints:
    """Return the positions at which the documents of a stream of tokens begin, ascending: those that it knows, or those
    of the token `end`, of which -1 is none; the stream's first position is always among them."""
    if isinstance(stream, DocumentStream):
        found = stream.starts
    else:
        windows = range(0, len(stream) if end >= 0 else 0, _WINDOW)
        where = (np.arange(i, min(i + _WINDOW, len(stream))) for i in windows)
        found = np.concatenate([np.empty(0, np.int64), *(place[np.asarray(stream[place]) == end] for place in where)])
    return found if len(found) and found[0] == 0 else np.concatenate([np.zeros(1, np.int64), found])


def documents(stream: Any, end: int) -> Iterator[NDArray[Any]]:
    """Yield the tokens of each document of a stream, as `beginnings` divides it."""
    starts = [*beginnings(stream, end).tolist(), len(stream)]
    for start, until in pairwise(starts):
        yield np.asarray(stream[np.arange(start, until)])


@dataclass(frozen=True)
class PairStream:
    """Tokenised pairs of texts: `tokens` holds source and target of each pair in turn, `ends` [pairs, 2] where they
    end."""

    tokens: NDArray[Any]
    ends: Ints

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, side: int, index: Ints, length: int, last: int) -> Ints:
        """Return token ids [len(index), length] of the pairs `index`: their sources (side 0) or targets (side 1), each
        followed by the id `last`, cut or padded with -1 to `length`."""
        bounds = np.concatenate([[0], self.ends.reshape(-1)])
        start, end = bounds[2 * index + side], bounds[2 * index + side + 1]
        offset = np.arange(length)
        place, size = start[:, None] + offset, (end - start)[:, None]
        ids = self.tokens[np.minimum(place, max(len(self.tokens) - 1, 0))].astype(np.int64)
        return np.where(offset < size, ids, np.where(offset == size, last, PADDING))


@dataclass(frozen=True)
class JoinedTokens:
    """Arrays of tokens that lie in several files, as one: tokens [start, end) of them all, end to end."""

    arrays: Sequence[NDArray[Any]]
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def __getitem__(self, index: Ints) -> NDArray[Any]:
        bounds = np.cumsum([0, *map(len, self.arrays)])
        place = np.asarray(index) + self.start
        which = np.searchsorted(bounds, place, "right") - 1
        found = np.empty(place.shape, np.int64)
        for number in np.unique(which):
            here = which == number
            found[here] = self.arrays[number][place[here] - bounds[number]]
        return found


@dataclass(frozen=True)
class DocumentStream:
    """Stream of tokens with what is known of its documents beside them. `starts`: the positions at which documents
    begin, ascending; `learned`: for each token whether it is to be predicted, None for all."""

    tokens: Any
    starts: Ints
    learned: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: Ints) -> NDArray[Any]:
        return np.asarray(self.tokens[index])

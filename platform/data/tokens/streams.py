"""Streams of tokens, from which objectives make samples: an array of ids, or one of the classes here."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PADDING = -1
Ints = NDArray[np.int64]


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

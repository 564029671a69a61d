"""Pieces: samples cut into shorter sequences, for steps whose sequences are shorter than model.length."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from platform.data.tokens.streams import Ints


def cut(samples: Mapping[str, Ints], pieces: int) -> dict[str, Ints]:
    """Cut each sample's data tensors [samples, length] into `pieces` sequences: return [samples * pieces, length /
    pieces]. A token keeps its label, even if this begins the next piece. A document that began before a piece begins
    with the piece."""
    found = {name: rows.reshape(len(rows) * pieces, -1) for name, rows in samples.items()}
    length = found["tokens"].shape[1]
    if "begins" in found:
        offset = np.tile(np.arange(pieces) * length, len(samples["tokens"]))[:, None]
        found["begins"] = np.maximum(found["begins"] - offset, 0)
    if "positions" in found:
        found["positions"] = np.minimum(found["positions"], np.arange(length))
    if "segments" in found:
        found["segments"] = found["segments"] - found["segments"][:, :1]
    return found


def pieces_of(corpus: Any, split: str, start: int, end: int, pieces: int) -> dict[str, Any]:
    """Return sequences [start, end) as `Corpus.batch` does samples, with each of these cut into `pieces` sequences."""
    if pieces == 1:
        return corpus.batch(split, start, end)
    first = start // pieces
    samples = corpus.batch(split, first, -(-end // pieces))
    return {name: rows[start - first * pieces : end - first * pieces] for name, rows in cut(samples, pieces).items()}

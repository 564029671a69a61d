"""Pieces of samples: a sample cut into shorter sequences, one after another (`platform.config.length_ramp`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from platform.data.corpus import Corpus


def pieces_of(corpus: Corpus, split: str, start: int, end: int, pieces: int) -> dict[str, Any]:
    """Return sequences [start, end) of the split's endless global order, as `Corpus.batch` does, where each sample is
    cut into `pieces` sequences: those of sample n are numbers [n pieces, (n + 1) pieces)."""
    if pieces == 1:
        return corpus.batch(split, start, end)
    first = start // pieces
    samples = corpus.batch(split, first, -(-end // pieces))
    return {name: rows[start - first * pieces : end - first * pieces] for name, rows in cut(samples, pieces).items()}


def cut(samples: Mapping[str, Any], pieces: int) -> dict[str, Any]:
    """Cut each sample's data tensors [samples, length] into so many `pieces`: return them as [samples * pieces, length
    / pieces]. A token keeps its label, also where that begins the next piece. What counts from the beginning of a
    document, or of a sample, counts from that of the piece where the document begins before it."""
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

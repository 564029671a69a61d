"""Histograms for services that show them with fewer bins than a run has counts."""

from __future__ import annotations

from typing import Any


def binned(counts: list[int], most: int) -> tuple[Any, Any]:
    """Return `counts` as a histogram of at most `most` bins, for services such as W&B, and the edges of its bins."""
    import numpy as np

    each = -(-len(counts) // most)
    bins = [sum(counts[i : i + each]) for i in range(0, len(counts), each)]
    return np.array(bins), np.array([*range(0, len(counts), each), len(counts)])

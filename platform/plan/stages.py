"""Which layers make a chunk: contiguous ranges of a model's layers, as even in cost as they can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from operator import add


def place_layers(costs: Sequence[float], chunks: int) -> list[range]:
    """Contiguous ranges of `costs`, one per chunk, whose largest sum is as small as possible.

    `costs`: of each unit in the model's order, the embedding and the head among them, in any unit (seconds, FLOPs).
    Among the placements with the smallest maximum the most even one (least sum of squares) is taken; among equals the
    one with shorter early chunks, which keep more microbatches alive. Exact, by dynamic programming in
    O(chunks x units^2), and deterministic. Where there are fewer units than chunks, the last unit, which has the loss,
    goes to the last chunk, and the chunks before it that find none are empty.
    """
    units, parts = len(costs), min(chunks, len(costs))
    total = [0.0, *accumulate(costs)]

    def cost(start: int, end: int) -> float:
        return total[end] - total[start]

    limit = max(cost(r.start, r.stop) for r in _split(units, parts, cost, max))
    found = _split(units, parts, lambda i, j: cost(i, j) ** 2 if cost(i, j) <= limit else inf, add)
    empty = [range(found[-1].start, found[-1].start)] * (chunks - parts)
    return [*found[:-1], *empty, found[-1]]


def _split(
    units: int, parts: int, price: Callable[[int, int], float], join: Callable[[float, float], float]
) -> list[range]:
    """`parts` non-empty ranges that tile range(units) and have the least joined price; of several the first."""
    best = [[inf] * (units + 1) for _ in range(parts + 1)]  # best[k][i]: of the units from i on, in k ranges
    cut = [[units] * (units + 1) for _ in range(parts + 1)]  # where the first of those ranges ends
    best[0][units] = 0.0
    for k in range(1, parts + 1):
        for i in range(units - k + 1):
            ends = range(i + 1, units - k + 2)
            best[k][i], cut[k][i] = min((join(price(i, j), best[k - 1][j]), j) for j in ends)
    ranges, start = [], 0
    for k in range(parts, 0, -1):
        ranges.append(range(start, cut[k][start]))
        start = cut[k][start]
    return ranges

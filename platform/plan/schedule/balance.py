"""Which layers make a chunk: contiguous ranges of a model's layers, as even in cost as they can be."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf


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

    limit = _smallest_maximum(costs, parts)
    found = _most_even(units, parts, cost, limit)
    empty = [range(found[-1].start, found[-1].start)] * (chunks - parts)
    return [*found[:-1], *empty, found[-1]]


def _smallest_maximum(costs: Sequence[float], parts: int) -> float:
    """The least limit under which filling ranges one after the other needs no more than `parts`: one of all sums."""

    def ranges(limit: float) -> int:
        count, filled = 1, 0.0
        for c in costs:
            if filled + c > limit:
                count, filled = count + 1, 0.0
            filled += c
        return count

    sums = sorted({s for start in range(len(costs)) for s in accumulate(costs[start:])})
    possible = sums[bisect_left(sums, max(costs)) :]
    return possible[bisect_left(possible, True, key=lambda limit: ranges(limit) <= parts)]


def _most_even(units: int, parts: int, cost: Callable[[int, int], float], limit: float) -> list[range]:
    """`parts` non-empty ranges that tile range(units), none above `limit`, with the least sum of squares; of several
    the one with the first cut first."""
    best = [[inf] * (units + 1) for _ in range(parts + 1)]  # best[k][i]: of the units from i on, in k ranges
    cut = [[units] * (units + 1) for _ in range(parts + 1)]  # where the first of those ranges ends
    best[0][units] = 0.0
    slack = limit * 1e-9  # sums of floats differ in the last place
    for k in range(1, parts + 1):
        for i in range(units - k + 1):
            for j in range(i + 1, units - k + 2):
                if (here := cost(i, j)) > limit + slack:
                    break
                if (price := here**2 + best[k - 1][j]) < best[k][i]:
                    best[k][i], cut[k][i] = price, j
    ranges, start = [], 0
    for k in range(parts, 0, -1):
        ranges.append(range(start, cut[k][start]))
        start = cut[k][start]
    return ranges

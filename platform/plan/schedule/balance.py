"""Division of a model's units (embedding, blocks, head) into chunks: contiguous ranges, as even in cost as possible."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf


def place_layers(costs: Sequence[float], chunks: int) -> list[range]:
    """Divide a model's units (embedding, blocks, head) into one contiguous range of unit numbers per pipeline chunk, so
    that the cost of the most expensive chunk is as small as possible.

    `costs`: one per unit in the model's order, embedding and head included, in seconds, FLOPs or any other measure.
    Among the placements with the smallest maximum the most even one (least sum of squares) is taken; among equals the
    one with shorter early chunks, which keep more microbatches alive. Exact, by dynamic programming in O(chunks x
    units^2), and deterministic. With fewer units than chunks, the last unit, which has the loss, goes to the last
    chunk, and the chunks just before it are empty.
    """
    units, parts = len(costs), min(chunks, len(costs))
    total = [0.0, *accumulate(costs)]

    def cost(start: int, end: int) -> float:
        """Return the cost of the units from `start` to `end` - 1 in one pipeline chunk."""
        return total[end] - total[start]

    limit = _smallest_maximum(costs, parts)
    found = _most_even(units, parts, cost, limit)
    empty = [range(found[-1].start, found[-1].start)] * (chunks - parts)
    return [*found[:-1], *empty, found[-1]]


def _smallest_maximum(costs: Sequence[float], parts: int) -> float:
    """Return the smallest cost that the most expensive pipeline chunk can have if the model's units (embedding, blocks,
    head), whose costs in model order are `costs`, are placed on at most `parts` chunks of consecutive units. It is
    found by bisection among the sums of all contiguous ranges: under a limit, chunks are filled one after the other."""

    def ranges(limit: float) -> int:
        """Return how many pipeline chunks hold all units of the model if none may cost more than `limit`."""
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
    """Return `parts` non-empty ranges of unit numbers, one per pipeline chunk, that tile range(units) in order, none of
    a cost above `limit`, with the least sum of squared costs; of equals the one with the earliest first cut.
    `cost(start, end)`: the sum of the costs of units start to end - 1."""
    best = [[inf] * (units + 1) for _ in range(parts + 1)]  # best[k][i]: units from i on in k ranges
    cut = [[units] * (units + 1) for _ in range(parts + 1)]  # cut[k][i]: the end of the first of these ranges
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

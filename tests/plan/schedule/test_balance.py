"""Layers placed by cost."""

import itertools
import random

import pytest

from platform.plan.schedule import place_layers


def sums(costs, ranges):
    return [sum(costs[i] for i in r) for r in ranges]


def test_the_smallest_possible_maximum_and_then_the_most_even():
    """Against all placements."""
    rng = random.Random(0)
    for _ in range(200):
        units = rng.randint(1, 8)
        chunks = rng.randint(1, units)
        costs = [rng.randint(1, 6) for _ in range(units)]
        chunk_ranges = place_layers(costs, chunks)
        assert [i for r in chunk_ranges for i in r] == list(range(units)) and all(len(r) for r in chunk_ranges)
        ways = []
        for cuts in itertools.combinations(range(1, units), chunks - 1):
            bounds = [0, *cuts, units]
            ways.append(sums(costs, [range(a, b) for a, b in itertools.pairwise(bounds)]))
        best = min((max(w), sum(c * c for c in w)) for w in ways)
        own = sums(costs, chunk_ranges)
        assert (max(own), sum(c * c for c in own)) == best


@pytest.mark.parametrize(
    ("costs", "chunks", "lengths"),
    [
        ([1] * 8, 4, [2, 2, 2, 2]),
        ([1] * 10, 4, [2, 2, 3, 3]),  # early chunks keep more microbatches alive
        ([1] * 8 + [4], 4, [2, 3, 3, 1]),  # a head as heavy as four layers
        ([0.2] + [1] * 6 + [1.5], 4, [3, 2, 2, 1]),  # an embedding is nearly free
        ([1, 1], 2, [1, 1]),
        ([0.0, 0.0, 0.0], 2, [1, 2]),
    ],
)
def test_examples(costs, chunks, lengths):
    assert [len(r) for r in place_layers(costs, chunks)] == lengths


def test_fewer_units_than_chunks_leave_chunks_before_the_last_empty():
    assert place_layers([1, 2, 3], 5) == [range(0, 1), range(1, 2), range(2, 2), range(2, 2), range(2, 3)]
    assert place_layers([1], 2) == [range(0, 0), range(0, 1)]

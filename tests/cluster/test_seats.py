"""Who gets which rank."""

import pytest

from platform.cluster.seats import seats

NODES = {n: f"node{n // 2}" for n in range(10)}


@pytest.mark.parametrize(
    ("before", "alive", "size", "same", "expected"),
    [
        ([], [0, 1, 2, 3], 4, False, [0, 1, 2, 3]),
        ([], [0, 1, 2, 3, 4], 4, False, [0, 1, 2, 3]),  # the last one is a spare
        ([0, 1, 2, 3], [0, 2, 3, 4], 4, True, [0, 4, 2, 3]),  # the others keep their ranks
        ([0, 1, 2, 3], [0, 1, 2, 4, 9], 4, True, [0, 1, 2, 4]),
        ([0, 1, 4, 5], [0, 4, 9, 3, 8], 4, True, [0, 9, 4, 3]),
        ([0, 8, 4, 5], [0, 4, 5, 3, 9], 4, True, [0, 9, 4, 5]),  # worker 9 is on the lost one's node
        ([0, 1, 2, 3], [0, 2, 3], 2, False, [0, 2]),
        ([4, 1, 2, 3], [0, 2, 3, 4], 3, False, [2, 3, 4]),  # those who sat hold the state
        ([2, 3], [0, 1, 2, 3], 4, False, [0, 1, 2, 3]),
    ],
)
def test_ranks(before, alive, size, same, expected):
    assert seats(before, alive, NODES, size, same) == expected

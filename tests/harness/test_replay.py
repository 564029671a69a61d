"""Replaying launch logs; tests/runtime/oracle/test_schemes.py replays those of real steps."""

from __future__ import annotations

import pytest

from platform.runtime.communicator import Launch
from tests.harness.replay import replay


def launch(*group: int, op: str = "all_reduce", elements: int = 8) -> Launch:
    return Launch(op, ("t",), group, elements)


def test_logs_that_run_to_their_end():
    assert replay([[], []]) is None
    assert replay([[launch(0, 1)] * 3, [launch(0, 1)] * 3]) is None
    independent = [[launch(0, 1), launch(0, 2)], [launch(0, 1)], [launch(2, 3), launch(0, 2)], [launch(2, 3)]]
    assert replay(independent) is None


@pytest.mark.parametrize(
    "other",
    [[], [launch(0, 1, op="all_gather")], [launch(0, 1, elements=9)], [launch(1, 2)]],
    ids=["ends early", "another operation", "another size", "another group"],
)
def test_logs_that_hang(other):
    said = replay([[launch(0, 1)], other, []])
    assert said.startswith("rank 0 at launch 0: all_reduce of 8 with (0, 1)")
    assert len(said.split("; ")) == 1 + len(other)


def test_one_launch_too_many_is_named():
    assert replay([[launch(0, 1)] * 2, [launch(0, 1)]]) == "rank 0 at launch 1: all_reduce of 8 with (0, 1)"

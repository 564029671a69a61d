"""Random plans compute what one process computes: a fixed seed, and thousands in the long test."""

from __future__ import annotations

import pytest

from platform.parallel.sharding.flat import FlatBucket
from tests.fuzz import plans
from tests.fuzz.runner import run

SEED, COUNT, HALF = 0, 130, 65
PARTS, EACH = 20, 250  # one part stays within the time limit of a test


@pytest.mark.parametrize("seed", [SEED, *(pytest.param(s, marks=pytest.mark.full) for s in range(HALF, COUNT, HALF))])
def test_plans_of_a_fixed_seed(seed, record_count):
    outcome = run(plans, seed, HALF)
    name = f"random plans of seeds {seed} to {seed + HALF - 1} (threads)"
    record_count(name, sum(outcome.counts.values()), HALF, f"`make test-all` runs {PARTS * EACH:,} more")


def test_negative_control_forgotten_microbatches(monkeypatch):
    """Where a gradient takes the place of the sum of those before, the last microbatch is all that counts."""
    sum_of = FlatBucket.sum_of
    monkeypatch.setattr(FlatBucket, "sum_of", lambda self, *names: (sum_of(self, *names)[0], True))
    with pytest.raises(AssertionError, match="gradient of"):
        run(plans, SEED, COUNT)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_thousands_of_plans(part):
    run(plans, SEED + COUNT + part * EACH, EACH)

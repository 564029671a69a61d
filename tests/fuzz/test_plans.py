"""Random plans compute what one process computes: a fixed seed, and thousands in the long test."""

from __future__ import annotations

import pytest

from tests.fuzz import plans
from tests.fuzz.runner import run

COUNT = 150
PARTS, EACH = 20, 250


@pytest.mark.xfail(strict=True, reason="weights are wrong after updates, and gradients where a rank holds one token")
def test_plans_of_a_fixed_seed(record_count):
    outcome = run(plans, 0, COUNT)
    record_count("random plans (threads)", sum(outcome.counts.values()), COUNT + PARTS * EACH)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_thousands_of_plans(part):
    run(plans, COUNT + part * EACH, EACH)

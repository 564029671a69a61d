"""Random plans compute what one process computes: a fixed seed, and thousands in the long test."""

from __future__ import annotations

import pytest

from platform.parallel.sharding.flat import FlatBucket
from platform.train.step import trainer
from platform.train.step.weights import Weights
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


def test_negative_control_averages_of_another_decay(monkeypatch):
    average = Weights.average
    wrong = lambda self, decay: average(self, decay / (1 + (self._plan.mesh.size > 1)))  # noqa: E731
    monkeypatch.setattr(Weights, "average", wrong)
    with pytest.raises(AssertionError, match="average of"):
        run(plans, SEED, COUNT)


def test_negative_control_the_last_size_of_a_growing_batch(monkeypatch):
    """Where the mean is over the labels of a whole batch while it is smaller."""
    share = trainer.share_of

    def wrong(plan, corpus, first, end):
        return share(plan, corpus, first, end if plan.mesh.size == 1 else first + plan.sequences)

    monkeypatch.setattr(trainer, "share_of", wrong)
    with pytest.raises(AssertionError, match=r"train.ramp_from=.*gradient of|gradient of.*train.ramp_from="):
        run(plans, SEED, COUNT)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_thousands_of_plans(part):
    run(plans, SEED + COUNT + part * EACH, EACH)

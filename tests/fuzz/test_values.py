"""A fixed seed of the values fuzzer; `full` runs 20,000 and wants a hundred of every class."""

import pytest

from tests.fuzz import values
from tests.fuzz.runner import run


def test_a_fixed_seed(record_count):
    outcome = run(values, seed=2026, count=50)
    ran = sum(outcome.counts.values())
    assert ran == 50
    record_count("values fuzz", ran, 20_000)


@pytest.mark.full
@pytest.mark.timeout(4 * 3600)
def test_twenty_thousand():
    outcome = run(values, seed=0, count=20_000, keep_going=True)
    assert not outcome.failures, "\n".join(message for _, message in outcome.failures)
    assert min(outcome.counts.values()) >= 100, outcome.table()


def test_a_check_that_lets_something_through_is_found(monkeypatch):
    """The negative control: without the bounds of single values the fuzz fails."""
    monkeypatch.setattr(values.launch, "violations_of_configuration", lambda config: [])
    monkeypatch.setattr(values.launch, "violations_of_values", lambda config: {})
    assert any(run(values, seed=seed, count=15, keep_going=True).failures for seed in range(2235, 2535, 15))

"""Hints of refused plans by a fixed seed; `full` follows those of 10,000 commands."""

import pytest

from platform.predict import legal_hints
from tests.fuzz import hints
from tests.fuzz.runner import run


def test_a_fixed_seed(record_count):
    outcome = run(hints, seed=100, count=12)
    record_count("hints fuzz", sum(outcome.counts.values()), 10_000)
    assert outcome.counts["legal"] < 12


@pytest.mark.full
@pytest.mark.timeout(8 * 3600)
def test_ten_thousand():
    outcome = run(hints, seed=0, count=10_000, keep_going=True)
    assert not outcome.failures, "\n".join(message for _, message in outcome.failures)
    assert min(outcome.counts.values()) >= 10, outcome.table()


def test_hints_that_nobody_tried_are_found(monkeypatch):
    """The negative control: as they were before, they lead to other refusals."""
    monkeypatch.setattr(legal_hints, "_rewrite_line", lambda config, list_refusals, mistakes, line: line)
    assert run(hints, seed=229, count=1, keep_going=True).failures

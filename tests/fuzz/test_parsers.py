"""Foreign files, damaged at random, harm nobody; `python -m tests.fuzz parsers --count 10000` draws more."""

import pytest

from tests.fuzz import parsers
from tests.fuzz.runner import run

pytest.importorskip("pyarrow")


def test_damaged_files_are_read_or_refused():
    outcome = run(parsers, seed=0, count=150)
    assert sum(outcome.counts.values()) == 150
    for form in parsers.FORMATS:
        assert outcome.counts[f"{form}: read"] + outcome.counts[f"{form}: refused"]


def test_the_files_that_are_damaged_are_good(tmp_path):
    for form, raw in parsers.originals(tmp_path).items():
        parsers.tried(tmp_path, form, raw)

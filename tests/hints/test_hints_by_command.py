"""A hint of every other command leads somewhere too: what a refusal names as nearest legal is typed, until the command
would start its workers, has done its work, or words end it."""

from __future__ import annotations

import re

import pytest

from tests.harness.suite import suite
from tests.hints.command_rows import ALWAYS, ROWS
from tests.hints.conftest import typed_of
from tests.hints.follow_hints import dead_end, hints

LINES = ROWS.strip().splitlines()
CASES = [{"row": line} for line in LINES]
SLOW = re.compile(
    "experiment=|tensor=|data=|cluster=|^(plan|doctor|slurm|launch|prepare|convert|kubernetes)"
)  # with many hints, or much to plan
QUICK = [case for case in CASES if not SLOW.search(case["row"])]


@suite("hints of commands followed (rows)", CASES, QUICK[::9])
def test_every_hint_of_a_command_leads_somewhere(refused, case):
    typed = typed_of(case["row"])
    lines = refused(typed)
    assert lines
    for line in lines:
        assert dead_end(refused, typed, line) == ""


@pytest.mark.parametrize("name", ALWAYS)
def test_a_command_has_rows(name):
    assert [line for line in LINES if line.split()[0] == name]


def test_a_row_has_hints_to_follow(refused):
    """Else rows would hold for the wrong reason."""
    assert any(hints(line) for line in refused(typed_of("generate --tokens=0")))

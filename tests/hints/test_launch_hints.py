"""A hint leads somewhere: what a refusal names as nearest legal is typed, until the command is accepted or words end
it.

The rows are those of the table of bad input; a row that is chosen is followed by every hint of its lines.
"""

import pytest

from tests.config.test_bad_input import ALL, ROWS
from tests.harness.suite import suite
from tests.hints.follow_hints import dead_end, hints

MADE = ALL[: -len(ROWS)]  # numbers beyond their bounds; then come the rows that are written
CASES = [{"arguments": " ".join(row[0]).encode("unicode_escape").decode()[:60], "row": i} for i, row in enumerate(ALL)]
CHOSEN = [*CASES[: len(MADE) : 40], *CASES[len(MADE) + 1 :: 5]]


@suite("hints followed (rows of bad input)", CASES, CHOSEN)
def test_every_hint_leads_somewhere(launch_refused, case):
    arguments, start, _ = ALL[case["row"]]
    for line in launch_refused(arguments):
        if line.startswith(start):
            assert dead_end(launch_refused, arguments, line) == ""


HINTED = {
    "seed=-1: must be >= 0; nearest legal: 0": ["seed=0"],
    "optimizer.betas=[1]: must be two numbers; nearest legal: [0.9, 0.95]": ["optimizer.betas=[0.9, 0.95]"],
    "eval.every=5: x; nearest legal: 0.05, eval.every=0": ["eval.every=0.05", "eval.every=0"],
    "data.path=x: there is no file; nearest legal: a path, data.path=FILE": [],
    "elastic.faults=x: must; nearest legal: 20:kill:3": ["elastic.faults=[20:kill:3]"],
    "train.stepz=5: unknown key; nearest legal: train.steps, train.stop_at": ["train.steps=5", "train.stop_at=5"],
}


@pytest.mark.parametrize("line", HINTED)
def test_how_hints_are_read(line):
    assert [typed for _, typed in hints(line)] == HINTED[line]


def test_a_hint_that_leads_nowhere_is_found():
    """Negative control: the hint of a refusal that is refused by the same line, and one that nothing follows."""
    line = "seed=-2: must be >= 0; nearest legal: -1"
    always = lambda arguments: [] if arguments == ["seed=0"] else ["seed=-1: must be even; nearest legal: -1"]  # noqa: E731
    assert "must be even" in dead_end(always, ["seed=-2"], line)
    assert dead_end(lambda arguments: ["it cannot be"], ["seed=-2"], line)
    assert dead_end(lambda arguments: [], ["seed=-2"], line) == ""

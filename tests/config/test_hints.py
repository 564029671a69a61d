"""A hint leads somewhere: what a refusal names as nearest legal is typed, until the command is accepted or words end
it.

The rows are those of the table of bad input; a row that is chosen is followed by every hint of its lines.
"""

import os
from argparse import Namespace
from unittest import mock

import pytest

from platform import launch
from platform.cluster.run.phases import Phases
from platform.composition.composer import open_composer
from platform.config import bounds
from platform.config.fields import ConfigError
from tests.config.follow_hints import dead_end, hints
from tests.config.test_bad_input import ALL, ROWS
from tests.fuzz.values import _again
from tests.harness.suite import suite

SHIPPED = dict(bounds.KEYS)  # other tests of this process register names of their own
MADE = ALL[: -len(ROWS)]  # numbers beyond their bounds; then come the rows that are written
CASES = [{"arguments": " ".join(row[0]).encode("unicode_escape").decode()[:60], "row": i} for i, row in enumerate(ALL)]
CHOSEN = [*CASES[: len(MADE) : 40], *CASES[len(MADE) + 1 :: 5]]


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """`refused(arguments)`: the lines of a command, none if it is planned; Hydra is opened once for all of them."""
    private, before = tmp_path_factory.mktemp("hints"), os.getcwd()
    os.chdir(private)

    def lines(arguments):
        chosen = any(argument.startswith("experiment=") for argument in arguments)
        typed = [f"+{a}" if a.startswith("experiment=") else a for a in arguments]
        typed = typed if chosen else ["+experiment=gpt_quick", *typed]
        try:
            launch._planned(Namespace(config_dir=None, overrides=typed, multirun=False), Phases())
        except ConfigError as error:
            return error.violations
        return []

    try:
        with (
            open_composer(None) as composer,
            mock.patch.object(launch, "open_composer", _again(composer)),
            mock.patch.dict(bounds.KEYS, SHIPPED),
        ):
            yield lines
    finally:
        os.chdir(before)


@suite("hints followed (rows of bad input)", CASES, CHOSEN)
def test_every_hint_leads_somewhere(refused, case):
    arguments, start, _ = ALL[case["row"]]
    for line in refused(arguments):
        if line.startswith(start):
            assert dead_end(refused, arguments, line) == ""


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


def test_a_hint_that_leads_nowhere_is_found(refused):
    """Negative control: the hint of a refusal that is refused by the same line, and one that nothing follows."""
    line = "seed=-2: must be >= 0; nearest legal: -1"
    always = lambda arguments: [] if arguments == ["seed=0"] else ["seed=-1: must be even; nearest legal: -1"]  # noqa: E731
    assert "must be even" in dead_end(always, ["seed=-2"], line)
    assert dead_end(lambda arguments: ["it cannot be"], ["seed=-2"], line)
    assert dead_end(lambda arguments: [], ["seed=-2"], line) == ""

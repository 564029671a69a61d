"""Every ailment of a run is named, by who and why: most of them while they last, before the driver has acted."""

import pytest

from tests.testbed.ailments import AILMENTS, SECONDS, Sick, by_command

CHEAP = ("deadlock in a backward pass", "sleeps, alone")  # in `make test`


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CHEAP else pytest.mark.full) for name in AILMENTS]
)
def test_the_culprit_is_named(name, tmp_path):
    with Sick(tmp_path, AILMENTS[name]) as sick:
        status = sick.verdict()
        assert sick.named(status), f"{status['verdict']}\n{sick.log.read_text()[-3000:]}"
        assert not (AILMENTS[name].lasts and sick.acted())
        assert not sick.others_named() and not sick.wrong, sick.wrong
        again, seconds = by_command(sick.run_dir)
    said = again["verdict"] or again["last_failure"]
    assert said and said["why"] == AILMENTS[name].why
    print(f"{name}: {seconds:.2f} s: {said['line']}")
    assert seconds < SECONDS

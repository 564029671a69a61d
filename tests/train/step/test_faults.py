"""Faults on purpose strike where and when they were asked to."""

import multiprocessing
import signal

import pytest

from platform.train.faults import Fault, Faults, Injected, arm_fault, inject_failure


def test_each_strikes_once():
    faults = Faults(["3:kill:1", "5:raise:7:backward", "3:stop:0:forward", "7:kill:0"])
    assert faults.take_due(2, 4) == []
    assert [str(f) for f in faults.take_due(3, 4)] == ["3:kill:1", "3:stop:0:forward"]
    assert faults.take_due(3, 4) == []
    assert [str(f) for f in faults.take_due(5, 2)] == ["5:raise:1:backward"]  # rank 7 is not there any more
    assert faults.take_due(8, 2) == [] == faults.take_due(7, 2)  # a driver that resumes after step 7 injects nothing


@pytest.mark.parametrize("text", ["", "3", "3:kill", "3:burn:1", "x:kill:1", "3:kill:-1"])
def test_others_are_refused(text):
    with pytest.raises(ValueError):
        Fault.parse(text)


def test_at_the_first_entry_of_its_section():
    entered = arm_fault(Fault(1, "raise", 0, "backward"))
    entered("forward")
    with pytest.raises(Injected):
        entered("backward")
    entered("backward")
    with pytest.raises(Injected):
        arm_fault(Fault(1, "raise", 0))("data")


def test_kill():
    process = multiprocessing.get_context("fork").Process(target=inject_failure, args=("kill",))
    process.start()
    process.join(10)
    assert process.exitcode == -signal.SIGKILL

"""A clock whose marks are events of a device: where the device is, told while the host waits for it."""

from __future__ import annotations

import pytest
import torch

from platform.parallel.communicator.base import Handle
from platform.parallel.communicator.clock import Clock
from platform.parallel.communicator.progress import PROGRESS, SYNCHRONIZE


class Event:
    """A device's event, in order of recording; the device has passed those before `reached`."""

    made = reached = 0

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.number, Event.made = Event.made, Event.made + 1

    def query(self) -> bool:
        return self.number < Event.reached

    def synchronize(self) -> None:
        Event.during()
        Event.reached = Event.made

    def elapsed_time(self, end: Event) -> float:
        return 1000.0 * (end.number - self.number)


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.made = Event.reached = 0
    PROGRESS.begin("step(1)")
    yield Clock("cuda")
    PROGRESS.begin("")


def test_a_heartbeat_tells_where_the_device_is(clock):
    with clock.section("step"):
        with clock.section("forward"):
            Handle(clock, lambda: None, lambda: None).wait()
        with clock.section("backward"):
            pass
    beats = []

    def during():
        for reached in range(Event.made + 1):
            Event.reached = reached
            beats.append(PROGRESS.beat())

    Event.during = during
    seconds, _ = clock.read()
    assert [(b.device, b.device_waits, b.completed) for b in beats] == [
        ("other work", False, 0),
        ("step", False, 0),
        ("forward", False, 0),
        ("exposed_comm", True, 0),
        ("forward", False, 1),
        ("step", False, 1),
        ("backward", False, 1),
        ("step", False, 1),
        ("other work", False, 1),
    ]
    assert {(b.section, b.waiting, b.call) for b in beats} == {(SYNCHRONIZE, True, "step(1)")}
    assert seconds == {"step": 3.0, "forward": 2.0, "exposed_comm": 1.0, "backward": 1.0}
    assert PROGRESS.beat().device == "", "only while the host waits for it"


def test_a_device_that_goes_on_has_moved_and_one_that_stands_has_not(clock):
    with clock.section("forward"):
        pass
    PROGRESS.enter("", False)

    def during():
        Event.reached = 1
        assert PROGRESS.beat().seconds < 0.02
        before = PROGRESS.beat().seconds
        while PROGRESS.beat().seconds < 0.05:  # it stands
            pass
        assert before < 0.05
        Event.reached = 2
        assert PROGRESS.beat().seconds < 0.02

    Event.during = during
    clock.read()


def test_a_broken_device_does_not_end_the_thread_that_answers(clock, monkeypatch):
    with clock.section("forward"):
        pass

    def broken(self):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(Event, "query", broken)
    Event.during = lambda: beats.append(PROGRESS.beat())
    beats = []
    clock.read()
    assert [(b.section, b.device) for b in beats] == [(SYNCHRONIZE, "")]

"""A clock whose marks are events of a device: where the device is, told while the host waits for it."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from platform.runtime.clock import SectionClock
from platform.runtime.communicator import CollectiveHandle
from platform.runtime.progress import PROGRESS, SYNCHRONIZE


class Event:
    """A device's event, in order of recording; the device has passed those before `reached`."""

    recorded = reached = 0

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.number, Event.recorded = Event.recorded, Event.recorded + 1

    def query(self) -> bool:
        return self.number < Event.reached

    def synchronize(self) -> None:
        Event.during()
        Event.reached = Event.recorded

    def elapsed_time(self, end: Event) -> float:
        return 1000.0 * (end.number - self.number)


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.recorded = Event.reached = 0
    PROGRESS.begin_call("step(1)")
    yield SectionClock("cuda")
    PROGRESS.begin_call("")


def test_a_heartbeat_tells_where_the_device_is(clock):
    with clock.time_section("step"):
        with clock.time_section("forward"):
            CollectiveHandle(clock, lambda: None, lambda: None).wait()
        with clock.time_section("backward"):
            pass
    beats = []

    def during():
        for reached in range(Event.recorded + 1):
            Event.reached = reached
            beats.append(PROGRESS.build_heartbeat())

    Event.during = during
    seconds = clock.take_section_times().seconds
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
    assert PROGRESS.build_heartbeat().device == "", "only while the host waits for it"


def test_a_collective_ends_where_a_stream_beside_has_waited_for_it(clock, monkeypatch):
    """Without holding the host or the stream that computes; the host synchronises when the clock is read."""
    streams, waits, held = ["compute"], [], object()

    @contextmanager
    def stream(other):
        streams.append(other)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda: "beside")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(Event, "during", lambda: None, raising=False)
    detailed = SectionClock("cuda", detailed=True)

    def wait():
        waits.append(streams[-1])

    with detailed.time_section("forward"):  # 0
        begin = detailed.record_mark()  # 1
        flight = detailed.note_launch("gather", begin, wait, held)  # 2, beside
        assert waits == ["beside"] and flight.held is held, "what it reads stays until the computing stream waits"
        detailed.begin_span("layers.0")  # 3
        CollectiveHandle(detailed, wait, lambda: None, flight=flight).wait()  # 4, 5
        detailed.begin_span("")  # 6
        assert waits == ["beside", "compute"] and flight.held is None
        never = detailed.note_launch("reduce", detailed.record_mark(), wait, held)  # not waited for in this step
        assert Event.reached == 0
    reading = detailed.take_section_times()
    assert reading.collectives == [("gather", 1.0, 4.0, 2.0)], "done before the rank wanted it"
    assert reading.spans == [("layers.0", 3.0, 6.0)] and Event.reached == Event.recorded
    CollectiveHandle(detailed, wait, lambda: None, flight=never).wait()
    assert detailed.take_section_times().collectives == [("reduce", 0.0, 0.0, 0.0)], (
        "it began and ended before this reading did"
    )


def test_waits_are_booked_by_axes_too(clock):
    Event.during = lambda: None
    with clock.time_section("forward"):
        for along in ("t", "data+t", "t", ""):
            CollectiveHandle(clock, lambda: None, lambda: None, along=along).wait()
    reading = clock.take_section_times()
    assert reading.waits == {"t": 2.0, "data+t": 1.0} and reading.seconds["exposed_comm"] == 4.0


def test_a_clock_without_a_timeline_notes_nothing_beside_sections(clock):
    clock.begin_span("layers.0")
    assert Event.recorded == 0 and clock.take_section_times() == ({}, {}, [], [], [])


def test_a_device_that_goes_on_has_moved_and_one_that_stands_has_not(clock):
    with clock.time_section("forward"):
        pass
    PROGRESS.enter_section("", False)

    def during():
        Event.reached = 1
        assert PROGRESS.build_heartbeat().seconds < 0.02
        before = PROGRESS.build_heartbeat().seconds
        while PROGRESS.build_heartbeat().seconds < 0.05:  # it stands
            pass
        assert before < 0.05
        Event.reached = 2
        assert PROGRESS.build_heartbeat().seconds < 0.02

    Event.during = during
    clock.take_section_times()


def test_a_broken_device_does_not_end_the_thread_that_answers(clock, monkeypatch):
    with clock.time_section("forward"):
        pass

    def broken(self):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(Event, "query", broken)
    Event.during = lambda: beats.append(PROGRESS.build_heartbeat())
    beats = []
    clock.take_section_times()
    assert [(b.section, b.device) for b in beats] == [(SYNCHRONIZE, "")]

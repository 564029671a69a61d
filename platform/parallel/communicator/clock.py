"""Clock that partitions one rank's time into named sections, to show where a step's time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from platform.parallel.communicator.progress import PROGRESS, SYNCHRONIZE, DevicePlace

ClockSpan = tuple[str, float, float]  # section, its start and end: seconds since the first mark after the last reading


class _Reading:
    """Marks of a clock since it was last read: (innermost section up to here, whether the rank waits for others in it,
    time or event). `passed` and `completed`: how many of them the device is known to have passed, and how many of these
    ended a wait for other ranks."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, bool, Any]] = []
        self.passed = self.completed = 0


class Clock:
    """Books a rank's time to the innermost open section. On CUDA it records events in the stream, so that only reading
    the clock synchronises. `entered`, if set, is called with the name of every section that is entered."""

    entered: Callable[[str], None] | None = None

    def __init__(self, device: torch.device | str = "cpu"):
        self._cuda = torch.device(device).type == "cuda"
        self._open: list[tuple[str, bool]] = []  # sections, with whether the rank only waits for others in them
        self._reading = _Reading()
        self._sections: list[tuple[str, int, int]] = []  # name, indices of its first and last mark

    def _mark(self) -> int:
        """Record the present time (on CUDA an event) as the end of a stretch of the innermost open section; return its
        index."""
        if self._cuda:
            when: Any = torch.cuda.Event(enable_timing=True)
            when.record()
        else:
            when = time.perf_counter()
        marks = self._reading.marks
        marks.append((*(self._open[-1] if self._open else ("", False)), when))
        return len(marks) - 1

    @contextmanager
    def section(self, name: str, waiting: bool = False) -> Iterator[None]:
        """Book the time inside the context to the section `name`, but for sections opened within it, and show it as
        this process's progress. `waiting`: the rank only waits for other ranks in it."""
        before = PROGRESS.enter(name, waiting)
        begin = self._mark()
        self._open.append((name, waiting))
        try:
            if self.entered:
                self.entered(name)
            yield
        finally:
            self._sections.append((name, begin, self._mark()))
            self._open.pop()
            PROGRESS.enter(*before)

    def read(self) -> tuple[dict[str, float], list[ClockSpan]]:
        """Read the clock and start it anew, between sections: return (seconds, spans) since the last reading.
        `seconds`: section name -> seconds in which it was the innermost open section ('' for the time outside of all
        sections). `spans`: (name, start, end) of every section that was open, ordered by end, so that a section follows
        those nested in it."""
        assert not self._open, "a clock is read between sections"
        seconds: dict[str, float] = defaultdict(float)
        marks, sections = self._reading.marks, self._sections
        if self._cuda and marks:
            with self.waiting_for_device():
                marks[-1][2].synchronize()
        self._reading, self._sections = _Reading(), []
        times = [self._between(marks[0][2], when) for _, _, when in marks]
        for begin, (name, _, _), end in zip(times, marks[1:], times[1:], strict=False):
            seconds[name] += end - begin
        return dict(seconds), [(name, times[begin], times[end]) for name, begin, end in sections]

    @contextmanager
    def waiting_for_device(self) -> Iterator[None]:
        """Mark the context as one in which the host waits for its device, and so perhaps for other ranks: heartbeats
        tell meanwhile where the device is."""
        with PROGRESS.waiting(SYNCHRONIZE, self.device_place if self._cuda else None):
            yield

    def device_place(self) -> DevicePlace:
        """Return where the device is among the marks of this clock, without waiting for it. Called by other threads
        while the host waits for the device."""
        reading = self._reading
        marks = reading.marks
        while reading.passed < len(marks) and marks[reading.passed][2].query():
            reading.completed += marks[reading.passed][1]
            reading.passed += 1
        section, waiting = marks[reading.passed][:2] if reading.passed < len(marks) else ("", False)
        return DevicePlace(section or "other work", waiting, reading.completed, reading.passed)

    def _between(self, begin: Any, end: Any) -> float:
        """Return the seconds from mark `begin` to mark `end`."""
        return begin.elapsed_time(end) / 1000 if self._cuda else end - begin

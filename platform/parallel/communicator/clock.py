"""Clock that partitions one rank's time into named sections, to show where a step's time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from platform.parallel.communicator.progress import PROGRESS

ClockSpan = tuple[str, float, float]  # section, its start and end: seconds since the first mark after the last reading


class Clock:
    """Books a rank's time to the innermost open section. On CUDA it records events in the stream, so that only reading
    the clock synchronises. `entered`, if set, is called with the name of every section that is entered."""

    entered: Callable[[str], None] | None = None

    def __init__(self, device: torch.device | str = "cpu"):
        self._cuda = torch.device(device).type == "cuda"
        self._open: list[str] = []
        self._marks: list[tuple[str, Any]] = []  # (innermost section up to here, time or event)
        self._sections: list[tuple[str, int, int]] = []  # name, indices of its first and last mark

    def _mark(self) -> int:
        """Record the present time (on CUDA an event) as the end of a stretch of the innermost open section; return its
        index."""
        if self._cuda:
            when: Any = torch.cuda.Event(enable_timing=True)
            when.record()
        else:
            when = time.perf_counter()
        self._marks.append((self._open[-1] if self._open else "", when))
        return len(self._marks) - 1

    @contextmanager
    def section(self, name: str, waiting: bool = False) -> Iterator[None]:
        """Book the time inside the context to the section `name`, but for sections opened within it, and show it as
        this process's progress. `waiting`: the rank only waits for other ranks in it."""
        before = PROGRESS.enter(name, waiting)
        begin = self._mark()
        self._open.append(name)
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
        marks, self._marks = self._marks, []
        sections, self._sections = self._sections, []
        if self._cuda and marks:
            with PROGRESS.waiting("synchronize"):  # waits for the device, and so for the collectives in its stream
                marks[-1][1].synchronize()
        times = [self._between(marks[0][1], when) for _, when in marks]
        for begin, (name, _), end in zip(times, marks[1:], times[1:], strict=False):
            seconds[name] += end - begin
        return dict(seconds), [(name, times[begin], times[end]) for name, begin, end in sections]

    def _between(self, begin: Any, end: Any) -> float:
        """Return the seconds from mark `begin` to mark `end`."""
        return begin.elapsed_time(end) / 1000 if self._cuda else end - begin

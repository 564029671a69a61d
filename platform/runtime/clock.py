"""Clock that partitions one rank's time into named sections, to show where a step's time goes, and notes beside them
what overlaps: spans of the model, and collectives from their launch to their end."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from platform.runtime.progress import PROGRESS, SYNCHRONIZE, DevicePlace

WAITING = "exposed_comm"  # section in which a rank waits for a collective
# of a pass that waits for its turn: sections, its span of the model, and what heartbeats say of it
OpenSections = tuple[list[tuple[str, bool, str, int]], str, Any]
ClockSpan = tuple[str, float, float]  # section, its start and end: seconds since the first mark after the last reading


class ClockReading(NamedTuple):
    """Reading of a clock: what it has booked and noted since the reading before, times in seconds since its first mark.

    seconds      section name -> seconds in which it was the innermost open section ('' for the time outside of all)
    waits        axes, joined by "+" -> seconds, part of the above, in which the rank waited for collectives along these
    sections     every section that was open, ordered by end, so that a section follows those nested in it
    spans        spans of the model, in order
    collectives  finished collectives, in order of launch: description, and the times of its launch (0 if that was
                 before), of the rank's beginning to wait for it, and of its end

    `spans` and `collectives` are empty unless the clock is `detailed`.
    """

    seconds: dict[str, float]
    waits: dict[str, float]
    sections: list[ClockSpan]
    spans: list[ClockSpan]
    collectives: list[tuple[Any, float, float, float]]


class Flight:
    """Collective from its launch on. `begin`: mark of a clock at its launch; `waited`: marks at the start and the end
    of the wait for it, None until then; `done`, on CUDA: the event at its end. `held`: its input, kept until the
    device's stream waits for it."""

    __slots__ = ("begin", "done", "held", "waited", "what")

    def __init__(self, what: Any, begin: int, done: Any, held: Any):
        """Note collective `what` as launched after the mark `begin`; `done`: its end's event; `held`: its input."""
        self.what, self.begin, self.done, self.held = what, begin, done, held
        self.waited: tuple[int, int] | None = None


class _Reading:
    """Marks of a clock since it was last read: (innermost section up to here, whether the rank waits for others in it,
    along which axes, time or event). `passed` and `completed`: number of them that the device is known to have passed,
    and number of these that ended a wait for other ranks."""

    def __init__(self) -> None:
        """Start a reading of the clock without marks, of which the device has passed none."""
        self.marks: list[tuple[str, bool, str, Any]] = []
        self.passed = self.completed = 0


class SectionClock:
    """Books a rank's time to the innermost open section. On CUDA it records events in the stream, so that only reading
    the clock synchronises. `entered`, if set, is called with the name of every section that is entered. `detailed`:
    spans of the model and collectives are noted too, for a timeline. `ranges`, set while a profiler records, makes a
    range in its trace from the name of a section or collective.
    """

    entered: Callable[[str], None] | None = None
    ranges: Callable[[str], AbstractContextManager[Any]] | None = None

    def __init__(self, device: torch.device | str = "cpu", *, detailed: bool = False):
        """Start the clock of a rank's step, by CUDA events on a GPU. `detailed`: collectives get their own times."""
        self._cuda = torch.device(device).type == "cuda"
        self._beside: torch.cuda.Stream | None = None  # waits for collectives, nothing else
        self.set_detailed(detailed)
        # sections, whether the rank only waits for others in them, along which axes, and their first marks
        self._open: list[tuple[str, bool, str, int]] = []
        self._begin_reading()

    def set_detailed(self, detailed: bool) -> None:
        """Set whether this clock notes spans of the model and collectives too. Called between steps."""
        self.detailed = detailed
        self._beside = self._beside or (torch.cuda.Stream() if self._cuda and detailed else None)

    @property
    def open_sections(self) -> list[str]:
        """Return the open sections of this clock, the innermost last. Called by other threads too."""
        return [name for name, *_ in list(self._open)]

    def _begin_reading(self) -> None:
        """Begin a new reading of the clock: forget all marks, sections, spans and collectives."""
        self._reading = _Reading()
        self._sections: list[tuple[str, int, int]] = []  # name, indices of its first and last mark
        self._spans: list[tuple[str, int, int]] = []  # likewise
        self._span = ("", 0)  # the one under way, and its first mark
        self._flights: list[Flight] = []

    def record_mark(self) -> int:
        """Record the present time (on CUDA an event) as the end of a stretch of the innermost open section; return its
        index."""
        if self._cuda:
            when: Any = torch.cuda.Event(enable_timing=True)
            when.record()
        else:
            when = time.perf_counter()
        marks = self._reading.marks
        marks.append((*(self._open[-1][:3] if self._open else ("", False, "")), when))
        return len(marks) - 1

    @contextmanager
    def time_section(self, name: str, waiting: bool = False, along: str = "", what: Any = None) -> Iterator[None]:
        """Book the time inside the context to the section `name`, but for sections opened within it, and show it as
        this process's progress. `waiting`: the rank only waits for other ranks in it, `along` these axes, for the
        collective or message `what`."""
        before = PROGRESS.enter_section(name, waiting, False, what)
        self._open.append((name, waiting, along, self.record_mark()))
        try:
            if self.entered:
                self.entered(name)
            if self.ranges:
                with self.ranges(name):
                    yield
            else:
                yield
        finally:
            self._sections.append((name, self._open[-1][3], self.record_mark()))
            self._open.pop()
            PROGRESS.enter_section(*before)

    def swap_sections(self, others: OpenSections | None, depth: int) -> OpenSections:
        """Close a pass's open sections, behind the first `depth` ones, and its span, and open the `others`, of another
        pass; return the closed ones."""
        mark, span = self.record_mark(), self._span[0]
        before = self._open[depth:], span, PROGRESS.now
        self._sections += ((name, begin, mark) for name, _, _, begin in reversed(before[0]))
        self.begin_span("")
        sections, span, now = others or ([], "", PROGRESS.now)
        self._open[depth:] = [(*section[:3], mark) for section in sections]
        self.begin_span(span)
        PROGRESS.now = now
        return before

    @property
    def is_followed(self) -> bool:
        """Return True if each section and collective is looked at by itself, when it begins."""
        return bool(self.detailed or self.entered or self.ranges)

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Return the stream whose events are this clock's times; None if these are the host's."""
        return torch.cuda.current_stream() if self._cuda else None

    def note_waits(self, waits: Sequence[tuple[Any, Any, str]]) -> None:
        """Note waits for collectives since the last mark, in order: the begin and end of each, and along which axes."""
        marks, outer = self._reading.marks, self._open[-1][:3] if self._open else ("", False, "")
        for begin, end, along in waits:
            self._sections.append((WAITING, len(marks), len(marks) + 1))
            marks += (*outer, begin), (WAITING, True, along, end)

    def begin_span(self, name: str) -> None:
        """Note that the model's span under way, if any, ends here and the one called `name` begins; "" for none."""
        if not self.detailed:
            return
        mark, (before, begin) = self.record_mark(), self._span
        if before:
            self._spans.append((before, begin, mark))
        self._span = name, mark

    def note_launch(self, what: Any, begin: int, wait: Callable[[], Any], input_memory: Any) -> Flight:
        """Note that a collective, described by `what`, was launched after the mark `begin`; `note_landing` notes its
        end. `wait`: holds the host, or on CUDA the current stream, until it is done; `input_memory`: the memory that it
        reads.

        On CUDA its end is an event in a stream that does nothing else but wait. On CPU only the wait for it shows its
        end: an earlier end counts until then.
        """
        done = None
        if self._beside and self.detailed:
            done = torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(self._beside):
                wait()
                done.record()
        self._flights.append(flight := Flight(what, begin, done, input_memory))
        return flight

    def profiler_range(self, name: str) -> AbstractContextManager[Any]:
        """Return a context in which a collective called `name` is launched: a range in a profiler's trace, if any."""
        return self.ranges(name) if self.ranges else nullcontext()

    def note_landing(self, flight: Flight) -> None:
        """Record that the wait for the collective `flight` ended with the clock's section that has just been closed."""
        flight.waited, flight.held = self._sections[-1][1:], None

    def take_section_times(self) -> ClockReading:
        """Return the times of the step since the clock was last read, and start it anew."""
        return self.end_reading()()

    def end_reading(self) -> Callable[[], ClockReading]:
        """Start the clock anew; return a function that waits for the device and returns the times since it was last
        read. A collective that is not waited for yet is left to the reading after its wait, from its beginning on."""
        assert not self._open, "a clock is read between sections"
        ended, sections, spans = self._reading, self._sections, self._spans
        flights = [(flight, *flight.waited) for flight in self._flights if flight.waited]
        under_way = [flight for flight in self._flights if not flight.waited]
        self._begin_reading()
        for flight in under_way:
            flight.begin = 0
        self._flights = under_way
        return partial(self._read_times, ended, sections, spans, flights)

    def _read_times(
        self,
        ended: _Reading,
        sections: Sequence[tuple[str, int, int]],
        spans: Sequence[tuple[str, int, int]],
        flights: Sequence[tuple[Flight, int, int]],
    ) -> ClockReading:
        """Wait until the device has passed the marks of the `ended` reading of a step's clock; return their times."""
        seconds, waits, marks = defaultdict[str, float](float), defaultdict[str, float](float), ended.marks
        if self._cuda and marks:
            with PROGRESS.mark_waiting(SYNCHRONIZE, partial(self._find_place, ended)):
                for event in (marks[-1][-1], *(flight.done for flight, _, _ in flights if flight.done)):
                    event.synchronize()
        if self._cuda:
            times = [marks[0][-1].elapsed_time(when) / 1000 for *_, when in marks]
        else:
            times = [when - marks[0][-1] for *_, when in marks]
        for begin, (name, _, along, _), end in zip(times, marks[1:], times[1:], strict=False):
            seconds[name] += end - begin
            if along:
                waits[along] += end - begin
        return ClockReading(
            dict(seconds),
            dict(waits),
            [(name, times[begin], times[end]) for name, begin, end in sections],
            [(name, times[begin], times[end]) for name, begin, end in spans],
            [
                (
                    f.what,
                    times[f.begin],
                    times[wait],
                    max(0.0, marks[0][-1].elapsed_time(f.done) / 1000) if f.done else times[end],  # on CUDA alone
                )
                for f, wait, end in flights
            ],
        )

    @contextmanager
    def mark_waiting_for_device(self) -> Iterator[None]:
        """Mark the context as one in which the host waits for its device, and so perhaps for other ranks: heartbeats
        meanwhile report the position of the device."""
        with PROGRESS.mark_waiting(SYNCHRONIZE, self.device_place if self._cuda else None):
            yield

    def device_place(self) -> DevicePlace:
        """Return where the device is among the marks of this clock; called by other threads while the host waits."""
        return self._find_place(self._reading)

    @staticmethod
    def _find_place(reading: _Reading) -> DevicePlace:
        """Return where the device is among the marks of a step's `reading` of the clock."""
        marks = reading.marks
        while reading.passed < len(marks) and marks[reading.passed][-1].query():
            reading.completed += marks[reading.passed][1]
            reading.passed += 1
        section, waiting = marks[reading.passed][:2] if reading.passed < len(marks) else ("", False)
        return DevicePlace(section or "other work", waiting, reading.completed, reading.passed)

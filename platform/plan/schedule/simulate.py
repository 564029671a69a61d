"""Simulation of a schedule: when each action starts and ends, the bubble, and how many activations are alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from platform.plan.schedule.table import PASS, Action, Kind, Schedule, ScheduleError, needs, result

# Durations in units of one chunk's forward pass of one microbatch.
NOMINAL: Mapping[Kind, float] = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}

Tensor = tuple[str, int, int]  # a result: pass, chunk, microbatch
Span = tuple[float, float]  # start, end of an action
Times = Mapping[Kind, float] | Callable[[int, Action], float]  # seconds by kind, or by (stage, action)


@dataclass(frozen=True, slots=True)
class TimedAction:
    """Action of a pipeline stage with its start and end, planned or measured, in seconds from the start of the step."""

    stage: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Result of simulating a pipeline schedule with `simulate`. `timeline` is ordered by end, then stage. `peak_live`:
    most forward passes of each stage at once whose backward pass, or weight gradient if split off, is not done."""

    timeline: tuple[TimedAction, ...]
    makespan: float  # seconds
    busy: tuple[float, ...]  # seconds that each stage computes
    peak_live: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Return the pipeline bubble: makespan / ideal - 1, where ideal is the busiest stage's time of computing."""
        return self.makespan / max(self.busy) - 1


def simulate(schedule: Schedule, times: Times = NOMINAL, transfer: float = 0.0) -> Simulation:
    """Simulate one step of a pipeline schedule's compute table, in which every stage starts its next action as soon as
    its inputs are there.

    `times`: duration of an action by kind, or as a function of (stage, action), by default NOMINAL. `transfer`: seconds
    between the end of an action and the start of one on another stage that needs its result; it keeps no stage busy.
    Raises ScheduleError with the stuck actions if stages wait for each other.
    """
    return _nominal(schedule) if times is NOMINAL and not transfer else _simulated(schedule, times, transfer)


@lru_cache(maxsize=4)
def _nominal(schedule: Schedule) -> Simulation:
    """Simulate a pipeline schedule with nominal times, once for the check, the lowering and the picture of it."""
    return _simulated(schedule, NOMINAL, 0.0)


def _simulated(schedule: Schedule, times: Times, transfer: float) -> Simulation:
    """Simulate one step of a pipeline schedule action by action; arguments and errors as of `simulate`."""
    seconds = times if callable(times) else (lambda stage, action: times[action.kind])
    spans = _timed_rows(schedule, seconds, transfer)
    events = [
        TimedAction(stage, action, start, end)
        for stage, (row, found) in enumerate(zip(schedule.rows, spans, strict=True))
        for action, (start, end) in zip(row, found, strict=True)
    ]
    return Simulation(
        timeline=tuple(sorted(events, key=lambda e: (e.end, e.stage, e.start))),
        makespan=_last(spans),
        busy=tuple(sum(seconds(stage, action) for action in row) for stage, row in enumerate(schedule.rows)),
        peak_live=tuple(map(_peak_live, schedule.rows)),
    )


def makespan(schedule: Schedule, seconds: Callable[[int, Action], float]) -> float:
    """Return the seconds of a schedule's step, as `simulate` does, from the seconds of (stage, action)."""
    return _last(_timed_rows(schedule, seconds, 0.0))


def _last(spans: Sequence[Sequence[Span]]) -> float:
    """Return when the last action ends."""
    return max((row[-1][1] for row in spans if row), default=0.0)


def _timed_rows(schedule: Schedule, seconds: Callable[[int, Action], float], transfer: float) -> list[list[Span]]:
    """Return by stage the start and the end of each action of its row; arguments and errors as of `simulate`."""
    waits = _waits(schedule)
    done: dict[int, tuple[float, int]] = {}  # by number of a result: its end and its stage
    spans: list[list[Span]] = [[] for _ in waits]
    progress = True
    while progress:
        progress = False
        for stage, (row, found) in enumerate(zip(waits, spans, strict=True)):
            now = found[-1][1] if found else 0.0
            while len(found) < len(row):
                action, inputs, made = row[len(found)]
                start = now
                for number in inputs:
                    if (there := done.get(number)) is None:
                        break
                    when, origin = there
                    start = max(start, when + transfer if origin != stage else when)
                else:
                    now = start + seconds(stage, action)
                    found.append((start, now))
                    done[made] = now, stage
                    progress = True
                    continue
                break
    if any(len(found) < len(row) for found, row in zip(spans, waits, strict=True)):
        raise ScheduleError(f"deadlock: {'; '.join(_stuck(schedule, spans))}", schedule.rows)
    return spans


@lru_cache(maxsize=8)
def _waits(schedule: Schedule) -> list[list[tuple[Action, tuple[int, ...], int]]]:
    """Return the rows of a schedule, of each action the numbers of the results that it needs, and of its own."""
    total, n = schedule.total_chunks, schedule.microbatches
    first = {which: i * total for i, which in enumerate(dict.fromkeys(PASS.values()))}

    def number(tensor: Tensor) -> int:
        """Return the number of a result."""
        which, chunk, microbatch = tensor
        return (first[which] + chunk) * n + microbatch

    return [[(a, tuple(map(number, needs(a, total))), number(result(a))) for a in row] for row in schedule.rows]


def _stuck(schedule: Schedule, spans: Sequence[Sequence[Span]]) -> Iterator[str]:
    """Yield a line per stage of the simulated schedule that is stuck: at which action, and why."""
    pairs = list(zip(schedule.rows, spans, strict=True))
    done = {result(action) for row, found in pairs for action in row[: len(found)]}
    for stage, (row, found) in enumerate(pairs):
        if len(found) < len(row):
            missing = [r for r in needs(row[len(found)], schedule.total_chunks) if r not in done]
            wanted = ", ".join(f"{chunk}{kind}{microbatch}" for kind, chunk, microbatch in missing)
            yield f"stage {stage} is stuck at {row[len(found)]}, which waits for {wanted}"


def _peak_live(row: tuple[Action, ...]) -> int:
    """Return the most microbatches in flight in one stage's row of a pipeline schedule: forward done, backward not."""
    steps = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: 0, Kind.WEIGHT: -1}
    return max(accumulate(steps[a.kind] for a in row), default=0)

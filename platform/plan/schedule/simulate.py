"""Simulation of a schedule: when each action starts and ends, the bubble, and how many activations are alive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from platform.plan.schedule.table import Action, Kind, Schedule, ScheduleError, needs, result

# Durations in units of one chunk's forward pass of one microbatch.
NOMINAL: Mapping[Kind, float] = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}

Tensor = tuple[str, int, int]  # a result: pass, chunk, microbatch
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
    done: dict[tuple[str, int, int], tuple[float, int]] = {}  # result -> (end, stage)
    waits = _waits(schedule)
    at = [0] * len(waits)
    clock, busy = [0.0] * len(at), [0.0] * len(at)
    events = []
    progress = True
    while progress:
        progress = False
        for stage, row in enumerate(waits):
            while at[stage] < len(row):
                action, inputs, made = row[at[stage]]
                if any(r not in done for r in inputs):
                    break
                start = clock[stage]
                for when, origin in map(done.__getitem__, inputs):
                    start = max(start, when + (transfer if origin != stage else 0.0))
                duration = seconds(stage, action)
                clock[stage] = end = start + duration
                busy[stage] += duration
                events.append(TimedAction(stage, action, start, end))
                done[made] = end, stage
                at[stage] += 1
                progress = True
    if stuck := [(stage, row[i]) for stage, (row, i) in enumerate(zip(schedule.rows, at, strict=True)) if i < len(row)]:
        lines = [_explain(stage, action, schedule, done) for stage, action in stuck]
        raise ScheduleError(f"deadlock: {'; '.join(lines)}", schedule.rows)
    return Simulation(
        timeline=tuple(sorted(events, key=lambda e: (e.end, e.stage, e.start))),
        makespan=max(clock),
        busy=tuple(busy),
        peak_live=tuple(map(_peak_live, schedule.rows)),
    )


@lru_cache(maxsize=8)
def _waits(schedule: Schedule) -> list[list[tuple[Action, list[Tensor], Tensor]]]:
    """Return the rows of a pipeline schedule, of each action what it needs and what it makes."""
    total = schedule.total_chunks
    return [[(action, needs(action, total), result(action)) for action in row] for row in schedule.rows]


def _explain(stage: int, action: Action, schedule: Schedule, done: Mapping) -> str:
    """Return a line that names the action at which a stage of the simulated schedule is stuck, and why."""
    missing = [r for r in needs(action, schedule.total_chunks) if r not in done]
    wanted = ", ".join(f"{chunk}{kind}{microbatch}" for kind, chunk, microbatch in missing)
    return f"stage {stage} is stuck at {action}, which waits for {wanted}"


def _peak_live(row: tuple[Action, ...]) -> int:
    """Return the most microbatches in flight in one stage's row of a pipeline schedule: forward done, backward not."""
    steps = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: 0, Kind.WEIGHT: -1}
    return max(accumulate(steps[a.kind] for a in row), default=0)

"""`timeline.json` and `timeline.svg`: the measured actions of every worker, beside those that its schedule planned.

Clocks of different machines are never compared: each step begins with a barrier, and a worker's times count from when
it left that barrier. They are as exact as the barrier: some ten microseconds inside a machine or on GPUs, about a
millisecond where processes share cores.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from platform.plan.schedule.gantt import gantt_svg
from platform.plan.schedule.simulate import Simulation, TimedAction, simulate
from platform.plan.schedule.table import COMPUTE, SENDS, Action, Kind, Rows, Schedule

KEPT_STEPS = 20  # the last ones are kept for the trace
WAIT = "bubble"  # clock section in which a worker waits for another stage
CATEGORIES = {"forward": "compute", "backward": "compute", WAIT: "wait", "exposed_comm": "wait"}  # else own name

Interval = Sequence[Any]  # name of a section or action, start, end: seconds since the step's barrier


class Timeline:
    """Collects the measured spans (name, start, end) of all ranks in a run's last steps, to write them as a trace and a
    picture. `rows`: the actions of every stage, lowered from `schedule`; `names`, `stages`: name and stage of each
    rank."""

    def __init__(self, schedule: Schedule, rows: Rows, names: Sequence[str], stages: Sequence[int]):
        self._schedule, self._names, self._stages = schedule, names, stages
        self._actions = [{str(a): a for a in row} for row in rows]  # per stage: action by name
        self._steps: deque[tuple[int, float, Sequence[Sequence[Interval]]]] = deque(maxlen=KEPT_STEPS)

    def step(self, step: int, start: float, spans: Sequence[Sequence[Interval]]) -> dict[str, float] | None:
        """Add the measured spans of every rank in the step that began at `start`, seconds on the driver's clock.

        Returns the bubble of the pipeline, {"planned", "measured"}, both in units of the busiest worker's computing
        time; None without a pipeline. Planned: the schedule simulated with each kind of action's mean time.
        """
        self._steps.append((step, start, spans))
        if self._schedule.stages == 1:
            return None
        ran = self._ran(spans)
        return {"planned": self._planned(ran).bubble, "measured": bubble(ran)}

    def write(self, directory: Path) -> None:
        """Write into the run's directory `timeline.json`, a trace of the last steps for Perfetto or chrome://tracing,
        and `timeline.svg`, the last step of the first worker of each stage. Does nothing if no step was done."""
        if not self._steps:
            return
        trace = {"traceEvents": list(self._trace()), "displayTimeUnit": "ms"}
        (directory / "timeline.json").write_text(json.dumps(trace, separators=(",", ":")) + "\n")
        (directory / "timeline.svg").write_text(self._picture())

    def _ran(self, spans: Sequence[Sequence[Interval]]) -> list[list[TimedAction]]:
        """Return, per rank, the schedule's actions among its spans of one step, with their times."""
        return [executed(s, self._actions[s], own) for s, own in zip(self._stages, spans, strict=True)]

    def _planned(self, ran: Sequence[Sequence[TimedAction]]) -> Simulation:
        """Simulate the schedule with the mean measured time of each kind of action; `ran`: per rank, its measured
        actions."""
        seconds: dict[Kind, list[float]] = defaultdict(list)
        for event in (event for events in ran for event in events):
            seconds[event.action.kind].append(event.end - event.start)
        return simulate(self._schedule, {kind: fmean(found) for kind, found in seconds.items()})

    def _picture(self) -> str:
        """Return an SVG of the last step: the simulated schedule above the measured actions of one rank per stage."""
        step, _, spans = self._steps[-1]
        ran = self._ran(spans)
        planned = self._planned(ran)
        first = [self._stages.index(stage) for stage in range(self._schedule.stages)]
        zero = min(event.start for rank in first for event in ran[rank])
        measured = [TimedAction(e.stage, e.action, e.start - zero, e.end - zero) for rank in first for e in ran[rank]]
        return gantt_svg(
            {
                f"planned: {self._schedule.name}, bubble {planned.bubble:.1%}": planned.timeline,
                f"measured: step {step}, bubble {bubble(ran):.1%}": measured,
            }
        )

    def _trace(self) -> Iterator[dict[str, Any]]:
        """Yield the spans of the kept steps as trace events, times in microseconds since the first of these steps.

        Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
        """
        for rank, name in enumerate(self._names):
            yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        zero = self._steps[0][1]
        for step, began, spans in self._steps:
            for rank, own in enumerate(spans):
                actions = self._actions[self._stages[rank]]
                for name, start, end in own:
                    time, length = (began - zero + start) * 1e6, (end - start) * 1e6  # microseconds
                    event = {"ph": "X", "pid": rank, "tid": 0, "ts": time, "dur": length}
                    if action := actions.get(name):
                        where = {"chunk": action.chunk, "microbatch": action.microbatch}
                        yield event | {"name": name, "cat": _category(action), "args": where}
                    else:
                        yield event | {"name": name, "cat": CATEGORIES.get(name, name), "args": {"step": step}}


def executed(stage: int, actions: dict[str, Action], spans: Sequence[Interval]) -> list[TimedAction]:
    """Return the schedule's actions among the measured spans of a rank of `stage` in one step, in order. A computation
    begins when the input that it waited for arrived. `actions`: name -> action of the stage."""
    events, arrived = [], 0.0
    for name, start, end in spans:  # ordered by end: a wait comes before the action that waited
        if name == WAIT:
            arrived = end
        elif action := actions.get(name):
            events.append(TimedAction(stage, action, max(start, arrived) if action.kind in COMPUTE else start, end))
    return events


def bubble(ran: Sequence[Sequence[TimedAction]]) -> float:
    """Return the pipeline bubble that was measured in a step, makespan / ideal - 1; ideal: the computing time of the
    busiest rank. `ran`: per rank, its measured actions."""
    computed = [[e for e in events if e.action.kind in COMPUTE] for events in ran]
    makespan = max(e.end for events in computed for e in events) - min(e.start for events in computed for e in events)
    return makespan / max(sum(e.end - e.start for e in events) for events in computed) - 1


def _category(action: Action) -> str:
    return "compute" if action.kind in COMPUTE else "send" if action.kind in SENDS else "receive"

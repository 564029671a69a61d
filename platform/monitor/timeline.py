"""`timeline.json` and `timeline.svg`: the measured actions of every worker, beside the planned ones of its schedule,
and the collectives that were under way meanwhile.

Clocks of different machines are never compared: each step begins with a barrier, and a worker's times count from when
it left that barrier. They are as exact as the barrier: some ten microseconds inside a machine or on GPUs, about a
millisecond where processes share cores.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from platform.boundary.local_files import replace_text
from platform.plan.gantt import Bar, draw_gantt_svg
from platform.plan.schedule import COMPUTE, SENDS, Action, Kind, Rows, Schedule
from platform.plan.simulate import Simulation, TimedAction, simulate

KEPT_STEPS = 20  # the last ones are kept for the trace
WAIT = "bubble"  # clock section in which a worker waits for another stage
CATEGORIES = {"forward": "compute", "backward": "compute", WAIT: "wait", "exposed_comm": "wait"}  # else own name
PASSES, END_OF_STEP = ("forward", "backward"), ("reduce", "optimizer")  # clock sections in actions, and after the last
MODEL, COMMUNICATION = "model", "communication"  # rows of a worker beside that of its actions

Interval = Sequence[Any]  # name of a section, action or span of the model, start, end: seconds since the step's barrier
Collective = Sequence[Any]  # name, operation, axes, bytes of its group; start, when it was waited for, end


class RankRecord(Protocol):
    """Record of a rank's step: the sections of its clock, ordered by end; the spans of the model that it computed, in
    order, if weights are gathered span by span; its collectives, in order of launch."""

    @property
    def sections(self) -> Sequence[Interval]:
        """Return the sections of a rank's step (compute, wait, ...) with their times, for the timeline."""

    @property
    def spans(self) -> Sequence[Interval]:
        """Return the intervals in which a rank computed parts of the model in a step, for the timeline."""

    @property
    def collectives(self) -> Sequence[Collective]:
        """Return the collectives that a rank launched in a step, with their times, for the timeline."""


class StepForecast(NamedTuple):
    """Forecast of a run's full steps on a `hardware`: the seconds of its `parts`, and the simulation of a schedule."""

    hardware: str
    parts: Mapping[str, float]
    simulated: Callable[[Schedule], Simulation]


class Timeline:
    """Collects what all ranks did in a run's last steps, to write it as a trace and a picture. `schedules`: schedules
    of steps, ascending by their number of microbatches; `rows`: per stage, the actions of each, lowered; `names`,
    `stages`: name and stage of each rank; `forecast`: the forecast of a full step, None until there is one."""

    def __init__(self, schedules: Sequence[Schedule], rows: Sequence[Rows], names: list[str], stages: Sequence[int]):
        """Prepare the timeline of a run's steps by pipeline `schedules`, for ranks of these `names` and `stages`."""
        self._schedules, self._names, self._stages = schedules, names, stages
        self._actions = [{str(a): a for row in of_stage for a in row} for of_stage in rows]  # per stage: by name
        self._steps: deque[tuple[int, float, Sequence[RankRecord], Mapping[str, float]]] = deque(maxlen=KEPT_STEPS)
        self.forecast: StepForecast | None = None

    def add_step(
        self, step: int, start: float, ranks: Sequence[RankRecord], parts: Mapping[str, float]
    ) -> dict[str, float] | None:
        """Add to the timeline what every rank did in the step that began at `start`, seconds on the driver's clock;
        `parts`: the seconds of the parts of that step.

        Returns the bubble of the pipeline, {"planned", "measured"}, both in units of the busiest worker's computing
        time; None without a pipeline. Planned: the schedule simulated with each kind of action's mean time.
        """
        self._steps.append((step, start, ranks, parts))
        if self._schedules[-1].stages == 1:
            return None
        ran = self._collect_actions(ranks)
        return {"planned": self._simulate_step(ran).bubble, "measured": measure_bubble(ran)}

    def write_files(self, directory: Path) -> None:
        """Write into the run's directory `timeline.json`, a trace of the last steps for Perfetto or chrome://tracing,
        and `timeline.svg`, the last step of the first worker of each stage. Does nothing if no step was done."""
        if not self._steps:
            return
        trace = {"traceEvents": list(self._trace_events()), "displayTimeUnit": "ms"}
        replace_text(directory / "timeline.json", json.dumps(trace, separators=(",", ":")) + "\n")
        replace_text(directory / "timeline.svg", self._draw_picture())

    def _collect_actions(self, ranks: Sequence[RankRecord]) -> list[list[TimedAction]]:
        """Return, per rank, the pipeline actions measured in a step, with their times, for the run's timeline."""
        staged = zip(self._stages, ranks, strict=True)
        return [extract_actions(stage, self._actions[stage], record.sections) for stage, record in staged]

    def _simulate_step(self, ran: Sequence[Sequence[TimedAction]]) -> Simulation:
        """Simulate a step's pipeline with each kind of action's mean time in the timeline; `ran`: actions per rank."""
        microbatches = 1 + max(event.action.microbatch for events in ran for event in events)
        schedule = next(s for s in self._schedules if s.microbatches == microbatches)
        seconds: dict[Kind, dict[tuple[int, Action], float]] = defaultdict(lambda: defaultdict(float))
        for rank, events in enumerate(ran):
            for event in events:  # several of an action that runs in turns with another
                seconds[event.action.kind][rank, event.action] += event.end - event.start
        return simulate(schedule, {kind: fmean(durations.values()) for kind, durations in seconds.items()})

    def _draw_picture(self) -> str:
        """Draw the timeline of the last step as SVG: the simulated schedule above the measured actions of one rank per
        stage, with what it computed of the model and its collectives."""
        step, _, ranks, _ = self._steps[-1]
        ran = self._collect_actions(ranks)
        planned = self._simulate_step(ran)
        first = [self._stages.index(stage) for stage in range(self._schedules[-1].stages)]
        zero = min(event.start for rank in first for event in ran[rank])
        measured = [TimedAction(e.stage, e.action, e.start - zero, e.end - zero) for rank in first for e in ran[rank]]
        title = f"measured: step {step}, bubble {measure_bubble(ran):.1%}"
        panels = {f"planned: {self._schedules[-1].name}, bubble {planned.bubble:.1%}": planned.timeline}
        if self.forecast:
            on = self.forecast.simulated(self._schedules[-1])
            panels[f"predicted on {self.forecast.hardware}: bubble {on.bubble:.1%}"] = on.timeline
        rows = {stage: list(_picture_rows(ranks[rank], zero)) for stage, rank in enumerate(first)}
        return draw_gantt_svg({**panels, title: measured}, beneath={title: rows})

    def _trace_events(self) -> Iterator[dict[str, Any]]:
        """Yield the trace events of what the ranks did in the kept steps, times in microseconds since the first of
        these steps: a process per rank, with a thread each for actions, computed parts (spans) of the model and, as
        they overlap, as many collectives as are under way at once.

        Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
        """
        for rank, name in enumerate(self._names):
            yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        if self.forecast:
            named = {"name": f"parts of a step on {self.forecast.hardware}"}
            yield {"ph": "M", "name": "process_name", "pid": len(self._names), "args": named}
        zero, threads = self._steps[0][1], set()
        for step, began, ranks, parts in self._steps:
            yield from self._step_part_events(step, began - zero, parts)
            for rank, record in enumerate(ranks):
                for thread, start, end, more in rank_events(self._actions[self._stages[rank]], step, record):
                    if (rank, thread) not in threads:
                        threads.add((rank, thread))
                        args = {"name": thread_name(thread)}
                        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": args}
                    time, length = (began - zero + start) * 1e6, (end - start) * 1e6  # microseconds
                    yield {"ph": "X", "pid": rank, "tid": thread, "ts": time, "dur": length} | more

    def _step_part_events(self, step: int, began: float, parts: Mapping[str, float]) -> Iterator[dict[str, Any]]:
        """Yield the trace events of the parts of a step, one after the other from its beginning, as predicted and, on a
        thread beside, as measured."""
        if not self.forecast:
            return
        for thread, (row, part_seconds) in enumerate((("predicted", self.forecast.parts), ("measured", parts))):
            where = {"pid": len(self._names), "tid": thread}
            if step == self._steps[0][0]:
                yield {"ph": "M", "name": "thread_name", **where, "args": {"name": row}}
            time = began * 1e6
            for name, length in ((name, seconds * 1e6) for name, seconds in part_seconds.items() if seconds > 0):
                yield {"ph": "X", **where, "ts": time, "dur": length, "name": name, "cat": row, "args": {"step": step}}
                time += length


def rank_events(
    actions: Mapping[str, Action], step: int, record: RankRecord
) -> Iterator[tuple[int, float, float, dict[str, Any]]]:
    """Yield the computing, waiting and collectives of a rank's step, for the timeline's trace, as (thread, start, end,
    further fields of a trace event). `actions`: name -> action of the rank's stage."""
    for name, start, end in record.sections:
        if action := actions.get(name):
            where = {"chunk": action.chunk, "microbatch": action.microbatch}
            yield 0, start, end, {"name": name, "cat": _action_category(action), "args": where}
        else:
            yield 0, start, end, {"name": name, "cat": CATEGORIES.get(name, name), "args": {"step": step}}
    for name, start, end in record.spans:
        yield 1, start, end, {"name": name, "cat": MODEL, "args": {"step": step}}
    for lane, flights in enumerate(split_lanes(record.collectives), 2):
        for name, op, axes, size, start, wanted, end in flights:
            what = {"step": step, "op": op, "axes": axes, "bytes": size}
            yield lane, start, end, {"name": name, "cat": COMMUNICATION, "args": what}
            if wanted < end:  # nested: how long the rank waited for it
                yield lane, wanted, end, {"name": "wait", "cat": "wait", "args": {"step": step}}


def thread_name(number: int) -> str:
    """Return the name of a thread of a rank in the timeline's trace."""
    return ("actions", MODEL, COMMUNICATION)[number] if number < 3 else f"{COMMUNICATION} {number - 1}"


def split_lanes(collectives: Iterable[Collective]) -> list[list[Collective]]:
    """Divide a rank's collectives, ordered by launch, into the fewest rows of the timeline in which none overlap."""
    rows: list[list[Collective]] = []
    for flight in collectives:
        free = next((lane for lane in rows if lane[-1][-1] <= flight[4]), None)
        if free is None:
            rows.append(free := [])
        free.append(flight)
    return rows


def _picture_rows(record: RankRecord, zero: float) -> Iterator[tuple[str, list[Bar]]]:
    """Yield the rows of the timeline's picture beneath the actions of a rank, (name, bars): its computation, by parts
    (spans) of the model if these are known, up to the end of the step; and its collectives, with the wait for each.
    `zero`: the picture's begin, seconds since the step's barrier."""

    def build_bar(kind: str, start: float, end: float, label: str, text: str) -> Bar:
        """Return a bar of the timeline's picture, from `start` to `end`, counted from the picture's begin."""
        return Bar(kind, max(start - zero, 0.0), max(end - zero, 0.0), label, text)

    passes = record.spans or [section for section in record.sections if section[0] in PASSES]
    computed = [build_bar(name.split()[0], start, end, name.partition(" ")[2], name) for name, start, end in passes]
    ends = [build_bar("update", start, end, name, name) for name, start, end in record.sections if name in END_OF_STEP]
    yield "compute", [*computed, *ends]
    for i, flights in enumerate(split_lanes(record.collectives)):
        bars = []
        for name, op, axes, size, start, wanted, end in flights:
            kind = next((kind for kind in ("gather", "reduce") if kind in op), "other")
            bars.append(build_bar(kind, start, end, name.split(" ", 1)[-1], f"{name}: {op} over {axes}, {size} bytes,"))
            bars.append(build_bar("wait", min(wanted, end), end, "", f"wait for {name}"))
        yield "" if i else COMMUNICATION, bars


def extract_actions(stage: int, actions: dict[str, Action], sections: Sequence[Interval]) -> list[TimedAction]:
    """Return the pipeline schedule's actions among the measured sections of a rank of `stage` in one step, in order,
    for the timeline. A computation begins when the input that it waited for arrived. `actions`: name -> action of the
    stage."""
    events, arrived = [], 0.0
    for name, start, end in sections:  # ordered by end: a wait comes before the action that waited
        if name == WAIT:
            arrived = end
        elif action := actions.get(name):
            events.append(TimedAction(stage, action, max(start, arrived) if action.kind in COMPUTE else start, end))
    return events


def measure_bubble(ran: Sequence[Sequence[TimedAction]]) -> float:
    """Return the pipeline bubble that the timeline measured in a step, makespan / ideal - 1; ideal: the computing time
    of the busiest rank. `ran`: per rank, its measured actions."""
    computed = [[e for e in events if e.action.kind in COMPUTE] for events in ran]
    makespan = max(e.end for events in computed for e in events) - min(e.start for events in computed for e in events)
    return makespan / max(sum(e.end - e.start for e in events) for events in computed) - 1


def _action_category(action: Action) -> str:
    """Return the category of a pipeline action in the timeline's trace: compute, send or receive."""
    return "compute" if action.kind in COMPUTE else "send" if action.kind in SENDS else "receive"

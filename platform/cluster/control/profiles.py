"""Profile of the steps that monitor.profile names: `StepProfiles` has the workers record them, and `merge_parts` merges
their parts into one file for Perfetto, beside the predicted step.

Merging depends on the files alone, so that a later driver can go on where an earlier one ended.

Clocks of machines are compared by the barrier with which each profiled step begins, which all ranks leave together: it
is as exact as that barrier is. Ranks on one machine share its clock.
"""

from __future__ import annotations

import heapq
import json
import re
import shutil
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from platform.boundary import documents, schema
from platform.boundary.documents import error_line
from platform.boundary.local_files import replace_file, replace_text
from platform.boundary.redaction import redact_secrets
from platform.boundary.schema import Count, Malformed
from platform.boundary.terminal import warn_on_write_error
from platform.cluster.control.evaluations import StepForecaster
from platform.cluster.control.run_context import Generation, RunContext
from platform.cluster.crew.crew import Crew, Worker
from platform.config.run_rules import EVERY
from platform.monitor import MetricsRow
from platform.monitor.events import Profiled
from platform.monitor.timeline import END_OF_STEP, rank_events, thread_name
from platform.plan.layout import format_count
from platform.plan.plan_summary import OPTIMIZER
from platform.plan.schedule import Action, Kind
from platform.predict.choose_schedule import build_schedules
from platform.train.replies import PARTS, PROFILE, STEP, Event, PartHead, PartName, nest_events, open_part

PREDICTED, TIMELINE = 1, 10  # threads of a rank: what was predicted, and the first of its timeline
LARGEST_NOTE = 64 << 20  # bytes
_ROOM = 10**9  # nanoseconds before the first barrier: viewers want no times below 0
_ACTION = re.compile(rf"(\d+)({'|'.join(sorted(Kind, key=len, reverse=True))})(\d+)")


class PredictedSpan(NamedTuple):
    """Span of a predicted step: its name, start and end, in seconds since the step's beginning."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class StepNote:
    """Note of a driver on a profiled step: by rank its `names`, `nodes` and `stages`; the seconds of the step's
    parts as `measured` and, on a `hardware`, as `predicted`; by stage its predicted `spans`."""

    names: list[str]
    nodes: list[str]
    stages: list[Count]
    measured: dict[str, float] = field(default_factory=dict)
    hardware: str = ""
    predicted: dict[str, float] = field(default_factory=dict)
    spans: list[list[PredictedSpan]] = field(default_factory=list)


class MergedTrace(NamedTuple):
    """Merged trace: its file and bytes, the steps and the number of ranks in it, and of events left out."""

    path: Path
    bytes: int
    steps: list[int]
    ranks: int
    cut: int


def step_note_path(run_dir: Path, step: int, generation: int) -> Path:
    """Return the path of the control loop's note on a profiled step."""
    return run_dir / PROFILE / PARTS / f"step-{step}.generation-{generation}.json"


def write_step_note(run_dir: Path, step: int, generation: int, note: StepNote) -> None:
    """Write the control loop's note on a profiled step. Raises OSError."""
    path = step_note_path(run_dir, step, generation)
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    replace_text(path, json.dumps(redact_secrets(asdict(note))) + "\n")


def read_step_note(run_dir: Path, step: int, generation: int) -> StepNote:
    """Read the control loop's note on a profiled step, empty if there is none. Raises Malformed, OSError."""
    try:
        raw = documents.read_bytes(step_note_path(run_dir, step, generation), LARGEST_NOTE)
    except FileNotFoundError:
        return StepNote([], [], [])
    return schema.parse_value(StepNote, documents.parse_json(raw, LARGEST_NOTE))


def build_predicted_spans(
    simulated: Sequence[tuple[str, float, float]], makespan: float, parts: Mapping[str, float], optimizer: str
) -> list[PredictedSpan]:
    """Return the spans of a stage's predicted step in the merged trace: one around the whole, the `simulated` actions,
    and, after the `makespan` of all stages, the rest of the reduction and the update. `parts`: predicted seconds;
    `optimizer`: name of the update among them."""
    reduce, update = END_OF_STEP
    end = max(sum(parts.values()), makespan)
    begin = max(makespan, end - parts.get(optimizer, 0.0))
    after = [PredictedSpan(reduce, makespan, begin), PredictedSpan(update, begin, end)]
    actions = [PredictedSpan(*span) for span in simulated]
    return [PredictedSpan(STEP, 0.0, end), *actions, *(span for span in after if span.end > span.start)]


def newest_parts(run_dir: Path) -> list[tuple[PartName, Path]]:
    """Return the parts of a run's profile, in order: of each step the parts of the generation that took it last."""
    paths = sorted((run_dir / PROFILE / PARTS).glob("step-*.rank-*.json.gz"))
    named = sorted((name, path) for path in paths if (name := PartName.parse(path)))
    newest = {name.step: name.generation for name, _ in named}
    return [(name, path) for name, path in named if newest[name.step] == name.generation]


def merge_parts(run_dir: Path, path: Path) -> MergedTrace | None:
    """Merge, for the control loop, the workers' parts of a run's profile into the trace `path`; return an account of
    it, None if there are no parts. Raises Malformed, OSError."""
    parts = newest_parts(run_dir)
    if not parts:
        return None
    notes = {(n.step, n.generation): read_step_note(run_dir, n.step, n.generation) for n, _ in parts}
    with ExitStack() as stack:
        opened = [(name, *stack.enter_context(open_part(part))) for name, part in parts]
        heads = {name: head for name, head, _ in opened}
        trace = _Trace(heads, notes)
        replace_file(path, _gzip_pieces(trace.json_pieces({name: events for name, _, events in opened})))
    steps, cut = sorted({name.step for name in heads}), sum(head.cut for head in heads.values())
    return MergedTrace(path, path.stat().st_size, steps, len({name[1:] for name in heads}), cut)


def measure_clock_shifts(
    heads: Mapping[PartName, PartHead], notes: Mapping[tuple[int, int], StepNote]
) -> dict[PartName, int]:
    """Return, for each part of a profile, the nanoseconds by which its machine's clock lags behind the clock of the
    generation's first rank: a median over the steps, in each of which a machine's first rank leaves the barrier."""
    node = {name: _value_or_default(notes[name[:2]].nodes, name.rank, f"rank {name.rank}") for name in heads}
    left: dict[tuple[int, str], dict[int, int]] = defaultdict(dict)  # generation, node -> step -> time
    for name, head in heads.items():
        times = left[name.generation, node[name]]
        times[name.step] = min(head.left, times.get(name.step, head.left))
    first = {name.generation: node[name] for name in sorted(heads, key=lambda name: -name.rank)}
    lags = {}
    for (generation, node_name), barrier_times in left.items():
        base = left[generation, first[generation]]
        step_lags = [base[step] - barrier_times[step] for step in barrier_times if step in base]
        lags[generation, node_name] = round(median(step_lags or [0]))
    return {name: lags[name.generation, node[name]] for name in heads}


class _Trace:
    """Events of a merged trace: a process per rank and generation, with a thread for the prediction, the threads of its
    timeline, and the threads and streams that torch's profiler saw; and a process for the parts of the steps."""

    def __init__(self, heads: Mapping[PartName, PartHead], notes: Mapping[tuple[int, int], StepNote]):
        """Prepare the merged trace of profile parts with these `heads`, and `notes` by step and generation."""
        self._heads, self._notes, self._shifts = heads, notes, measure_clock_shifts(heads, notes)
        seats = sorted({name[1:] for name in heads})  # generation, rank
        self._pids = {seat: pid for pid, seat in enumerate(seats, 1)}
        self._several = len({generation for generation, _ in seats}) > 1
        self._zero = min(head.left + self._shifts[name] for name, head in heads.items()) - _ROOM
        self._threads: dict[int, dict[str, str]] = defaultdict(dict)  # by process: number -> name
        self._owned = {name: self._timeline_events(name) for name in heads}

    def json_pieces(self, events: Mapping[PartName, Iterator[Event]]) -> Iterator[str]:
        """Yield the JSON text of the merged trace, piece by piece; `events`: the events of each worker's part."""
        yield '{"displayTimeUnit":"ms","traceEvents":[\n'
        streams = [self._absolute_events(name, part_events) for name, part_events in events.items()]
        streams += map(iter, [*self._owned.values(), sorted(self._step_part_events(), key=_event_sort_key)])
        comma = ""
        for event in self._name_metadata_events():
            yield comma + json.dumps(event, separators=(",", ":"))
            comma = ",\n"
        for event in heapq.merge(*streams, key=_event_sort_key):
            event["ts"] = (event["ts"] - self._zero) / 1e3
            if "dur" in event:
                event["dur"] = event["dur"] / 1e3
            yield comma + json.dumps(event, separators=(",", ":"))
        yield f'\n],"otherData":{json.dumps(self._describe_trace())}}}\n'

    def _describe_trace(self) -> dict[str, Any]:
        """Return what the merged trace of the profiled steps says of itself."""
        cut = sum(head.cut for head in self._heads.values())
        steps = sorted({name.step for name in self._heads})
        return {"steps": ", ".join(map(str, steps)), "events_left_out": str(cut)}

    def _absolute_events(self, name: PartName, events: Iterator[Event]) -> Iterator[Event]:
        """Yield the events of a worker's part in its process of the merged trace, at nanoseconds since the epoch."""
        pid, part = self._pids[name[1:]], [*self._heads].index(name)
        base = self._heads[name].left + self._shifts[name]
        for event in events:
            event["ts"] += base
            event["pid"] = pid
            if "id" in event:  # of arrows, unique in the trace
                event["id"] = (part << 32) + int(event["id"])
            yield event

    def _timeline_events(self, name: PartName) -> list[Event]:
        """Return the merged trace's events of a part's timeline and of its prediction, in order; name their threads."""
        head, note = self._heads[name], self._notes[name[:2]]
        base, threads = head.left + self._shifts[name] + head.began, self._threads[self._pids[name[1:]]]
        actions = {s.section: a for s in head.timeline.sections if (a := _parse_action(s.section))}
        trace_events = []
        for thread, start, end, more in rank_events(actions, name.step, head.timeline):
            threads[str(TIMELINE + thread)] = thread_name(thread)
            trace_events.append(self._build_span(name, TIMELINE + thread, base, start, end) | more)
        stage = _value_or_default(note.stages, name.rank, 0)
        for span in note.spans[stage] if stage < len(note.spans) else ():
            threads[str(PREDICTED)] = f"predicted on {note.hardware}"
            more = {"name": span.name, "cat": "predicted", "args": {"step": name.step}}
            trace_events.append(self._build_span(name, PREDICTED, base, span.start, span.end) | more)
        threads |= head.threads
        return list(nest_events(sorted(trace_events, key=_event_sort_key), threads))

    def _build_span(self, name: PartName, thread: int, base: int, start: float, end: float) -> Event:
        """Return an event of a thread of the merged trace, from `start` to `end`, seconds after `base`, unnamed."""
        begin, stop = base + round(start * 1e9), base + round(end * 1e9)
        return {"ph": "X", "pid": self._pids[name[1:]], "tid": thread, "ts": begin, "dur": stop - begin}

    def _step_part_events(self) -> Iterator[Event]:
        """Yield the merged trace's parts of each step, in turn, as predicted and, on a thread beside, as measured."""
        for (step, generation), note in self._notes.items():
            first = min(name for name in self._heads if name[:2] == (step, generation))
            begin = self._heads[first].left + self._shifts[first]
            rows = ("predicted", note.predicted), ("measured", note.measured)
            for thread, (row, part_seconds) in enumerate(rows, 1):
                time = begin
                for part, seconds in part_seconds.items():
                    if (length := round(seconds * 1e9)) > 0:
                        event_place = {"ph": "X", "pid": len(self._pids) + 1, "tid": thread, "ts": time, "dur": length}
                        yield event_place | {"name": part, "cat": row, "args": {"step": step}}
                        time += length

    def _name_metadata_events(self) -> Iterator[Event]:
        """Yield the events that name processes and threads of the merged trace."""
        names = {}
        for name in self._heads:
            title = _value_or_default(self._notes[name[:2]].names, name.rank, f"rank{name.rank}")
            names[self._pids[name[1:]]] = title + (f", generation {name.generation}" if self._several else "")
        if any(note.measured for note in self._notes.values()):
            hardware = next((note.hardware for note in self._notes.values() if note.hardware), "")
            pid = len(self._pids) + 1
            names[pid] = f"parts of a step{f' on {hardware}' if hardware else ''}"
            self._threads[pid] = {"1": "predicted", "2": "measured"} if hardware else {"2": "measured"}
        for pid, title in names.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": title}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
            for tid, thread in sorted((int(tid), thread) for tid, thread in self._threads[pid].items()):
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}
                yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _parse_action(name: str) -> Action | None:
    """Return the pipeline action that a section of the merged trace names, None if it names none."""
    matched = _ACTION.fullmatch(name)
    return Action(Kind(matched[2]), int(matched[3]), int(matched[1])) if matched else None


def _value_or_default(values: Sequence[Any], i: int, default: Any) -> Any:
    """Return values[i] of the control loop's note on a profiled step, or a default where there are fewer."""
    return values[i] if i < len(values) else default


def _event_sort_key(event: Event) -> tuple[int, int]:
    """Return the key by which the merged trace sorts events: by beginning, and what lies around others before these."""
    return event["ts"], -event.get("dur", 0)


def _gzip_pieces(pieces: Iterator[str]) -> Iterator[bytes]:
    """Yield the text of the merged trace, given in pieces, as gzip compresses it."""
    packer = zlib.compressobj(6, wbits=31)
    for piece in pieces:
        if raw := packer.compress(piece.encode()):
            yield raw
    yield packer.flush()


class StepProfiles:
    """Profile of a run's steps, as monitor.profile asks for one. The parts of it that workers write stay until the run
    has ended: a step that is done again after a failure replaces its part, and the merged trace is made again."""

    def __init__(self, run: RunContext, forecast: StepForecaster):
        """Prepare the profile of a run; `forecast`: its predictions of steps."""
        first, last = run.config.monitor.profile or (0, -1)
        self._steps, self._ranks = range(first, last + 1), run.config.monitor.profile_ranks
        self._run, self._forecast, self._say = run, forecast, run.monitor.say
        self._directory = run.job.run_dir
        self.path = self._directory / PROFILE / f"steps-{first}-{last}.json.gz"
        self._merging: threading.Thread | None = None
        self._merged: list[int] = []  # steps in the trace

    def ranks_to_profile(self, generation: Generation) -> list[int]:
        """Return the ranks of a generation of workers that are profiled: one of each pipeline stage by default."""
        if self._ranks == [EVERY]:
            return list(range(generation.size))
        if self._ranks:
            return sorted({int(rank) for rank in self._ranks if int(rank) < generation.size})
        stages = [at["stage"] for at in generation.job.coordinates]
        return sorted(stages.index(stage) for stage in set(stages))

    @contextmanager
    def profile_step(self, crew: Crew, generation: Generation, step: int) -> Iterator[None]:
        """Let the chosen ranks record training step `step` during the block, if it is to be profiled, and write their
        parts after it. A record of a step that fails is dropped."""
        if step not in self._steps:
            yield
            return
        self._await_merge()
        refused = crew.call_ranks(Worker.begin_profile, step, self.ranks_to_profile(generation))
        yield
        written = crew.call_ranks(Worker.end_profile)
        why = [*filter(None, refused), *(part.why for part in written if part and part.why)]
        if why:
            self._say(f"WARNING: step {step} has no profile of {format_count(len(why), 'rank')} ({why[0]})")

    def note_step(self, generation: Generation, row: MetricsRow) -> None:
        """Write the note on a profiled step that is committed, `row`; merge all parts after the last of these steps."""
        if row.step not in self._steps:
            return
        with warn_on_write_error(self._say, str(self._directory / PROFILE)):
            write_step_note(self._directory, row.step, generation.number, self._build_note(generation, row))
        if row.step == self._steps[-1]:
            self._merging = threading.Thread(target=self._merge_trace, name="profile", daemon=True)
            self._merging.start()

    def _build_note(self, generation: Generation, row: MetricsRow) -> StepNote:
        """Return the note on a profiled step: names and places of its ranks, its parts as measured and as predicted."""
        nodes, job, plan = generation.formed.domains, generation.job, generation.plan
        names = [f"{job.rank_name(rank)} on {node.partition('/')[0]}" for rank, node in enumerate(nodes)]
        measured, stages = dict(row.parts or {}), [at["stage"] for at in job.coordinates]
        forecast = self._forecast.of_step if row.predicted_seconds else None
        if forecast is None:
            return StepNote(names, nodes, stages, measured)
        schedule = build_schedules(generation.formed.config, plan.num_replicas, plan.pairs_passes)[-1]
        simulated = forecast.simulated(schedule)
        spans: list[list[PredictedSpan]] = []
        for stage in range(schedule.stages):
            stage_events = sorted((e.start, e.end, str(e.action)) for e in simulated.timeline if e.stage == stage)
            of_stage = [(name, start, end) for start, end, name in stage_events]
            spans.append(build_predicted_spans(of_stage, simulated.makespan, forecast.parts, OPTIMIZER))
        return StepNote(names, nodes, stages, measured, forecast.hardware, dict(forecast.parts), spans)

    def _merge_trace(self) -> None:
        """Merge the parts of the profile so far into one trace, and say which steps and ranks it has. An error there is
        said, and ends nothing."""
        try:
            merged = merge_parts(self._directory, self.path)
        except (OSError, Malformed) as error:
            return self._say(f"WARNING: {self.path} cannot be written ({error_line(error)})")
        if not merged:
            return self._say(f"WARNING: no step of monitor.profile={[*self._run.config.monitor.profile]} was done here")
        missing = [step for step in self._steps if step not in merged.steps]
        self._merged = merged.steps
        event = Profiled(file=str(self.path), steps=merged.steps, ranks=merged.ranks, bytes=merged.bytes)
        self._run.journal.write(event)
        lacks = f"; steps {', '.join(map(str, missing))} are not in it" if missing else ""
        cut = f"; the {merged.cut} shortest events are left out" if merged.cut else ""
        size, ranks = f"{merged.bytes / 1e6:.1f} MB", format_count(merged.ranks, "rank")
        steps = format_count(len(merged.steps), "step")
        self._say(f"profile of {steps} on {ranks}: {self.path} ({size}), for ui.perfetto.dev{lacks}{cut}")

    def _await_merge(self) -> None:
        """Wait until the trace that is being merged is written."""
        if self._merging:
            self._merging.join()
            self._merging = None

    def close(self, done: bool) -> None:
        """Write the trace of the steps that were profiled, if the last of them were not; if the run is `done`, the
        parts go, as none of its steps can be done again."""
        if not self._steps:
            return
        self._await_merge()
        if sorted({name.step for name, _ in newest_parts(self._directory)}) != self._merged:
            self._merge_trace()
        if done and self._merged:
            shutil.rmtree(self._directory / PROFILE / PARTS, ignore_errors=True)

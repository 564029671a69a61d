"""Part of a run's profile: the work of one rank in one training step, as its worker writes it and its driver merges it.

A file of JSON lines, compressed: the part's head, then its trace events in order of time, in the Trace Event Format,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, but times are whole nanoseconds since
the rank left the barrier with which the step began.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from platform.boundary import schema
from platform.boundary.documents import open_regular
from platform.boundary.files.local_files import write_whole
from platform.boundary.redaction import redact
from platform.boundary.schema import Count, Malformed, Span
from platform.train.protocol.replies import RankTimeline

PROFILE = "profile"  # folder in a run directory
PARTS = "parts"  # in that one
MOST_EVENTS = 200_000  # of a rank's step; beyond it the shortest are left out
_OMITTED = {
    "External id",
    "Record function id",
    "Ev Idx",
    "Fwd thread id",
    "Sequence number",
}  # of an event's arguments
_RANGES = ("user_annotation", "gpu_user_annotation")  # categories of the plan's names, which are never left out
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")  # categories of a device's streams
_FLOWS = ("ac2g", "fwdbwd")  # arrows: from a launch to its kernel, from a forward operation to its gradient
FIRST_THREAD = 100  # number of a rank's first thread in a part
FIRST_STREAM = 1000  # of its device's stream 0
_BESIDE = 10**6  # from a thread to its next row
_ROUNDED = 2  # nanoseconds, to which an export rounds
STEP = "step"  # section of the clock around all others

Event = dict[str, Any]


class PartName(NamedTuple):
    """Name of a part of a profile: the training step, the generation of workers that took it, and the rank."""

    step: int
    generation: int
    rank: int

    def path(self, run_dir: Path) -> Path:
        """Return the path of this part of a profile in a run directory."""
        return run_dir / PROFILE / PARTS / f"step-{self.step}.generation-{self.generation}.rank-{self.rank}.json.gz"

    @classmethod
    def parse(cls, path: Path) -> PartName | None:
        """Return the name of the part of a profile in a file, None if the file is not called like one."""
        try:
            found = dict(word.split("-", 1) for word in path.name.removesuffix(".json.gz").split("."))
            name = cls(int(found["step"]), int(found["generation"]), int(found["rank"]))
        except (ValueError, KeyError):
            return None
        return name if name.path(path.parents[2]).name == path.name else None


@dataclass(frozen=True)
class PartHead:
    """Head of a part of a profile. `left`: when the rank left the step's barrier, in nanoseconds since the epoch, by
    its machine's clock; `began`: nanoseconds after that, when its timeline begins; `threads`: names of the threads and
    streams of its events, by number; `events`: their number, and `cut`, the number of events left out."""

    left: Annotated[int, Span(0, 1 << 63)]
    began: int
    threads: dict[str, str]
    timeline: RankTimeline = field(default_factory=RankTimeline)
    events: Count = 0
    cut: Count = 0


def part_of(trace: Mapping[str, Any], left: int, timeline: RankTimeline) -> tuple[PartHead, list[Event]]:
    """Return head and events of a rank's part of a profile, from the trace that torch's profiler exported."""
    found, cut = longest([e for e in trace["traceEvents"] if _is_drawn(e)])
    base = trace.get("baseTimeNanoseconds", 0) - left
    of_step = next((e for e in found if e["name"] == STEP and e["cat"] == _RANGES[0]), None)
    numbers: dict[Any, int] = {of_step["tid"]: FIRST_THREAD} if of_step else {}
    threads = {str(_thread(e, numbers)): _thread_name(e, numbers) for e in found if e["ph"] == "X"}
    events = [_event(e, base, _thread(e, numbers)) for e in found]
    events.sort(key=lambda e: (e["ts"], -e.get("dur", 0)))
    events = [e for e in nested(events, threads) if str(e["tid"]) in threads]
    began = next((e["ts"] for e in events if e["name"] == STEP and e["cat"] == _RANGES[0]), 0)
    return PartHead(left, began, threads, timeline, len(events), cut), events


def longest(events: Sequence[Event], most: int = MOST_EVENTS) -> tuple[list[Event], int]:
    """Return the `most` longest events of a trace, all ranges of the plan first, and the number of the others."""
    cut = len(events) - most
    if cut <= 0:
        return list(events), 0
    order = sorted(range(len(events)), key=lambda i: (events[i].get("cat") in _RANGES, events[i].get("dur", 0.0)))
    dropped = set(order[:cut])
    return [event for i, event in enumerate(events) if i not in dropped], cut


def nested(events: Iterable[Event], threads: dict[str, str]) -> Iterator[Event]:
    """Yield a trace's events, ordered by their beginning, such that all events of a thread lie inside or beside each
    other, as viewers need it: one that crosses another moves to a further row of its thread, which `threads` gets."""
    rows: dict[int, list[list[int]]] = {}  # thread -> per row the ends of the open events, the innermost last
    for event in events:
        if event["ph"] == "X":
            thread, start, end = event["tid"], event["ts"], event["ts"] + event["dur"]
            stacks = rows.setdefault(thread, [[]])
            for stack in stacks:
                while stack and stack[-1] <= start:
                    stack.pop()
            row = next((i for i, stack in enumerate(stacks) if not stack or end <= stack[-1] + _ROUNDED), len(stacks))
            if row == len(stacks):
                stacks.append([])
            if row:
                event["tid"] = thread + row * _BESIDE
                threads[str(event["tid"])] = f"{threads[str(thread)]}, beside"
            if stacks[row]:
                end = min(end, stacks[row][-1])
                event["dur"] = end - start
            stacks[row].append(end)
        yield event


def _is_drawn(event: Event) -> bool:
    """Return True if an event that torch's profiler exported belongs into a profile: spans and arrows of threads."""
    if event["ph"] == "X":
        return isinstance(event["pid"], int) and event["dur"] >= 0
    return event["ph"] in ("s", "f") and event["cat"] in _FLOWS


def _thread(event: Event, numbers: dict[Any, int]) -> int:
    """Return the number of an exported event's thread, or stream, in a part; `numbers`: threads' numbers so far."""
    if _on_device(event):
        return FIRST_STREAM + int(event["tid"])
    return numbers.setdefault(event["tid"], FIRST_THREAD + len(numbers))


def _thread_name(event: Event, numbers: Mapping[Any, int]) -> str:
    """Return the name of an exported event's thread or stream."""
    if _on_device(event):
        return f"stream {event['tid']}"
    number = numbers[event["tid"]] - FIRST_THREAD
    return f"thread {number + 1}" if number else "main thread"


def _on_device(event: Event) -> bool:
    """Return True if an exported event happened on a device, whose numbers are small, and not in a thread."""
    cat = event.get("cat", "")
    return (
        cat in ("kernel", "gpu_user_annotation") or cat.startswith("gpu_mem") or (cat == "ac2g" and event["ph"] == "f")
    )


def _event(event: Event, base: int, thread: int) -> Event:
    """Return an exported event, as a part has it. `base`: nanoseconds from the step's barrier to the export's 0."""
    start = base + round(event["ts"] * 1e3)
    out = {"ph": event["ph"], "tid": thread, "ts": start, "name": event["name"], "cat": event["cat"]}
    if event["ph"] != "X":
        return out | {key: event[key] for key in ("id", "bp") if key in event}
    args = {key: value for key, value in event.get("args", {}).items() if key not in _OMITTED}
    return out | {"dur": round(event["dur"] * 1e3)} | ({"args": args} if args else {})


def write_part(path: Path, head: PartHead, events: Iterable[Event]) -> int:
    """Write a rank's part of a profile, without secrets, in one step; return the bytes of the file. Raises OSError."""
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=4, mtime=0) as file:
        for line in (asdict(head), *events):
            file.write(json.dumps(redact(line), separators=(",", ":")).encode() + b"\n")
    write_whole(path, [raw := buffer.getvalue()])
    return len(raw)


@contextmanager
def opened_part(path: Path) -> Iterator[tuple[PartHead, Iterator[Event]]]:
    """Open a part of a profile: its head and its events. Raises Malformed, OSError."""
    with open_regular(path) as raw, gzip.open(raw) as file:
        lines = (_object_in(line) for line in file)
        head = next(lines, None)
        if head is None:
            raise Malformed(f"{path.name} is empty")
        yield schema.read(PartHead, head), lines


def _object_in(line: bytes) -> Event:
    """Return the JSON object in a line of a part of a profile. Raises Malformed."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Malformed("a line of a profile's part is no JSON object")
    return found

"""What a viewer of traces (Perfetto, chrome://tracing) needs of a file in the Trace Event Format, as a check."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

TOLERANCE = 1e-3  # microseconds: files have whole nanoseconds


def read_trace(path: Path) -> dict[str, Any]:
    """Read a compressed trace."""
    with gzip.open(path) as file:
        return json.load(file)


def faults(trace: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a viewer would drop or misplace: fields of wrong types, events out of order or across each other,
    arrows with one end, processes and threads without a name or without an event."""
    events = trace["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    for e in events:
        if not (isinstance(e["pid"], int) and e["pid"] > 0 and isinstance(e.get("tid", 1), int)):
            yield f"no numbers: {e}"
        if e["ph"] != "M" and not (isinstance(e["ts"], Real) and e["ts"] >= 0 and e["name"] and e["cat"]):
            yield f"no time, name or category: {e}"
    yield from (f"no length: {e}" for e in spans if not (isinstance(e["dur"], Real) and e["dur"] >= 0))
    times = [e["ts"] for e in events if e["ph"] != "M"]
    if times != sorted(times):
        yield "not in order"
    opened: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for e in spans:
        stack, end = opened[e["pid"], e["tid"]], e["ts"] + (e["dur"] or 0)
        while stack and stack[-1][0] <= e["ts"] + TOLERANCE:
            stack.pop()
        if stack and end > stack[-1][0] + TOLERANCE:
            yield f"{e} overlaps {stack[-1][1]}"
        stack.append((end, e))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    yield from (f"no name: {place}" for place in opened.keys() - named)
    yield from (f"no event: {place}" for place in named - opened.keys())
    processes = [e["pid"] for e in events if e["name"] == "process_name"]
    if len(processes) != len(set(processes)) or {*processes} != {e["pid"] for e in spans}:
        yield f"processes {processes}"
    ends: dict[Any, list[str]] = defaultdict(list)
    for e in events:
        if e["ph"] in "sf":
            ends[e["cat"], e["id"]].append(e["ph"])
    yield from (f"an arrow {at} has {phases}" for at, phases in ends.items() if sorted(phases) != ["f", "s"])

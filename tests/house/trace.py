"""Tracer of walks: through which files of platform/ a value is handed on, from one call to another.

A walk names a few calls (`FILE:FUNCTION`, the points). A tiny run is traced by `sys.setprofile`, in the driver and, as
an extension (`extend=[tests.house.trace]`), in every worker: whenever a point is called, the stack of calls above it is
noted. A worker's stack, from where it reads the driver's calls, stands on the driver's call that it answers, so all
stacks of a run belong to one tree.

A value gets from one point to the next one by returns, up to where both calls meet, and by calls from there down. They
meet in the call that both lie in, or in two calls of methods of one object, where the first leaves what the second
finds; of several such places the nearest one counts. The hops of a walk are the files of all calls on these paths, in
order, those of the points and of the meeting places too; code that is not on them (what a call on the path calls
besides, what returned before) does not count.

The last point is the first call of it before which all others were called; each other point is its latest call before
the next point, in the same process if there is one, and else in any.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
POINTS, FOLDER = "TRACED_POINTS", "TRACED_FOLDER"  # environment of a traced run: points, and where moments are noted
CREW = "platform/cluster/crew/remote_crew.py:RemoteCrew.call_ranks"  # a driver's call of all workers
HOST = "platform/cluster/crew/worker_host.py:_Host.serve_calls"  # reads it in a worker


class Call(NamedTuple):
    """Call of a function: its `number` in its process, and `owner`, the identity of the object whose method it is, 0 if
    it is none."""

    process: int
    number: int
    file: str
    name: str
    owner: int


class Moment(NamedTuple):
    """Moment at which a point was called: the calls that it lies in, outermost first, and itself."""

    at: float
    calls: tuple[Call, ...]

    @property
    def point(self) -> str:
        """Return the point that was called."""
        return f"{self.calls[-1].file}:{self.calls[-1].name}"

    @property
    def process(self) -> int:
        """Return the process in which it was called."""
        return self.calls[-1].process


class Tracer:
    """Notes every call of `points` in the thread that enters it, in a file of `folder`."""

    def __init__(self, points: Iterable[str], folder: Path):
        self._points, self._file = frozenset(points), open(folder / f"{os.getpid()}.jsonl", "a")
        self._stack: list[tuple[int, str, FrameType]] = []
        self._files: dict[str, str] = {}  # by the name that code has
        self._owners: list[Any] = []  # kept alive, so that no other object gets the identity of one
        self._count = 0

    def __enter__(self) -> None:
        frame, found = sys._getframe(), []
        while frame := frame.f_back:  # type: ignore[assignment]
            found.append(frame)
        for frame in reversed(found):
            self._event(frame, "call", None)
        sys.setprofile(self._event)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self._file.close()

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        """Keep the stack of calls, and note it where a point is called."""
        if event == "return":
            if self._stack and self._stack[-1][2] is frame:
                self._stack.pop()
        elif event == "call" and (file := self._file_of(frame)):
            self._count += 1
            self._stack.append((self._count, file, frame))
            if f"{file}:{frame.f_code.co_qualname}" in self._points:
                calls = [self._call(*entry) for entry in self._stack]
                self._file.write(json.dumps([time.monotonic(), calls]) + "\n")
                self._file.flush()

    def _file_of(self, frame: FrameType) -> str:
        """Return the path of the file of a frame below the root, "" unless it is in platform/."""
        name = frame.f_code.co_filename
        if name not in self._files:
            inside = Path(name).is_relative_to(ROOT / "platform")
            self._files[name] = str(Path(name).relative_to(ROOT)) if inside else ""
        return self._files[name]

    def _call(self, number: int, file: str, frame: FrameType) -> Call:
        owner = frame.f_locals.get("self")
        self._owners.append(owner)
        return Call(os.getpid(), number, file, frame.f_code.co_qualname, 0 if owner is None else id(owner))


def moments_in(folder: Path) -> list[Moment]:
    """Read the moments that all processes of a run have noted, in order, each worker's on the driver's call."""
    lines = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    found = sorted(Moment(at, tuple(Call(*call) for call in calls)) for at, calls in lines)
    orders = [moment for moment in found if moment.point == CREW]
    whole = []
    for moment in found:
        order = next((o for o in reversed(orders) if o.at < moment.at and o.process != moment.process), None)
        inside = next((i for i, call in enumerate(moment.calls) if f"{call.file}:{call.name}" == HOST), 0)
        whole.append(moment._replace(calls=(*order.calls, *moment.calls[inside:])) if order else moment)
    return whole


def moments_of(points: Sequence[str], moments: Sequence[Moment]) -> list[Moment]:
    """Return the moment of each point of a walk."""
    for last in (moment for moment in moments if moment.point == points[-1]):
        found = [last]
        for point in reversed(points[:-1]):
            before = [m for m in moments if m.point == point and m.at < found[0].at]
            found = [*([m for m in before if m.process == found[0].process] or before)[-1:], *found]
        if len(found) == len(points):
            return found
    raise LookupError(f"no call of {points[-1]} after the others of {points}")


def path(first: Sequence[Call], second: Sequence[Call]) -> list[Call]:
    """Return the calls from one point, the last of `first`, up to where both meet, and down to the other."""
    places = [
        (i + j, i, j)
        for i, a in enumerate(first)
        for j, b in enumerate(second)
        if a == b or (a.owner and (a.process, a.owner) == (b.process, b.owner))
    ]
    _, i, j = max(places, default=(0, 0, 0))
    return [*reversed(first[i:]), *second[j:]]


def hops(points: Sequence[str], moments: Sequence[Moment]) -> list[str]:
    """Return the files of a walk, each once, in order."""
    calls = [call for a, b in pairwise(moments_of(points, moments)) for call in path(a.calls, b.calls)]
    return list(dict.fromkeys(call.file for call in calls))


if os.environ.get(FOLDER):  # as an extension of a traced run, in a worker
    Tracer(os.environ[POINTS].split(), Path(os.environ[FOLDER])).__enter__()  # to the end of its process

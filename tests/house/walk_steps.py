"""Steps of a walk: which functions had the value of a walk, by the notes of three runs (`tests.house.trace`)."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.house.trace import ARRAY, PACKED


class Notes(NamedTuple):
    """Notes of a run: when a function (file, name) first had each value, in the order of times, the kinds of those that
    are arrays or packed, and which of `times` have arrived: the function wrote them into memory of its process."""

    times: dict[tuple[str, str, str], float]
    kinds: dict[str, str]
    arrived: frozenset[tuple[str, str, str]] = frozenset()


class Step(NamedTuple):
    """Function (`file`, `name`) that had a value of a walk; `makes`: nobody had it before, or it is an array that the
    function brings into its process; and it is more than a list or map of others."""

    file: str
    name: str
    makes: bool


def read_notes(folder: Path) -> Notes:
    """Read the notes of all processes of a run; a line that a killed process did not finish is left out."""
    times: dict[tuple[str, str, str], float] = {}
    kinds: dict[str, str] = {}
    arrived = set[tuple[str, str, str]]()
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            with suppress(ValueError):
                at, file, name, values, written = json.loads(line)
                arrived |= {(file, name, value) for value in written}
                kinds.update({value: kind for value, kind in values.items() if kind})
                for value in values:
                    times[file, name, value] = min(at, times.get((file, name, value), at))
    return Notes(dict(sorted(times.items(), key=lambda entry: entry[1])), kinds, frozenset(arrived))


def end_notes(notes: Notes, end: str) -> Notes:
    """Return the notes up to the last time that the function `end` (FILE:FUNCTION) had a value."""
    last = max((at for (file, name, _), at in notes.times.items() if f"{file}:{name}" == end), default=0.0)
    return notes._replace(times={key: at for key, at in notes.times.items() if at <= last})


def cut_notes(notes: Notes, start: str, end: str, run: Notes) -> Notes:
    """Return the notes from when the function `start` first had a value until the next time that `end` had one: of
    these notes, or if there is none of the whole `run`. Raises LookupError if one of them is not called."""
    named = [(f"{file}:{name}", at) for n in (notes, run) for (file, name, _), at in n.times.items()]
    first = next((at for name, at in named[: len(notes.times)] if name == start), None)
    last = next((at for name, at in named if name == end and first is not None and at >= first), None)
    if first is None or last is None:
        raise LookupError(start if first is None else end)
    return notes._replace(times={key: at for key, at in notes.times.items() if first <= at <= last})


def keep_differences(run: Notes, again: Notes, other: Notes) -> Notes:
    """Return the notes of `run` that depend on its beginning: `again`, the same run, has them, and `other`, with
    another beginning, lacks them."""
    times = {key: at for key, at in run.times.items() if key in again.times and key not in other.times}
    return run._replace(times=times)


def list_steps(notes: Notes, *, arrays: bool | None = None) -> list[Step]:
    """List the steps of a walk, in order, from its notes. `arrays`: only arrays count, or all but them; None: both."""
    steps: dict[Step, None] = {}
    known = set[str]()
    for file, name, value in notes.times:
        kind = notes.kinds.get(value)
        if arrays is None or arrays == (kind == ARRAY):
            is_new = value not in known or (kind == ARRAY and (file, name, value) in notes.arrived)
            steps.setdefault(Step(file, name, is_new and kind != PACKED))
            known.add(value)
    return list(steps)

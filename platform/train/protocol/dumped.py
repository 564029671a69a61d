"""Dump of a crew whose call does not go on: where each worker stands, as it writes it, and a table of all."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from platform.boundary import documents, schema
from platform.boundary.files.local_files import replace_text
from platform.boundary.schema import Count, Malformed, Many
from platform.monitor.verdict.telling import wait_text
from platform.parallel.communicator.progress import Wait

DUMP = "dump"  # folder in a run directory
KEPT = 10  # dumps of a run, the newest
SUMMARY = "summary.txt"


@dataclass(frozen=True)
class Stand:
    """Stand of a worker at `time`, in seconds since the epoch. `sections`: the clock sections that it is in, the
    innermost last; for `seconds` it has been there, `waiting` for other ranks or not; `wait`: the collective or message
    that it waits for; `launched`: collectives and messages so far, by their axes or peer; `records`: backends of which
    torch has records of collectives."""

    time: float
    rank: Count
    number: Count
    generation: Count
    node: str
    pid: Count
    call: str
    sections: Annotated[list[str], Many(0, 64)]
    waiting: bool
    seconds: float
    wait: Wait | None = None
    launched: dict[str, Count] = field(default_factory=dict)
    records: list[str] = field(default_factory=list)


def stand_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's stand in the folder of a dump."""
    return folder / f"rank-{rank}.json"


def new_folder(run_dir: Path, call: str) -> Path:
    """Return the folder of the next dump of a run's workers, named by time and `call`; delete the oldest ones."""
    there = sorted(path for path in (run_dir / DUMP).glob("*-*") if path.is_dir() and not path.is_symlink())
    for old in there[: max(0, len(there) - KEPT + 1)]:
        shutil.rmtree(old, ignore_errors=True)
    words = "-".join(re.findall(r"[0-9a-z]+", call.lower()))[:40]
    return run_dir / DUMP / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{words}"


def summarize(folder: Path, names: Mapping[int, str]) -> int:
    """Write a table of the workers' stands in a dump; return the number of them. `names`: the ranks' names."""
    rows = []
    for rank, name in sorted(names.items()):
        try:
            raw = documents.read_bytes(stand_path(folder, rank))
            rows.append((name, *_cells(schema.read(Stand, documents.from_json(raw)))))
        except (OSError, Malformed):
            rows.append((name, "", "no answer", "", ""))
    count = sum(bool(row[1]) for row in rows)
    if count:
        table = [("rank", "since", "in", "waits for", "launched"), *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
        replace_text(folder / SUMMARY, "".join(f"{line}\n" for line in lines))
    return count


def _cells(stand: Stand) -> tuple[str, str, str, str]:
    """Return the cells of a worker's stand: its seconds, its place, its wait, and its launches."""
    place = " > ".join([stand.call, *stand.sections])
    wait = stand.wait
    waits = f"{wait_text(wait)}, number {wait.number}" if wait else "other ranks" if stand.waiting else ""
    launched = ", ".join(f"{number} over {axes}" for axes, number in stand.launched.items())
    return f"{stand.seconds:.1f} s", place, waits, launched

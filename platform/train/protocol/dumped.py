"""Dump of where a worker stands, which it writes when the driver finds that a call does not go on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from platform.boundary.schema import Count, Many
from platform.parallel.communicator.progress import Wait

DUMP = "dump"  # folder in a run directory


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

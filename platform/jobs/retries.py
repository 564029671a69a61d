"""The retry rule of jobs, said once for Kubernetes and Slurm: which end of a driver is followed by another one.

A driver is one process of `python -m platform.launch`. `drivers.jsonl` in the run directory has a line when one starts
and one when it has ended, written by the supervisor beside it; a start without an end is a driver that was lost with
its node, and its supervisor too.

| how a driver ends | then | costs a retry |
|---|---|---|
| 0, done; 1, it gave up; 2, refused | the job ends with that status | |
| 75, after SIGTERM or when the job's time is over | the job ends; it can be continued | |
| 75 otherwise | the same command again | unless steps were done |
| by a signal; 1 without having recorded an end | the same command again | yes |
| with its node | the scheduler brings the job back, then as above | yes |
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from platform.boundary import schema
from platform.boundary.schema import OpenMap, Span, Text
from platform.launch import DONE, FAILED, REFUSED, STOPPED
from platform.monitor.records import records
from platform.monitor.records.records import Seconds, Steps

DRIVERS = "drivers.jsonl"  # in the run directory
STARTED, ENDED, CLOSED = "started", "ended", "closed"
TERMINATED = 128 + signal.SIGTERM  # exit status of a job that was told to end, and has saved
_WORD = Annotated[str, Text(f"{STARTED}|{ENDED}|{CLOSED}", "started, ended or closed")]
_STATUS = Annotated[int, Span(-64, 255)]
_LINE = Annotated[
    dict[str, Any],
    OpenMap((("event", _WORD), ("time", Seconds), ("step", Steps), ("status", _STATUS)), ("event", "time")),
]


@dataclass(frozen=True)
class DriverEnd:
    """End of one driver. `status`: status of its process, negative for the number of a signal; `recorded`: its journal
    has an end of it; `advanced`: the run has a step more than when it started; `asked`: the stop signal that this job
    got, 0 for none; `over`: the job's time is over."""

    status: int
    recorded: bool = True
    advanced: bool = False
    asked: int = 0
    over: bool = False

    @property
    def lost(self) -> bool:
        """Return True if the driver was killed: by a signal, or by a library that left no time to record it."""
        killed = self.status < 0 or self.status > 128
        return killed or (self.status not in (DONE, REFUSED, STOPPED) and not self.recorded)

    @property
    def costs(self) -> bool:
        """Return True if starting the driver again after this end costs one of the job's retries."""
        return self.lost or (self.status == STOPPED and not self.advanced)


def verdict(end: DriverEnd, spent: int, retries: int, elsewhere: bool) -> int | None:
    """Return the exit status with which a job ends after this `end` of its driver; None if the same command is started
    again at once. `spent`: retries spent, this end's included; `retries`: retries allowed; `elsewhere`: True if the
    scheduler starts a job again that ends with status 75."""
    if end.asked == signal.SIGTERM or end.asked == signal.SIGINT:
        return DONE if end.status == DONE else TERMINATED
    if end.lost or end.status == STOPPED:
        if spent > retries:
            return FAILED
        return STOPPED if end.over or end.asked or (end.status == STOPPED and elsewhere) else None
    return end.status if end.status in (DONE, REFUSED) else FAILED


def spent(lines: Iterable[dict[str, Any]]) -> int:
    """Count the retries that a job has spent, from the lines of drivers.jsonl since a job last ended there: drivers
    that were lost, or stopped without a step."""
    count, running = 0, False
    for line in lines:
        if line["event"] == STARTED:
            count += running  # the one before has no end: it was lost with its supervisor
            running = True
        elif line["event"] == ENDED:
            count += bool(line.get("costs"))
            running = False
        else:
            count, running = 0, False
    return count + running


def read_drivers(run_dir: Path) -> list[dict[str, Any]]:
    """Read the lines of drivers.jsonl in a run directory, [] if there is none. Raises Malformed, OSError."""
    try:
        return list(records.lines(run_dir / DRIVERS, lambda line: schema.read(_LINE, line)))
    except (FileNotFoundError, NotADirectoryError):
        return []

"""A look at a run from outside: what its directory holds now, whether it is being written, torn, ended or of an older
version, and the verdict on it. Nothing there is changed. `read_lock_owner` finds the driver that owns the directory, as
its lock names it, and `owner_state` whether that process lives on this machine."""

from __future__ import annotations

import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from platform.boundary import documents, schema
from platform.boundary.refusals import ConfigError, refuse_failures
from platform.boundary.schema import Malformed
from platform.cluster import run_directory as traces
from platform.cluster.run_directory import LOCK
from platform.config.fields import Config
from platform.monitor import json_records, metrics
from platform.monitor.events import JournalEvent
from platform.monitor.journal import LIVE, kernel_state, read_live_state
from platform.monitor.json_records import JOURNAL, METRICS
from platform.monitor.verdict import Evidence, Verdict, judge_run
from platform.monitor.verdict.evidence import ALIVE, GONE, STOPPED, UNKNOWN


def read_lock_owner(directory: Path) -> tuple[str, str]:
    """Return the driver that the lock of the run looked into names, "process 7 on host", and its state; "" for none."""
    owner = ""
    with suppress(OSError, ValueError):
        owner = documents.printable_line(documents.read_bytes(directory / LOCK))
    return owner, owner_state(owner)


def owner_state(owner: str) -> str:
    """Return the state of the process that a run directory's lock names, ALIVE, STOPPED, GONE or UNKNOWN."""
    # the lock itself is not tried: a driver that starts at this moment would take that for another driver
    owner_match = re.fullmatch(r"process (\d{1,9}) on (.+)", owner)
    if not owner_match or owner_match[2] != socket.gethostname() or not Path("/proc/self").exists():
        return UNKNOWN
    return process_state(int(owner_match[1]))


def process_state(pid: int) -> str:
    """Return whether a process of the run looked into, on this machine, is ALIVE, STOPPED by a signal, or GONE."""
    return {"T": STOPPED, "t": STOPPED, "Z": GONE, "X": GONE, "": GONE}.get(kernel_state(pid), ALIVE)


RUNS = "runs"  # folder of the runs of a working directory
_FILES = (traces.CONFIG, traces.PLAN, traces.LOCK, JOURNAL, METRICS, LIVE)
_TAIL = 1 << 20  # bytes that are copied of the end of a remote metrics.jsonl


@dataclass(frozen=True)
class Look:
    """Contents of a run directory. `plan`: its summary, {} if there is none; `torn`: a line for each of its
    files that cannot be read."""

    directory: str
    config: Config | None
    plan: dict[str, Any]
    evidence: Evidence
    torn: list[str]

    @cached_property
    def verdict(self) -> Verdict | None:
        """Return the verdict on the run; None if nothing is wrong."""
        return judge_run(self.evidence)


def read_run_contents(directory: Path, name: str = "") -> Look:
    """Look into a run directory, called `name` for people. Raises ConfigError if it holds no run."""
    torn: list[str] = []
    config = _read_or_note(torn, traces.CONFIG, lambda: traces.read_configuration(directory), None)
    plan = _read_or_note(torn, traces.PLAN, lambda: _read_plan_summary(directory), {})
    journal: list[JournalEvent] = []  # up to the first line that cannot be read
    _read_or_note(torn, JOURNAL, lambda: journal.extend(traces.read_journal(directory)), None)
    rows = _read_or_note(torn, METRICS, lambda: _read_metrics_rows(directory), [])
    if config is None and not journal:
        reason = f"holds no run{f': {torn[0]}' if torn else ''}"
        raise ConfigError("run.dir", name or directory, reason, list_newest_runs()[:3])
    owner, driver = read_lock_owner(directory)
    steps = (config.train.stop_at or config.train.steps) if config else None
    live = _read_or_note(torn, LIVE, lambda: read_live_state(directory), None)
    evidence = Evidence(journal, rows, time.time(), steps, driver, owner, last_write_time(directory), live)
    return Look(name or str(directory), config, plan, evidence, torn)


@contextmanager
def open_run_directory(place: str) -> Iterator[Path]:
    """Yield the run directory to look into that a path names, or a copy of what matters of the one that a URL names.
    Raises ConfigError."""
    if "://" not in place:
        yield Path(place)
        return
    from platform.boundary.storage import open_storage

    folder = Path(tempfile.mkdtemp(prefix="run-"))
    try:
        storage = open_storage(place, "run.dir")
        with refuse_failures("run.dir", storage.url, OSError, why="cannot be read ({})"):
            sizes = storage.list_sizes("")
            for name in _FILES:
                if name in sizes:
                    start = max(0, sizes[name] - _TAIL) if name == METRICS else 0
                    raw = bytes(storage.read(name, start))
                    (folder / name).write_bytes(raw.partition(b"\n")[2] if start else raw)
        if not {traces.CONFIG, JOURNAL} & sizes.keys():
            raise ConfigError("run.dir", storage.url, "holds no run")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def list_newest_runs() -> list[str]:
    """Return the run directories to look into in the working directory's `runs/`, the last written one first."""
    dated = [(last_write_time(folder), str(folder)) for folder in Path(RUNS).glob("*")]
    return [name for written, name in sorted(dated, reverse=True) if written]


def _read_or_note(torn: list[str], name: str, read: Any, otherwise: Any) -> Any:
    """Return what `read` makes of a file of the run looked into, and note in `torn` if no run writes such a file."""
    try:
        return read()
    except FileNotFoundError:
        return otherwise
    except (Malformed, OSError) as error:
        reason = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else f"is not a run's ({error})"
        torn.append(f"{name} {reason}")
        return otherwise


def _read_plan_summary(directory: Path) -> dict[str, Any]:
    """Return the summary in the plan.json of the run looked into. Raises Malformed, OSError."""
    raw = documents.read_bytes(directory / traces.PLAN, json_records.LARGEST)
    return schema.parse_value(dict[str, Any], documents.parse_json(raw, json_records.LARGEST))


def _read_metrics_rows(directory: Path) -> list[dict[str, Any]]:
    """Return the last rows of metrics of the run looked into, a step once. Raises Malformed, OSError."""
    return metrics.valid_rows(json_records.read_last_lines(directory / METRICS, metrics.validate_row))


def last_write_time(directory: Path) -> float:
    """Return when the run looked into wrote last, in seconds since the epoch; 0 if it never did."""
    times = []
    for name in (JOURNAL, METRICS, traces.CONFIG):
        with suppress(OSError):
            times.append((directory / name).stat().st_mtime)
    return max(times, default=0.0)

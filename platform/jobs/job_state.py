"""State of a job as its run directory has it: whether it runs, which lives it had, its last step, its last events; and
its logs there, which outlive the nodes: of workers, of the driver, of Ray on every node.

The run directory is all that a job's lives have in common, under any scheduler; so nothing is asked of Slurm or
Kubernetes, and a job of last year is shown as one of today.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from platform.boundary import documents
from platform.boundary.refusals import ConfigError, refuse_failures, typed_command
from platform.boundary.schema import Malformed
from platform.cluster import run_directory
from platform.config.key import format_hms
from platform.jobs.supervisor import CLOSED, ENDED, count_spent_retries, read_drivers
from platform.monitor import events
from platform.monitor.events import End, JournalEvent
from platform.monitor.verdict.evidence import ALIVE, GONE, STOPPED, UNKNOWN
from platform.plan.layout import format_count
from platform.status.seen_run import last_write_time, owner_state

LOGS = "logs"  # in the run directory
_RAY = ("raylet.err", "raylet.out", "gcs_server.err", "gcs_server.out", "monitor.err")
_RAY_PARENT = "/tmp"  # of Ray's directory in a pod
_TAIL = 64 << 10  # bytes that are read of the end of a file
_KEPT = 100  # lines of each of Ray's files that are kept when a node's Ray has ended
_MOST = 8 << 20  # bytes of a node's log: what comes back again and again must not fill a storage


def list_log_files(run_dir: Path) -> list[Path]:
    """List the log files of a job, in its run directory, the last written at the end."""
    dated_files = []
    for path in (run_dir / LOGS).glob("*.log"):
        with suppress(OSError):
            if not path.is_symlink() and path.is_file():
                dated_files.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(dated_files)]


def read_log_lines(run_dir: Path, name: str = "", count: int = 20) -> Iterator[str]:
    """Yield the last `count` lines of each of a job's logs, in its run directory, whose name contains `name`, the one
    that was written last at the end. Raises ConfigError if there is none."""
    log_paths = [path for path in list_log_files(run_dir) if name in path.name]
    if not log_paths:
        existing_names = [path.name for path in list_log_files(run_dir)][-3:]
        constraint = f"has no log with {name!r} in its name" if existing_names else "has no logs"
        raise ConfigError("run.dir", run_dir, constraint, existing_names)
    for path in log_paths:
        yield f"==> {path} <=="
        yield from read_last_log_lines(path, count)
        yield ""


def read_last_log_lines(path: Path, count: int) -> list[str]:
    """Return the last `count` lines of a job's log, without what would move a terminal's cursor; [] if it cannot be
    read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            file.seek(max(0, os.fstat(descriptor).st_size - _TAIL))
            text = file.read(_TAIL).decode(errors="replace")
    except OSError:
        return []
    lines = deque(text.split("\n"), count + 1)
    if lines and not lines[-1]:
        lines.pop()
    return ["".join(c if c.isprintable() or c == "\t" else " " for c in line) for line in lines][-count:]


def save_ray_log_ends(run_dir: Path | None, directory: str, ray_output: str) -> None:
    """Append to logs/node-HOST.log of a run directory how Ray ended on this node: the output of its command, and the
    end of its own files below `directory`, which is deleted with the node's part of the job. An error here is no reason
    for a node to stop."""
    if run_dir is None:
        return
    host = socket.gethostname()
    parts = [("ray start", ray_output.splitlines())]
    logs = Path(directory, "ray", "session_latest", "logs")
    parts += [(name, read_last_log_lines(logs / name, _KEPT)) for name in _RAY]
    text = "".join(f"-- {name}\n" + "".join(f"{line}\n" for line in lines) for name, lines in parts if lines)
    NodeLog(run_dir).append_text(f"== {time.strftime('%Y-%m-%d %H:%M:%S')} Ray has ended on {host}\n{text}".encode())


def keep_logs_at_end(run_dir: Path) -> None:
    """Wait for SIGTERM or SIGINT, sent to a container beside Ray's once that ends; then run `save_ray_log_ends`."""
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    signal.sigwait(ends)
    save_ray_log_ends(run_dir, _RAY_PARENT, "")


class NodeLog:
    """Log of this node in a run directory, logs/node-HOST.log, which outlives the node. It ends at _MOST bytes, and a
    storage that does not take it is no reason for a node to stop."""

    def __init__(self, run_dir: Path):
        """Name the log of this node in a run directory, logs/node-HOST.log; nothing is written yet."""
        self._path = run_dir / LOGS / f"node-{socket.gethostname()}.log"

    def append_text(self, text: bytes) -> None:
        """Append text to this node's log in the run directory."""
        with suppress(OSError):
            self._path.parent.mkdir(0o700, parents=True, exist_ok=True)
            with open(self._path, "ab") as out:
                if out.tell() < _MOST:
                    out.write(text)


_ENDS = {0: "done", 1: "gave up", 2: "refused", 69: "kept from its work", 75: "stopped, and can go on"}
_ENDS[143] = "told to end, and saved"
_HOW = {GONE: "lost: it has no end, and is gone", STOPPED: "stopped by a signal, and without an end"}
_HOW |= dict.fromkeys((ALIVE, UNKNOWN), "running, as it has no end")
_SHOWN = 20  # lives, the newest


def describe_status(run_dir: Path) -> Iterator[str]:
    """Yield the lines of `python -m platform.jobs status`. Raises ConfigError if the directory holds no run, or what
    none writes."""
    with refuse_failures("run.dir", run_dir, OSError, Malformed, why="cannot be read ({})"):
        config = run_directory.read_configuration(run_dir)
        journal, drivers = list(run_directory.read_journal(run_dir)), read_drivers(run_dir)
        step = run_directory.find_last_step(run_dir)
    if config is None and not journal and not drivers:
        raise ConfigError("run.dir", run_dir, "holds no run", ["what run.dir= said in the job"])
    lives = run_directory.split_by_driver(journal)
    yield f"run directory: {run_dir}"
    yield f"state: {_describe_state(run_dir, lives, drivers)}"
    saved = [event for event in journal if isinstance(event, events.Checkpoint)]
    newest = f"{saved[-1].step} ({saved[-1].directory})" if saved else "none"
    yield f"step: {step}{f' of {config.train.steps}' if config else ''}; newest checkpoint: {newest}"
    if drivers:
        yield f"retries spent since the job was last closed: {count_spent_retries(drivers)}"
    if lives:
        yield f"lives: {len(lives)}{f', of which the last {_SHOWN}' if len(lives) > _SHOWN else ''}"
        before = ""
        for number, life in [*enumerate(lives, 1)][-_SHOWN:]:
            yield _format_driver_line(number, life, before)
            before = _find_code_hash(life) or before
    yield from _describe_last_failure(journal)
    log_paths = list_log_files(run_dir)
    yield f"logs: {format_count(len(log_paths), 'file')} in {run_dir / 'logs'}; {typed_command('jobs')} logs {run_dir}"


def _find_code_hash(driver_events: Sequence[JournalEvent]) -> str:
    """Return, for a job's status, the hash of the sources that a driver ran, from its events; "" if not recorded."""
    return next(((e.code or {}).get("platform", "") for e in driver_events if isinstance(e, events.Starting)), "")


def _find_driver_end(driver_events: Sequence[JournalEvent]) -> tuple[float | None, str]:
    """Return when and, in words, how a job's driver ended, from its events; (None, "no end") if it has not."""
    for event in driver_events:
        if isinstance(event, End):
            cause = getattr(event, "cause", "") or getattr(event, "signal", "")
            return event.time, f"{event.word}{f': {cause}' if cause else ''}"
    return None, "no end"


def _describe_state(run_dir: Path, lives: Sequence[Sequence[JournalEvent]], drivers: Sequence[dict[str, Any]]) -> str:
    """Return a job's state in words: whether a driver trains the run now and, if not, how the last one ended."""
    last = drivers[-1] if drivers else {}
    if last.get("event") == CLOSED and "status" in last:
        status = last["status"]
        return f"ended with status {status} ({_ENDS.get(status, 'lost')}), {_describe_age(last['time'])}"
    if last.get("event") == ENDED:
        return f"between two lives: a driver ended with status {last.get('status')} {_describe_age(last['time'])}"
    ended, end = _find_driver_end(lives[-1]) if lives else (None, "")
    if ended is not None:
        return f"ended: {end}, {_describe_age(ended)}"
    if not lives and not last:
        return "nothing has started"
    with suppress(OSError):
        owner = documents.printable_line(documents.read_bytes(run_dir / run_directory.LOCK))
        return f"{_HOW[owner_state(owner)]}: {owner}, which wrote last {_describe_age(last_write_time(run_dir))}"
    return f"its driver has no end, and wrote last {_describe_age(last_write_time(run_dir))}"


def _describe_age(moment: float) -> str:
    """Return in words, for a job's status, how long ago a moment was, in seconds since the epoch; 0: never."""
    seconds = max(0, int(time.time() - moment))
    return f"{format_hms(seconds)} ago" if moment else "never"


def _format_driver_line(number: int, driver_events: Sequence[JournalEvent], code_before: str) -> str:
    """Return the line of `platform.jobs status` on one driver, from its journal events: number, start, duration, last
    step, end, nodes and failures. `code_before`: hash of the sources that the driver before it ran, "" if not known."""
    (ended, end), code = _find_driver_end(driver_events), _find_code_hash(driver_events)
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(driver_events[0].time))
    lasted = "no end" if ended is None else format_hms(int(ended - driver_events[0].time))
    step = max(getattr(event, "step", 0) or 0 for event in driver_events)
    formed = [event for event in driver_events if isinstance(event, events.Formed)]
    nodes = len({worker.get("node") for worker in formed[-1].workers}) if formed else 0
    failures = sum(isinstance(event, events.Failure) for event in driver_events)
    remarks = [format_count(nodes, "node")] if nodes else []
    remarks += [format_count(failures, "failure")] if failures else []
    remarks += [f"other code: {code}"] if code_before and code not in ("", code_before) else []
    return f"  {number}  {began}  {lasted}  to step {step}  {end}{''.join(f', {s}' for s in remarks)}"


def _describe_last_failure(journal: Sequence[JournalEvent]) -> Iterator[str]:
    """Yield the line of a job's status on the last failure of a worker, with node and cause, if there was one."""
    failures = [event for event in journal if isinstance(event, events.Failure)]
    if failures:
        last = failures[-1]
        log_note = f"; {last.log}" if last.log else ""
        cause = f"{last.kind}: {documents.printable_line(last.cause)}{log_note}"
        yield f"last failure: worker {last.number} on {last.node}, {_describe_age(last.time)}: {cause}"

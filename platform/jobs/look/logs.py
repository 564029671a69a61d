"""Logs of a job in its run directory, which outlive the nodes: of workers, of the driver, of Ray on every node."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from platform.boundary.refusals import ConfigError, violation

LOGS = "logs"  # in the run directory
_RAY = ("raylet.err", "raylet.out", "gcs_server.err", "gcs_server.out", "monitor.err")
_RAY_PARENT = "/tmp"  # of Ray's directory in a pod
_TAIL = 64 << 10  # bytes that are read of the end of a file
_KEPT = 100  # lines of each of Ray's files that are kept when a node's Ray has ended
_MOST = 8 << 20  # bytes of a node's log: what comes back again and again must not fill a storage


def log_files(run_dir: Path) -> list[Path]:
    """List the log files of a run directory, the last written at the end."""
    found = []
    for path in (run_dir / LOGS).glob("*.log"):
        with suppress(OSError):
            if not path.is_symlink() and path.is_file():
                found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]


def log_lines(run_dir: Path, name: str = "", count: int = 20) -> Iterator[str]:
    """Yield the last `count` lines of each log of a run directory whose name contains `name`, the one that was written
    last at the end. Raises ConfigError if there is none."""
    found = [path for path in log_files(run_dir) if name in path.name]
    if not found:
        there = [path.name for path in log_files(run_dir)][-3:]
        what = f"has no log with {name!r} in its name" if there else "has no logs"
        raise ConfigError(violation("run.dir", run_dir, what, there))
    for path in found:
        yield f"==> {path} <=="
        yield from tail(path, count)
        yield ""


def tail(path: Path, count: int) -> list[str]:
    """Return the last `count` lines of a text file, without what would move a terminal's cursor; [] if it cannot be
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


def keep_ray_logs(run_dir: Path | None, directory: str, said: str) -> None:
    """Append to logs/node-HOST.log of a run directory how Ray ended on this node: the output of its command, and the
    end of its own files below `directory`, which is deleted with the node's part of the job. An error here is no reason
    for a node to stop."""
    if run_dir is None:
        return
    host = socket.gethostname()
    parts = [("ray start", said.splitlines())]
    parts += [(name, tail(Path(directory, "ray", "session_latest", "logs", name), _KEPT)) for name in _RAY]
    text = "".join(f"-- {name}\n" + "".join(f"{line}\n" for line in lines) for name, lines in parts if lines)
    NodeLog(run_dir).write(f"== {time.strftime('%Y-%m-%d %H:%M:%S')} Ray has ended on {host}\n{text}".encode())


def keep_at_the_end(run_dir: Path) -> None:
    """Wait for SIGTERM or SIGINT, sent to a container beside Ray's when that has ended; then run `keep_ray_logs`."""
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    signal.sigwait(ends)
    keep_ray_logs(run_dir, _RAY_PARENT, "")


class NodeLog:
    """Log of this node in a run directory, logs/node-HOST.log, which outlives the node. It ends at _MOST bytes, and a
    storage that does not take it is no reason for a node to stop."""

    def __init__(self, run_dir: Path):
        """Name the log of this node in a run directory, logs/node-HOST.log; nothing is written yet."""
        self._path = run_dir / LOGS / f"node-{socket.gethostname()}.log"

    def write(self, text: bytes) -> None:
        """Append text to this node's log in the run directory."""
        with suppress(OSError):
            self._path.parent.mkdir(0o700, parents=True, exist_ok=True)
            with open(self._path, "ab") as out:
                if out.tell() < _MOST:
                    out.write(text)

"""The driver that owns a run directory, as its lock names it, and whether that process lives on this machine."""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from pathlib import Path

from platform.boundary import documents
from platform.cluster.run.traces import LOCK
from platform.monitor.records.live import kernel_state
from platform.monitor.verdict.evidence import ALIVE, GONE, STOPPED, UNKNOWN


def owner_of(directory: Path) -> tuple[str, str]:
    """Return the driver that a run directory's lock names, "process 7 on host", and its state; "" without a lock."""
    owner = ""
    with suppress(OSError, ValueError):
        owner = documents.one_line(documents.read_bytes(directory / LOCK))
    return owner, owner_state(owner)


def owner_state(owner: str) -> str:
    """Return the state of the process that a run directory's lock names, ALIVE, STOPPED, GONE or UNKNOWN."""
    # the lock itself is not tried: a driver that starts at this moment would take that for another driver
    found = re.fullmatch(r"process (\d{1,9}) on (.+)", owner)
    if not found or found[2] != socket.gethostname() or not Path("/proc/self").exists():
        return UNKNOWN
    return process_state(int(found[1]))


def process_state(pid: int) -> str:
    """Return whether a process of this machine is ALIVE, STOPPED by a signal or a debugger, or GONE."""
    return {"T": STOPPED, "t": STOPPED, "Z": GONE, "X": GONE, "": GONE}.get(kernel_state(pid), ALIVE)

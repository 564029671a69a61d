"""What runs on this machine, from /proc."""

import os
import time
from pathlib import Path


def parents():
    """Process id -> its parent's, of everything that runs; what only waits to be reaped is left out."""
    tree = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            tree[int(stat.parent.name)] = int(parent)
    return tree


def descendants(pid=None):
    """Of this process, or of `pid`; without multiprocessing's resource tracker, which ends with its process."""
    tree, below, new = parents(), set(), {pid or os.getpid()}
    while new:
        new = {child for child, parent in tree.items() if parent in new} - below
        below |= new
    return {pid for pid in below if b"resource_tracker" not in _command(pid)}


def gone(pids, seconds=20):
    """Whether all of them end; `seconds` only bound a failing test."""
    deadline = time.monotonic() + seconds
    while left := parents().keys() & set(pids):
        if time.monotonic() > deadline:
            print({pid: _command(pid) for pid in left})
            return False
        time.sleep(0.05)
    return True


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""

"""What the processes of a run are and use, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Use(NamedTuple):
    """Of a process."""

    mb: float
    files: int
    threads: int

    @classmethod
    def of(cls, pids: Iterable[int]) -> Use | None:
        """Return the most of those that still run."""
        uses = []
        for pid in pids:
            with suppress(OSError, KeyError):
                status = Path(f"/proc/{pid}/status").read_text()
                field = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
                mb = int(field["VmRSS"].split()[0]) / 1024
                uses.append(cls(mb, len(os.listdir(f"/proc/{pid}/fd")), int(field["Threads"])))
        return cls(*map(max, zip(*uses, strict=True))) if uses else None

    def __str__(self) -> str:
        return f"{self.mb:7.0f} {self.files:5} {self.threads:7}"


def words_of(pid: int) -> bytes:
    """Return the command of a process, b"" if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def members(tree: dict[int, int], below: set[int]) -> set[int]:
    """Return the worker processes among those `below`: actors of Ray, or forked by the fork server."""
    words = {pid: words_of(pid) for pid in below}
    forked = {pid for pid in below if b"fork_server" in words[pid]}
    return {pid for pid in below if tree.get(pid) in forked & below and pid in forked} | {
        pid for pid in below if words[pid].startswith(b"ray::_Actor")
    }


def port_of(driver: int) -> int | None:
    """Return the port at which a driver waits for its workers, the first one that it opened; None if it does not."""
    with suppress(OSError):
        held = {os.readlink(f"/proc/{driver}/fd/{fd}") for fd in os.listdir(f"/proc/{driver}/fd")}
        table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ports = [
            (int(row[9]), int(row[1][-4:], 16)) for row in table if row[3] == "0A" and f"socket:[{row[9]}]" in held
        ]
        return min(ports)[1] if ports else None
    return None

"""File descriptors of the driver: how many workers it can have."""

from __future__ import annotations

import resource

MANY = 65536
PER_MEMBER = 3  # its connection, that of its store, and what watches its process
OWN = 128  # libraries, logs, checkpoints


def allow_many_files() -> int:
    """Raises the limit of this process, which usually is 1024, as far as that helps; the new one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY if hard == resource.RLIM_INFINITY else min(hard, MANY)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MANY if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def lack_of_files(members: int) -> str:
    """Why there cannot be so many members, "" where there can."""
    needed, limit = PER_MEMBER * members + OWN, allow_many_files()
    if limit >= needed:
        return ""
    return f"{members} workers need {needed} open files in the driver, and the hard limit (ulimit -Hn) is {limit}"

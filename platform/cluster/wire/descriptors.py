"""File descriptor limit of a process, which bounds the number of workers that a driver can have and that a worker can
be connected to."""

from __future__ import annotations

import resource

MANY = 65536  # descriptors: the limit asked for
PER_MEMBER = 3  # descriptors: its control connection, its connection to the TCPStore, and one that watches its process
OWN = 128  # descriptors of the driver itself: libraries, logs, checkpoints


def allow_many_files() -> int:
    """Raise this process's soft limit on open files (RLIMIT_NOFILE), usually 1024, to its hard limit or MANY, whichever
    is less, so that it can hold a connection to every worker.

    Returns the limit now in force; MANY if there is none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY if hard == resource.RLIM_INFINITY else min(hard, MANY)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MANY if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def lack_of_files(members: int) -> str:
    """Raise the driver's limit on open files; return why it is too low for `members` workers, "" if it is not."""
    needed, limit = PER_MEMBER * members + OWN, allow_many_files()
    if limit >= needed:
        return ""
    return f"{members} workers need {needed} open files in the driver, and the hard limit (ulimit -Hn) is {limit}"

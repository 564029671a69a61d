"""The connections of gloo's groups, to be shut down: gloo itself cannot abort, and leaving a group waits for all that
is under way in it, for ranks that may wait for this one in theirs."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from stat import S_ISSOCK

Sockets = dict[int, int]  # descriptor -> inode, which tells whether the descriptor was given to something else since


def open_sockets() -> Sockets:
    """Those of this process; {} where there is no /proc."""
    found: Sockets = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        with suppress(OSError):
            status = os.fstat(int(name))
            if S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def shut_down(sockets: Sockets) -> None:
    """Whoever waits at either end, in this process or another, has an error. Descriptors stay open: their owner closes
    them."""
    for descriptor, inode in sockets.items():
        with suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.getpeername()  # fails for one that listens: gloo would not survive its end
                    connection.shutdown(socket.SHUT_RDWR)

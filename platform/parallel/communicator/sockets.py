"""Sockets of gloo's groups, found so that they can be shut down: gloo cannot abort, and leaving a group waits for all
its operations in progress, on ranks that may be waiting for this one in other groups."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from stat import S_ISSOCK

Sockets = dict[int, int]  # descriptor -> inode, which shows whether the descriptor has been reused since


def open_sockets() -> Sockets:
    """Return the open sockets of this process, descriptor -> inode ({} on a system without /proc); sockets that appear
    while gloo forms its groups are the groups' connections."""
    found: Sockets = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        with suppress(OSError):
            status = os.fstat(int(name))
            if S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def shut_down(sockets: Sockets) -> None:
    """Shut down the connections among `sockets`, as found by `open_sockets`, so that a wait at either end, in this
    process or another, fails. Reused descriptors and listening sockets are left alone. The descriptors stay open: the
    owner (gloo) closes them."""
    for descriptor, inode in sockets.items():
        with suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.getpeername()  # raises for a listening socket, which gloo must keep
                    connection.shutdown(socket.SHUT_RDWR)

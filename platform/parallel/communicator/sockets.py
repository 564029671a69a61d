"""Sockets of this process. The ones of gloo's groups are found so that they can be shut down: gloo cannot abort, and
leaving a group waits for all its operations in progress, on ranks that may be waiting for this one in other groups.
Links sum up all connections to one address, by the kernel's counters: their speed, and bytes not acknowledged.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from contextlib import suppress
from stat import S_ISSOCK
from typing import Annotated, NamedTuple

from platform.boundary.schema import Count, Span, Text

Sockets = dict[int, int]  # descriptor -> inode, which shows whether the descriptor has been reused since

MOST_LINKS = 16  # links that a heartbeat lists
_SIZE = 192  # bytes of struct tcp_info that are read (Linux 4.13 and later)
_REPEATED, _LAST_ACKNOWLEDGED, _ACKNOWLEDGED, _BUSY = 2, 8 + 4 * 12, 120, 168  # offsets in it
Address = Annotated[str, Text(r"[0-9a-fA-F.:]{0,45}", "an address")]


class TcpLink(NamedTuple):
    """All connections of this process from the address `here` to the one `there`. `sent`: bytes that the other end has
    acknowledged; `busy`: seconds in which the network alone held up more; `queued`: bytes not acknowledged yet;
    `quiet`: seconds without an acknowledgement although they were sent again."""

    here: Address
    there: Address
    sent: Count
    busy: Annotated[float, Span(0, 1e12)]
    queued: Count
    quiet: Annotated[float, Span(0, 1e12)]


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


def links() -> list[TcpLink]:
    """Return the links of this process to other addresses, MOST_LINKS at most, the ones with most unacknowledged bytes
    first; [] where the kernel does not say."""
    found: dict[tuple[str, str], TcpLink] = {}
    with suppress(OSError):
        for link in map(_link, open_sockets()):
            if link and (before := found.get(link[:2])):
                found[link[:2]] = TcpLink(
                    link.here,
                    link.there,
                    link.sent + before.sent,
                    link.busy + before.busy,
                    link.queued + before.queued,
                    max(link.quiet, before.quiet),
                )
            elif link:
                found[link[:2]] = link
    return sorted(found.values(), key=lambda link: (-link.queued, -link.busy))[:MOST_LINKS]


def _link(descriptor: int) -> TcpLink | None:
    """Return what the kernel counted of one connection of this process, None if the descriptor is no such thing."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            here, there = connection.getsockname()[0], connection.getpeername()[0]
            counted = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
            (queued,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, b"\0" * 4))
    except OSError:
        return None
    if len(counted) < _SIZE or here == there:  # the latter leaves this machine by no link
        return None
    repeated, (milliseconds,) = counted[_REPEATED], struct.unpack_from("I", counted, _LAST_ACKNOWLEDGED)
    (sent,) = struct.unpack_from("Q", counted, _ACKNOWLEDGED)
    busy, held_up_there, held_up_here = struct.unpack_from("QQQ", counted, _BUSY)
    seconds = max(0, busy - held_up_there - held_up_here) / 1e6
    quiet = milliseconds / 1e3 if queued and repeated else 0.0  # else it may have been sent just now
    return TcpLink(here.partition("%")[0], there.partition("%")[0], sent, seconds, queued, quiet)

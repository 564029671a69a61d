"""Current activity of this process, readable from another thread (for its heartbeats), to distinguish computing,
waiting and hanging; its connections to other workers (`TcpLink`), and how they are shut down."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from stat import S_ISSOCK
from threading import get_ident, get_native_id
from time import monotonic
from traceback import format_stack
from typing import Annotated, Any, NamedTuple

from platform.boundary.schema import Count, EntryBounds, Span, Text

# Sockets of this process. The ones of gloo's groups are found so that they can be shut down: gloo cannot abort, and
# leaving a group waits for all its operations in progress, on ranks that may be waiting for this one in other groups.
# Links sum up all connections to one address, by the kernel's counters: their speed, and bytes not acknowledged.

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
    sockets: Sockets = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        with suppress(OSError):
            status = os.fstat(int(name))
            if S_ISSOCK(status.st_mode):
                sockets[int(name)] = status.st_ino
    return sockets


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


def read_tcp_links() -> list[TcpLink]:
    """Return the connections of this process as links to other addresses, MOST_LINKS at most, the ones with most
    unacknowledged bytes first; [] where the kernel does not say."""
    links_by_ends: dict[tuple[str, str], TcpLink] = {}
    with suppress(OSError):
        for link in map(_read_tcp_link, open_sockets()):
            if link and (before := links_by_ends.get(link[:2])):
                _, _, sent, busy, queued, quiet = before
                links_by_ends[link[:2]] = TcpLink(
                    *link[:2], link.sent + sent, link.busy + busy, link.queued + queued, max(link.quiet, quiet)
                )
            elif link:
                links_by_ends[link[:2]] = link
    return sorted(links_by_ends.values(), key=lambda link: (-link.queued, -link.busy))[:MOST_LINKS]


def _read_tcp_link(descriptor: int) -> TcpLink | None:
    """Return what the kernel counted of one connection of a rank's process, None if the descriptor is no such thing."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            local_address, remote_address = connection.getsockname()[0], connection.getpeername()[0]
            counted = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
            (queued,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, b"\0" * 4))
    except OSError:
        return None
    if len(counted) < _SIZE or local_address == remote_address:  # the latter leaves this machine by no link
        return None
    repeated, (milliseconds,) = counted[_REPEATED], struct.unpack_from("I", counted, _LAST_ACKNOWLEDGED)
    (sent,) = struct.unpack_from("Q", counted, _ACKNOWLEDGED)
    busy, held_up_there, held_up_here = struct.unpack_from("QQQ", counted, _BUSY)
    seconds = max(0, busy - held_up_there - held_up_here) / 1e6
    quiet = milliseconds / 1e3 if queued and repeated else 0.0  # else it may have been sent just now
    return TcpLink(local_address.partition("%")[0], remote_address.partition("%")[0], sent, seconds, queued, quiet)


SYNCHRONIZE = "synchronize"  # section in which the host waits for its device
STILL_SECONDS = 1.0  # in one section, from which on a heartbeat says where in the code that is
_FRAMES = 10  # of a stack, the innermost


class Wait(NamedTuple):
    """Collective or message that a rank waits for: its operation, its name in the plan, the mesh axes along which its
    group lies, the rank at the other end of a message, -1 for a collective, and its number on these axes or from this
    peer."""

    op: str
    name: str
    axes: Annotated[list[str], EntryBounds(0, 64)]
    peer: Annotated[int, Span(-1, 1 << 53)] = -1
    number: Count = 0


class DevicePlace(NamedTuple):
    """Place of a device in the work that its host has queued: its clock section, True if it waits there for other
    ranks, how many such waits it has completed, and how many marks of the clock it has passed."""

    section: str
    waiting: bool
    completed: int
    passed: int


@dataclass(frozen=True)
class Activity:
    """Heartbeat of a worker: the driver's call that it is in, "" for none; the innermost section; True if it waits
    there for other ranks; and the seconds since any of these changed. `preparing`: True while it compiles, loads or
    pins something. While the host waits for its device, `device` is
    the section that the device is in, `device_waits` says whether it waits for other ranks there, and `completed` how
    many waits for others (collectives and messages) it has completed in this step; its passing on counts as a change.
    `busy`: the share of the time since the heartbeat before in which the main thread ran, or waited for a processor or
    a disk; 1 if that is not known. `wait`: the collective or message that the section waits for; `stack`: frames of the
    main thread where it stands still, the innermost last; `links`: its connections to other addresses. `done` of
    `total`: how far the call is, in bytes or sequences, if it says so; else 0.
    """

    call: str
    section: str
    waiting: bool
    seconds: Annotated[float, Span(0, 1e12)]
    device: str = ""
    device_waits: bool = False
    completed: Count = 0
    busy: Annotated[float, Span(0, 1e12)] = 0.0
    preparing: bool = False
    wait: Wait | None = None
    stack: Annotated[list[str], EntryBounds(0, _FRAMES)] = field(default_factory=list)
    links: Annotated[list[TcpLink], EntryBounds(0, 64)] = field(default_factory=list)
    done: Count = 0
    total: Count = 0


_Now = tuple[str, bool, bool, Any, float]  # section, waiting for other ranks, preparing, what it waits for, since


class WorkerProgress:
    """Keeps the driver's call and the innermost clock section that the main thread of a worker is in. The section's
    state is one tuple, replaced as a whole, so that a reader in another thread never sees half of a change."""

    def __init__(self) -> None:
        """Construct the progress of a worker that is in no call and no section, and whose device has passed no mark."""
        self._call = ""
        self.now: _Now = ("", False, False, None, monotonic())
        self._far = 0, 0
        self._device: Callable[[], DevicePlace] | None = None  # set while the main thread waits for its device
        self._passed, self._moved = -1, 0.0  # marks that the device had passed when last looked at, and when
        self._ordered = 0.0
        self._thread = self._own = 0  # that executes the driver's calls, by its number in the kernel and in Python
        self._looked: tuple[float, float] | None = None  # at the last heartbeat: when, and seconds of `_active_seconds`

    def begin_call(self, call: str) -> None:
        """Note for heartbeats that this worker begins the driver's `call`; "" when the call has ended."""
        self._call, self.now, self._device = call, ("", False, False, None, monotonic()), None
        self._far = 0, 0
        self.restart_call_clock()
        self._thread, self._own, self._looked = get_native_id(), get_ident(), None

    def note_call_progress(self, done: int, total: int) -> None:
        """Note for heartbeats how far this worker is with the driver's call: `done` of `total` bytes or sequences."""
        self._far = done, total

    def restart_call_clock(self) -> None:
        """Note that this worker begins to work on the driver's call only now."""
        self._ordered = monotonic()

    def seconds_in_call(self) -> float:
        """Return the seconds for which this worker has worked on the driver's call that it is in; 0 outside of any."""
        return monotonic() - self._ordered if self._call else 0.0

    def enter_section(
        self, section: str, waiting: bool = False, preparing: bool = False, awaited_collective: Any = None
    ) -> tuple[str, bool, bool, Any]:
        """Note for heartbeats that the main thread enters the clock section `section`; `waiting`: it only waits for
        other ranks there, for the collective or message `awaited_collective`, if that is given
        (`platform.runtime.communicator.Launched`); `preparing`: it compiles, loads or pins something. Returns the
        arguments of the call of this method that restores the section before."""
        before = self.now[:4]
        self.now = (section, waiting, preparing, awaited_collective, monotonic())
        return before

    @contextmanager
    def mark_preparing(self, section: str) -> Iterator[None]:
        """Mark the context as the section `section`, in which this rank compiles, loads or pins something new."""
        before = self.enter_section(section, preparing=True)
        try:
            yield
        finally:
            self.enter_section(*before)

    @contextmanager
    def mark_waiting(self, section: str, device: Callable[[], DevicePlace] | None = None) -> Iterator[None]:
        """Mark the context as the section `section`, in which this rank waits for other ranks: a rank that hangs in it
        is not to blame. `device`: returns the position of the device that the rank waits for; other threads call it."""
        before = self.enter_section(section, True)
        self._passed, self._device = -1, device
        try:
            yield
        finally:
            self._device = None
            self.enter_section(*before)

    def current_activity(self) -> Activity:
        """Return the call and section of this process now: a heartbeat without measurements."""
        section, waiting, preparing, awaited, since = self.now
        seconds = monotonic() - since
        wait = awaited and Wait(awaited.op, awaited.name, list(awaited.axes), awaited.peer, awaited.number)
        done, total = self._far
        return Activity(self._call, section, waiting, seconds, preparing=preparing, wait=wait, done=done, total=total)

    def build_heartbeat(self) -> Activity:
        """Return the heartbeat of this process: its call, the innermost section, and how long it has been there. Where
        the device is looked at for the first time, that counts as its last movement, as nothing was known before."""
        now, device, activity = monotonic(), self._device, self.current_activity()
        stack = thread_frames(self._own) if self._call and activity.seconds >= STILL_SECONDS else []
        beat = replace(activity, busy=self._busy_share(now), stack=stack, links=read_tcp_links())
        since = now - activity.seconds
        if device is None:
            return beat
        try:
            at = device()
        except RuntimeError:  # of a device that no longer works: the main thread gets the same error
            return beat
        if at.passed != self._passed:
            self._passed, self._moved = at.passed, now
        seconds = now - max(since, self._moved)
        return replace(beat, seconds=seconds, device=at.section, device_waits=at.waiting, completed=at.completed)

    def _busy_share(self, now: float) -> float:
        """Return the share of time since the last heartbeat that the main thread was active, 1 if not known."""
        active, before = _active_seconds(self._thread), self._looked
        self._looked = None if active is None else (now, active)
        if active is None or before is None or now == before[0]:
            return 1.0
        return max(0.0, (active - before[1]) / (now - before[0]))


def thread_frames(thread: int) -> list[str]:
    """Return the innermost frames of a thread of this process, the innermost last: its progress, for heartbeats."""
    frames: list[str] = []
    frame = sys._current_frames().get(thread)
    while frame and len(frames) < _FRAMES:
        path = "/".join(frame.f_code.co_filename.split("/")[-3:])
        frames.append(f"{path}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return frames[::-1]


def frames_of_other_threads() -> dict[str, list[str]]:
    """Return where all other threads of this process stand: frames by name, the main one first, innermost last."""
    frames, known = sys._current_frames(), threading.enumerate()
    names = {threading.main_thread().ident: "main thread"} | {thread.ident: thread.name for thread in known[1:]}
    ordered = sorted(frames.keys() - {get_ident()}, key=lambda n: (n != threading.main_thread().ident, n))
    return {f"{names.get(n, 'thread')} ({n})": [*map(str.rstrip, format_stack(frames[n]))] for n in ordered}


def _active_seconds(thread: int) -> float | None:
    """Return the seconds that a thread of this process has run or waited for a processor so far, for heartbeats of its
    progress. None if the kernel does not say, or while the thread runs or waits for a disk, as the kernel books that
    later."""
    try:
        with open(f"/proc/self/task/{thread}/stat") as stat, open(f"/proc/self/task/{thread}/schedstat") as times:
            state, (ran, waited, _) = stat.read().rpartition(")")[2].split()[0], times.read().split()
    except (OSError, ValueError, IndexError):
        return None
    return None if state in "RD" else (int(ran) + int(waited)) / 1e9


PROGRESS = WorkerProgress()

"""Driver's end of the control channel: one thread, one selector, and a connection to every worker process.
`raise_open_file_limit` raises the file descriptor limit of a process, which bounds the number of these connections."""

from __future__ import annotations

import errno
import logging
import resource
import selectors
import socket
from collections import deque
from collections.abc import Iterable
from math import inf
from time import monotonic
from typing import Any

from platform.cluster.crew import channel
from platform.cluster.crew.channel import LIMIT, Garbled, Hello, Said, Unframer, Welcome, encode_message, parse_message

MANY = 65536  # descriptors: the limit asked for
PER_MEMBER = 3  # descriptors: its control connection, its connection to the TCPStore, and one that watches its process
OWN = 128  # descriptors of the driver itself: libraries, logs, checkpoints


def raise_open_file_limit() -> int:
    """Raise this process's soft limit on open files (RLIMIT_NOFILE), usually 1024, to its hard limit or MANY, whichever
    is less, so that it can hold a connection to every worker.

    Returns the limit now in force; MANY if there is none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MANY if hard == resource.RLIM_INFINITY else min(hard, MANY)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return MANY if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return target


def lack_of_files(members: int) -> str:
    """Raise the driver's limit on open files; return why it is too low for `members` workers, "" if it is not."""
    needed, limit = PER_MEMBER * members + OWN, raise_open_file_limit()
    if limit >= needed:
        return ""
    return f"{members} workers need {needed} open files in the driver, and the hard limit (ulimit -Hn) is {limit}"


Heard = tuple[int, Hello | Said | None]  # member number, and its message or None when its connection closed

_GREETING_BYTES = 4096
_GREETING_SECONDS = 10.0  # from connecting to the greeting
_STRANGERS = 1024  # unauthenticated connections at a time, if descriptors allow; beyond that the oldest is closed
_FEW_STRANGERS = 16  # allowed even when descriptors are short
_ACCEPTED = 64  # connections per turn, so that connected members are read in between
_BACKLOG = 4096
_REST_SECONDS = 0.1  # pause in accepting when no descriptor is free
_LOG = logging.getLogger(__name__)
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class WorkerSwitchboard:
    """Listens in the driver at `address` (host, port), on that host alone, for worker processes, and admits the members
    in `expected` that prove to hold their token. A stranger is a connection that is not yet admitted: a bad message
    from it, or any error in handling one, closes that connection and affects nothing else but the count `refused`. A
    member that sends a message of no valid shape is closed likewise. Only `poll_events` blocks, for as long as its
    caller allows.

    Attributes:
        session: public; tokens are valid for this switchboard alone.
        expected: numbers of members that may still dial in.
        payload: plain data that the driver's welcome carries to every member admitted from now on.
        sent, received: bytes so far.
        refused: strangers that were turned away so far.
    """

    def __init__(self, host: str, key: str = ""):
        """Listen for worker processes on `host`, at a free port. `key`: secret from which the members' tokens are
        derived; "" = a fresh random one."""
        self._files = raise_open_file_limit()
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._key, self.session = key or channel.new_nonce(), channel.new_nonce()
        self.expected: set[int] = set()
        self.sent = self.received = self.refused = 0
        self._selector = selectors.DefaultSelector()
        self._accept_from = -inf  # until this time the listener is unregistered (see `_pause_accepting`)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._members: dict[int, _Connection] = {}
        self._strangers: dict[_Connection, float] = {}  # when each connected, oldest first
        self.payload: object = None
        self._events: deque[Heard] = deque()

    def member_token(self, number: int) -> str:
        """Return the secret token by which member `number` authenticates in `dial`; the launcher hands it on."""
        return channel.member_token(self._key, self.session, number)

    def expect_members(self, numbers: Iterable[int]) -> None:
        """Allow the members of these numbers to dial in to the driver, once each."""
        self.expected.update(numbers)

    def send_frame(self, number: int, frame: bytes) -> None:
        """Send worker `number` an encoded message, or queue it, without blocking; drop it if the worker is gone."""
        if connection := self._members.get(number):
            connection.outgoing.append(memoryview(frame))
            if len(connection.outgoing) == 1:
                self._write_queued(connection)

    def poll_events(self, timeout: float) -> list[Heard]:
        """Serve the driver's connections to its workers, and return the events so far, pairs (member number, message):
        at least one, unless `timeout` seconds pass. A member's first message is its Hello; None stands for the loss of
        its connection."""
        deadline = monotonic() + timeout
        while True:
            for key, ready in self._selector.select(self._seconds_to_wait(deadline)):
                connection = key.data
                if connection is None:
                    self._accept_connections()
                else:
                    if ready & selectors.EVENT_WRITE:
                        self._write_queued(connection)
                    if ready & selectors.EVENT_READ:
                        self._read_connection(connection)
            self._drop_stale_unauthenticated()
            if self._events or monotonic() >= deadline:
                events, self._events = list(self._events), deque()
                return events

    def _seconds_to_wait(self, deadline: float) -> float:
        """Return the seconds that `poll_events`, due to return at `deadline`, may wait for the workers' connections: 0
        if an event is pending, less if the pause in accepting (`_pause_accepting`) ends earlier. Registers the listener
        again if that pause is over."""
        now = monotonic()
        if self._accept_from > now:
            deadline = min(deadline, self._accept_from)
        elif self._accept_from > -inf:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._accept_from = -inf
        return 0.0 if self._events else min(max(0.0, deadline - now), 3600.0)  # epoll rejects infinity

    def hang_up(self, number: int) -> None:
        """Close the driver's connection to a worker, forbid it to dial in, and drop its unread messages."""
        if connection := self._members.get(number):
            self._close_connection(connection)
        self.expected.discard(number)
        self._events = deque(event for event in self._events if event[0] != number)

    def close(self) -> None:
        """Close the driver's listener and all connections, of members and of peers not yet admitted."""
        for connection in [*self._members.values(), *self._strangers]:
            self._close_connection(connection)
        self._listener.close()
        self._selector.close()

    def _accept_connections(self) -> None:
        """Accept at most _ACCEPTED new connections from the driver's listener; none is authenticated yet. If there are
        too many of these, the longest-open one is closed."""
        for _ in range(_ACCEPTED):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:  # backlog empty
                return
            except OSError as error:  # no descriptor, or the peer has already disconnected
                if error.errno in _NO_ROOM and not self._drop_oldest_unauthenticated():
                    return self._pause_accepting()
                continue
            connection = _Connection(accepted)
            try:
                accepted.setblocking(False)
                channel.tune_connection(accepted)
                self._selector.register(accepted, selectors.EVENT_READ, connection)
            except OSError:  # the peer has disconnected, or the kernel lacks memory
                accepted.close()
                continue
            self._strangers[connection] = monotonic()
            connection.outgoing.append(memoryview(encode_message(channel.Challenge(connection.challenge))))
            self._write_queued(connection)
            if len(self._strangers) > self._most_strangers():
                self._drop_oldest_unauthenticated()

    def _most_strangers(self) -> int:
        """Return how many unauthenticated connections the driver may have open, leaving descriptors for all workers."""
        members = len(self._members) + len(self.expected)
        return max(_FEW_STRANGERS, min(_STRANGERS, self._files - OWN - PER_MEMBER * members))

    def _drop_oldest_unauthenticated(self) -> bool:
        """Close the driver's oldest unauthenticated connection, to make room for one; return False without any."""
        if self._strangers:
            self._refuse_stranger(next(iter(self._strangers)))
            return True
        return False

    def _pause_accepting(self) -> None:
        """Accept no connections of workers for _REST_SECONDS, as no descriptor is free: `poll_events` would spin."""
        self._selector.unregister(self._listener)
        self._accept_from = monotonic() + _REST_SECONDS

    def _drop_stale_unauthenticated(self) -> None:
        """Close connections to the driver whose peer has not authenticated within _GREETING_SECONDS."""
        while self._strangers:
            oldest, since = next(iter(self._strangers.items()))
            if monotonic() < since + _GREETING_SECONDS:
                return
            self._refuse_stranger(oldest)

    def _read_connection(self, connection: _Connection) -> None:
        """Read the bytes that a connection to the driver has received, and handle the messages that they complete;
        close the connection if its peer has closed it or anything is wrong with them."""
        if connection.closed:  # while an earlier event of this turn was handled
            return
        try:
            data = connection.socket.recv(_GREETING_BYTES if connection.number is None else channel.READ_BYTES)
            self.received += len(data)
            for message in connection.frames.split_messages(data):
                self._take_message(connection, message)
                if connection.closed:
                    return
        except BlockingIOError:
            return
        except Exception:  # whatever a peer provokes ends its own connection and no other
            data = b""
            if connection.number is None:
                return self._refuse_stranger(connection)
        if not data:
            self._report_lost_connection(connection)

    def _take_message(self, connection: _Connection, message: dict[str, Any]) -> None:
        """Admit a peer by its first message; queue a worker's message for `poll_events`. Raises Garbled."""
        if connection.number is None:
            self._admit_member(connection, message)
        else:
            self._events.append((connection.number, parse_message(Said, message)))

    def _admit_member(self, connection: _Connection, message: dict[str, Any]) -> None:
        """Accept the peer of a connection as a member if its greeting proves that it holds the token of an expected
        one, and send it the driver's welcome. Raises Garbled for any other peer."""
        hello: Hello = parse_message(channel.Greeting, message).hello
        number, token, nonces = hello.number, self.member_token(hello.number), (connection.challenge, hello.nonce)
        expected_proof = channel.compute_proof(token, channel.MEMBER, *nonces)
        if number not in self.expected or not channel.is_same_proof(hello.proof, expected_proof):
            raise Garbled("a stranger")
        self.expected.remove(number)
        del self._strangers[connection]
        connection.number, connection.frames.limit = number, LIMIT
        self._members[number] = connection
        self._events.append((number, hello))
        proof = channel.compute_proof(token, channel.DRIVER, *nonces)
        self.send_frame(number, encode_message(Welcome(proof, self.payload)))

    def _write_queued(self, connection: _Connection) -> None:
        """Write the queued messages to a worker's connection until its socket takes no more; `poll_events` continues
        when it does again."""
        if connection.closed:
            return
        outgoing = connection.outgoing
        try:
            while outgoing:
                sent = connection.socket.send(outgoing[0])
                self.sent += sent
                if sent < len(outgoing[0]):
                    outgoing[0] = outgoing[0][sent:]
                else:
                    outgoing.popleft()
        except BlockingIOError:
            pass
        except OSError:
            return self._report_lost_connection(connection)
        if bool(outgoing) != connection.writing:
            connection.writing = bool(outgoing)
            write = selectors.EVENT_WRITE if outgoing else 0
            self._selector.modify(connection.socket, selectors.EVENT_READ | write, connection)

    def _report_lost_connection(self, connection: _Connection) -> None:
        """Close a worker's connection that its peer has closed or that failed; let `poll_events` report the loss."""
        if connection.number is not None:
            self._events.append((connection.number, None))
        self._close_connection(connection)

    def _refuse_stranger(self, connection: _Connection) -> None:
        """Close a connection to the driver that proves no worker, and count it; log only counts 1, 10, 100, ..."""
        self._close_connection(connection)
        self.refused += 1
        if self.refused == 10 ** (len(str(self.refused)) - 1):
            what = "connection was refused that does" if self.refused == 1 else "connections were refused that do"
            _LOG.warning("at the driver's port %d %s not prove to be a worker of this run", self.refused, what)

    def _close_connection(self, connection: _Connection) -> None:
        """Close a connection of the driver to a worker or stranger, drop its unsent messages, and forget the peer."""
        self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.closed = True
        connection.outgoing.clear()
        self._strangers.pop(connection, None)
        if connection.number is not None:
            del self._members[connection.number]


class _Connection:
    """State of one connection that the driver's switchboard has accepted. `number`: number of the member, None before
    it is admitted. `challenge`: the nonce that its peer has to prove its token for."""

    def __init__(self, accepted: socket.socket):
        """Wrap a connection that the driver has just accepted, from a peer that has yet to authenticate."""
        self.socket = accepted
        self.number: int | None = None
        self.challenge = channel.new_nonce()
        self.frames = Unframer(_GREETING_BYTES)
        self.outgoing: deque[memoryview] = deque()
        self.writing = self.closed = False

"""The driver's end of the control channel: one thread, one selector, a connection to every worker process."""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
from collections import deque
from collections.abc import Iterable
from time import monotonic
from typing import Any

from platform.cluster.channel import LIMIT, READ_BYTES, Decoder, Garbled, tune
from platform.cluster.files import allow_many_files

Event = tuple[int, dict[str, Any] | None]  # a member's number, and its message; None: its connection is closed

_GREETING_BYTES = 4096
_GREETING_SECONDS = 10.0  # for who has connected to say who it is
_STRANGERS = 1024  # at a time; then the oldest has to go
_ACCEPTED = 64  # at a time: then those that are there are heard
_BACKLOG = 4096


class Switchboard:
    """Listens at `address` (host, port) on that host alone, and takes calls of the members in `expected` that know
    `token`. Anybody else is cut off. Nothing here waits for a peer, but `poll` where it is told to.

    Attributes:
        sent, received: bytes so far.
    """

    def __init__(self, host: str):
        allow_many_files()
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.token = secrets.token_hex(16)
        self.expected: set[int] = set()
        self.sent = self.received = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._members: dict[int, _Connection] = {}
        self._strangers: dict[_Connection, float] = {}  # when they came
        self._events: deque[Event] = deque()

    def expect(self, numbers: Iterable[int]) -> None:
        """Members that may dial in, once."""
        self.expected.update(numbers)

    def send(self, number: int, frame: bytes) -> None:
        """Queues a message. Where the member is gone, `poll` says so."""
        if connection := self._members.get(number):
            connection.outgoing.append(memoryview(frame))
            if len(connection.outgoing) == 1:
                self._write(connection)

    def poll(self, timeout: float) -> list[Event]:
        """What has come, at least one event unless `timeout` seconds pass first. A member's first is {"hello": ...}."""
        deadline = monotonic() + timeout
        while True:
            left = 0.0 if self._events else min(max(0.0, deadline - monotonic()), 3600.0)  # epoll takes no infinity
            for key, ready in self._selector.select(left):
                connection = key.data
                if connection is None:
                    self._accept()
                else:
                    if ready & selectors.EVENT_WRITE:
                        self._write(connection)
                    if ready & selectors.EVENT_READ:
                        self._read(connection)
            self._drop_the_silent()
            if self._events or monotonic() >= deadline:
                events, self._events = list(self._events), deque()
                return events

    def hang_up(self, number: int) -> None:
        """Closes the connection of a member, without an event."""
        if connection := self._members.get(number):
            self._close(connection)
        self.expected.discard(number)
        self._events = deque(event for event in self._events if event[0] != number)

    def close(self) -> None:
        """Hangs up on everybody."""
        for connection in [*self._members.values(), *self._strangers]:
            self._close(connection)
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED):
            try:
                accepted, _ = self._listener.accept()
            except OSError:  # nobody more
                return
            accepted.setblocking(False)
            tune(accepted)
            connection = _Connection(accepted)
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            self._strangers[connection] = monotonic()
            if len(self._strangers) > _STRANGERS:
                self._close(next(iter(self._strangers)))

    def _drop_the_silent(self) -> None:
        while self._strangers:
            oldest, since = next(iter(self._strangers.items()))
            if monotonic() < since + _GREETING_SECONDS:
                return
            self._close(oldest)

    def _read(self, connection: _Connection) -> None:
        if connection.closed:  # a moment ago, for another event
            return
        try:
            data = connection.socket.recv(READ_BYTES)
            self.received += len(data)
            for message in connection.decoder.feed(data):
                if connection.number is not None:
                    self._events.append((connection.number, message))
                elif not self._admit(connection, message):
                    data = b""
                    break
        except BlockingIOError:
            return
        except (OSError, Garbled):
            data = b""
        if not data:
            self._lose(connection)

    def _admit(self, connection: _Connection, message: dict[str, Any]) -> bool:
        hello = message.get("hello")
        if not isinstance(hello, dict):
            return False
        token, number = hello.pop("token", None), hello.get("number")
        if not (isinstance(token, str) and hmac.compare_digest(token.encode(), self.token.encode())):
            return False
        if not (isinstance(number, int) and number in self.expected):
            return False
        self.expected.remove(number)
        del self._strangers[connection]
        connection.number, connection.decoder.limit = number, LIMIT
        self._members[number] = connection
        self._events.append((number, {"hello": hello}))
        return True

    def _write(self, connection: _Connection) -> None:
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
            return self._lose(connection)
        if bool(outgoing) != connection.writing:
            connection.writing = bool(outgoing)
            write = selectors.EVENT_WRITE if outgoing else 0
            self._selector.modify(connection.socket, selectors.EVENT_READ | write, connection)

    def _lose(self, connection: _Connection) -> None:
        if connection.number is not None:
            self._events.append((connection.number, None))
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.closed = True
        connection.outgoing.clear()
        self._strangers.pop(connection, None)
        if connection.number is not None:
            del self._members[connection.number]


class _Connection:
    """`number`: of the member; None before it has said who it is."""

    def __init__(self, accepted: socket.socket):
        self.socket = accepted
        self.number: int | None = None
        self.decoder = Decoder(_GREETING_BYTES)
        self.outgoing: deque[memoryview] = deque()
        self.writing = self.closed = False

"""The driver's end of the control channel: one thread, one selector, a connection to every worker process."""

from __future__ import annotations

import errno
import selectors
import socket
from collections import deque
from collections.abc import Iterable, Mapping
from math import inf
from time import monotonic
from typing import Any

from platform.cluster.wire import secret
from platform.cluster.wire.channel import LIMIT, READ_BYTES, Decoder, Garbled, encode, tune
from platform.cluster.wire.files import OWN, PER_MEMBER, allow_many_files
from platform.cluster.wire.messages import GREETING, fits, understood

Event = tuple[int, dict[str, Any] | None]  # a member's number, and its message; None: its connection is closed

_GREETING_BYTES = 4096
_GREETING_SECONDS = 10.0  # for who has connected to say who it is
_STRANGERS = 1024  # at a time, if the descriptors that members leave allow; then the oldest has to go
_FEW_STRANGERS = 16  # always
_ACCEPTED = 64  # at a time: then those that are there are heard
_BACKLOG = 4096
_REST_SECONDS = 0.1  # without accepting anybody, where there is no descriptor
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Switchboard:
    """Listens at `address` (host, port) on that host alone, and takes calls of the members in `expected` that prove to
    have their token. Anybody else is cut off: whatever a stranger sends, and whatever goes wrong about it, ends its
    connection and nothing else. So does what a member sends that no member says. Nothing here waits for a peer, but
    `poll` where it is told to.

    Attributes:
        session: public; tokens are good for this switchboard alone.
        sent, received: bytes so far.
    """

    def __init__(self, host: str, key: str = ""):
        """Listen on `host`. `key`: of the tokens; "" = a fresh one."""
        self._files = allow_many_files()
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._key, self.session = key or secret.new(), secret.new()
        self.expected: set[int] = set()
        self.sent = self.received = 0
        self._selector = selectors.DefaultSelector()
        self._accept_from = -inf  # while it is to come, the listener is not looked at
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._members: dict[int, _Connection] = {}
        self._strangers: dict[_Connection, float] = {}  # when they came
        self._told: Mapping[str, Any] = {}
        self._events: deque[Event] = deque()

    def token(self, number: int) -> str:
        """Return what member `number` proves by that it is who it says; for `dial`."""
        return secret.token(self._key, self.session, number)

    def tell(self, welcome: Mapping[str, Any]) -> None:
        """Say this to every member from now on that is admitted, in the first message that it gets."""
        self._told = dict(welcome)

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
            for key, ready in self._selector.select(self._patience(deadline)):
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

    def _patience(self, deadline: float) -> float:
        """Seconds to wait for an event; looks at the listener again once it has rested."""
        now = monotonic()
        if self._accept_from > now:
            deadline = min(deadline, self._accept_from)
        elif self._accept_from > -inf:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._accept_from = -inf
        return 0.0 if self._events else min(max(0.0, deadline - now), 3600.0)  # epoll takes no infinity

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
            except BlockingIOError:  # nobody more
                return
            except OSError as error:  # or who knocked is gone again
                if error.errno in _NO_ROOM and not self._make_room():
                    return self._rest()
                continue
            connection = _Connection(accepted)
            try:
                accepted.setblocking(False)
                tune(accepted)
                self._selector.register(accepted, selectors.EVENT_READ, connection)
            except OSError:  # it is gone again, or the machine has no room for it
                accepted.close()
                continue
            self._strangers[connection] = monotonic()
            if len(self._strangers) > self._most_strangers():
                self._make_room()

    def _most_strangers(self) -> int:
        """As many as leave the driver the descriptors that its members need."""
        members = len(self._members) + len(self.expected)
        return max(_FEW_STRANGERS, min(_STRANGERS, self._files - OWN - PER_MEMBER * members))

    def _make_room(self) -> bool:
        """Sends the stranger away that has been here longest; False where there is none."""
        if self._strangers:
            self._close(next(iter(self._strangers)))
            return True
        return False

    def _rest(self) -> None:
        """Who knocks stays in the backlog for a moment: the listener, which is always ready now, would keep us busy."""
        self._selector.unregister(self._listener)
        self._accept_from = monotonic() + _REST_SECONDS

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
            data = connection.socket.recv(_GREETING_BYTES if connection.number is None else READ_BYTES)
            self.received += len(data)
            for message in connection.decoder.feed(data):
                self._hear(connection, message)
                if connection.closed:
                    return
        except BlockingIOError:
            return
        except Exception:  # whatever it is: it is the end of who has sent it, and of nobody else
            data = b""
        if not data:
            self._lose(connection)

    def _hear(self, connection: _Connection, message: dict[str, Any]) -> None:
        """Raises Garbled where this may not be said."""
        if connection.number is None:
            self._admit(connection, message)
        elif understood(message):
            self._events.append((connection.number, message))
        else:
            raise Garbled("no member says that")

    def _admit(self, connection: _Connection, message: dict[str, Any]) -> None:
        if not fits(message, GREETING):
            raise Garbled("no greeting")
        hello = message["hello"]
        number, nonce, proof = hello["number"], hello.pop("nonce"), hello.pop("proof")
        token = self.token(number)
        if number not in self.expected or not secret.same(proof, secret.proof(token, secret.MEMBER, nonce)):
            raise Garbled("a stranger")
        self.expected.remove(number)
        del self._strangers[connection]
        connection.number, connection.decoder.limit = number, LIMIT
        self._members[number] = connection
        self._events.append((number, {"hello": hello}))
        self.send(number, encode({"welcome": secret.proof(token, secret.DRIVER, nonce), **self._told}))

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

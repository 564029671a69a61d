"""What travels between the driver and a worker process: length-prefixed JSON over TCP, never pickle."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from time import monotonic, sleep
from typing import Any

from platform.cluster.wire import secret

LIMIT = 1 << 28  # bytes of one message
READ_BYTES = 1 << 16  # malloc has so many at hand; more would be mapped anew for each read
_HEADER = struct.Struct("!I")
_DIAL_SECONDS = 60.0  # for a driver that has more in its backlog than it can take at once
_LOST_SECONDS = 20  # without any packet from the other machine: then it is gone


class Garbled(Exception):
    """The other end does not speak this protocol."""


def encode(message: Mapping[str, Any]) -> bytes:
    """One message. Floats may be infinite or no number. Raises TypeError for what is not plain data."""
    return framed(text(message))


def text(value: Any) -> bytes:
    """A value as it stands in a message."""
    return json.dumps(value, separators=(",", ":")).encode()


def framed(payload: bytes) -> bytes:
    """One message, from its text."""
    if len(payload) > LIMIT:
        raise ValueError(f"a message of {len(payload)} bytes; {LIMIT} are allowed")
    return _HEADER.pack(len(payload)) + payload


class Decoder:
    """Cuts a stream of bytes into messages, each of at most `limit` bytes."""

    def __init__(self, limit: int = LIMIT):
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterable[dict[str, Any]]:
        """The messages that `data` completes. Raises Garbled."""
        if not self._buffer and _HEADER.size < len(data) <= self.limit:
            if _HEADER.unpack_from(data)[0] == len(data) - _HEADER.size:  # as it mostly is
                return (_parse(data[_HEADER.size :]),)
        return self._cut(data)

    def _cut(self, data: bytes) -> Iterator[dict[str, Any]]:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(buffer)
            if length > self.limit:
                raise Garbled(f"a message of {length} bytes; {self.limit} are allowed")
            end = _HEADER.size + length
            if len(buffer) < end:
                return
            payload = bytes(buffer[_HEADER.size : end])
            del buffer[:end]
            yield _parse(payload)


def _parse(payload: bytes) -> dict[str, Any]:
    try:
        message = json.loads(payload.decode())
    except (ValueError, RecursionError) as error:
        raise Garbled(f"no JSON: {type(error).__name__}") from None
    if not isinstance(message, dict):
        raise Garbled("no JSON object")
    return message


def tune(connection: socket.socket) -> None:
    """Small messages leave at once, and a machine that is gone is noticed (a process's end always is)."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _LOST_SECONDS // 2),
        ("TCP_KEEPINTVL", _LOST_SECONDS // 10),
        ("TCP_KEEPCNT", 5),
        ("TCP_USER_TIMEOUT", _LOST_SECONDS * 1000),
    ):
        if hasattr(socket, option):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class Line:
    """A worker's end of its connection. `send` may be called from any thread, `messages` from one.

    Attributes:
        welcome: what the driver said first.
    """

    def __init__(self, connection: socket.socket):
        self._connection, self._lock, self._decoder = connection, threading.Lock(), Decoder()
        self.welcome: dict[str, Any] = {}

    def send(self, frame: bytes) -> None:
        """Send a message. Raises OSError where the driver has hung up."""
        with self._lock:
            self._connection.sendall(frame)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield what the driver says until it hangs up. Raises OSError, Garbled."""
        while data := self._connection.recv(READ_BYTES):
            yield from self._decoder.feed(data)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def dial(address: tuple[str, int], token: str, number: int, node: str = "") -> Line:
    """Connect member `number`, which has `token`, to the driver's switchboard, and return when it is welcome.

    Dials again where it is hung up on: a flood of strangers may have pushed it out. Raises OSError where nobody
    welcomes it within a minute, PermissionError where whoever answers cannot prove to be the driver.
    """
    deadline = monotonic() + _DIAL_SECONDS
    while True:
        try:
            return _greet(socket.create_connection(address, timeout=10.0), token, number, node)
        except PermissionError:
            raise
        except (OSError, Garbled) as error:
            if monotonic() > deadline:
                raise OSError(f"the driver at {address[0]}:{address[1]} does not answer: {error}") from None
            sleep(0.2)


def _greet(connection: socket.socket, token: str, number: int, node: str) -> Line:
    line, nonce = Line(connection), secret.new()
    try:
        connection.settimeout(None)
        tune(connection)
        hello = {"number": number, "node": node or socket.gethostname(), "pid": os.getpid(), "nonce": nonce}
        line.send(encode({"hello": hello | {"proof": secret.proof(token, secret.MEMBER, nonce)}}))
        line.welcome = next(line.messages(), {})
        if not line.welcome:
            raise ConnectionResetError("it hung up")
        proof = line.welcome.pop("welcome", None)
        if not (isinstance(proof, str) and secret.same(proof, secret.proof(token, secret.DRIVER, nonce))):
            raise PermissionError("who answers is not the driver")
    except BaseException:
        line.close()
        raise
    return line

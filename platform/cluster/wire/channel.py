"""Protocol between the driver and a worker process: length-prefixed JSON over TCP, never pickle. Encoding, decoding,
and the worker's end of the connection.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from time import monotonic, sleep
from typing import Any

from platform.boundary import schema
from platform.boundary.schema import Malformed
from platform.cluster.wire import secret
from platform.cluster.wire.messages import Challenge, Greeting, Hello, Welcome

LIMIT = 1 << 28  # bytes of one message
READ_BYTES = 1 << 16  # small enough for malloc to reuse; a larger buffer would be mapped anew for each read
_HEADER = struct.Struct("!I")
_DIAL_SECONDS = 60.0  # how long to redial a driver whose backlog is full, and to wait for what it says
_NOT_THE_DRIVER = "who answers is not the driver"
_LOST_SECONDS = 20  # without any packet before the other machine is considered gone


class Garbled(Exception):
    """Signals that the other end of the connection violated the protocol."""


def encode(message: object) -> bytes:
    """Encode a message between driver and worker as a frame: length, then JSON text. Raises TypeError, ValueError."""
    return framed(text(message))


def text(value: object) -> bytes:
    """Return a value as the JSON text that stands for it in a message between driver and worker: a dataclass as the map
    of its fields, a tuple as a list. Floats may be infinite or NaN. Raises TypeError for anything but such plain data.
    """
    return json.dumps(value, separators=(",", ":"), default=schema.fields_of).encode()


def framed(payload: bytes) -> bytes:
    """Put the length, 4 bytes, big-endian, before the JSON of a message to driver or worker. Raises ValueError."""
    if len(payload) > LIMIT:
        raise ValueError(f"a message of {len(payload)} bytes; {LIMIT} are allowed")
    return _HEADER.pack(len(payload)) + payload


def read(kind: Any, message: object) -> Any:
    """Validate a decoded JSON message between driver and worker against `kind`, a dataclass in
    `platform.cluster.wire.messages` or a union of them, and return it as an object of that kind. Raises Garbled if it
    does not fit."""
    try:
        return schema.read(kind, message)
    except Malformed as error:
        raise Garbled(f"no message: {error}") from None


class Unframer:
    """Cuts the bytes received on a control connection into JSON messages, each of at most `limit` bytes."""

    def __init__(self, limit: int = LIMIT):
        """Start to split the bytes from driver or worker into messages, each of at most `limit` bytes."""
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the JSON messages that `data`, the next bytes that driver or worker received on the control connection,
        completes; the incomplete rest is kept. The result must be iterated before the next call. Raises Garbled for a
        message longer than `limit` bytes or one that is not a JSON object."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(buffer)
            if length > self.limit:
                raise Garbled(f"a message of {length} bytes; {self.limit} are allowed")
            end = _HEADER.size + length
            if len(buffer) < end:
                return
            payload = buffer[_HEADER.size : end]
            del buffer[:end]
            yield _parse(payload)


def _parse(payload: bytearray) -> dict[str, Any]:
    """Parse the JSON text of one message between driver and worker. Raises Garbled if it is not a JSON object."""
    try:
        message = json.loads(payload.decode())
    except (ValueError, RecursionError) as error:
        raise Garbled(f"no JSON: {type(error).__name__}") from None
    if not isinstance(message, dict):
        raise Garbled("no JSON object")
    return message


def tune(connection: socket.socket) -> None:
    """Set options of a TCP connection between driver and worker so that small messages leave at once (TCP_NODELAY) and
    a lost machine is noticed within _LOST_SECONDS (keepalive).

    The end of a process needs no option: its kernel closes the connection.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _LOST_SECONDS // 2),
        (socket.TCP_KEEPINTVL, _LOST_SECONDS // 10),
        (socket.TCP_KEEPCNT, 5),
        (socket.TCP_USER_TIMEOUT, _LOST_SECONDS * 1000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Line:
    """Worker's end of its connection to the driver. `send` may be called from any thread, `messages` from only one.

    Attributes:
        payload: plain data that the driver sends every member in its welcome.
    """

    def __init__(self, connection: socket.socket):
        """Wrap a worker's TCP connection to its driver."""
        self._connection, self._lock, self._frames = connection, threading.Lock(), Unframer()
        self.payload: Any = None

    def send(self, frame: bytes) -> None:
        """Send the driver one frame, as `encode` makes it. Raises OSError if the driver has closed the connection."""
        with self._lock:
            self._connection.sendall(frame)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the driver's messages to its worker, unvalidated JSON, until it hangs up. Raises OSError, Garbled."""
        yield from self._frames.feed(b"")  # what came in one read with the message that was the last to be taken
        while data := self._connection.recv(READ_BYTES):
            yield from self._frames.feed(data)

    @property
    def host(self) -> str:
        """Return the address of this worker's machine at which the driver, and so other workers, reach it."""
        address: str = self._connection.getsockname()[0]
        return address

    def close(self) -> None:
        """Close this worker's connection to the driver."""
        self._connection.close()


def dial(address: tuple[str, int], token: str, number: int, node: str = "", tiers: Sequence[str] = ()) -> Line:
    """Connect this worker process to the driver's switchboard at `address` (host, port) as member `number`, which holds
    the secret `token`; return the connection once the driver has admitted it. `node`: failure domain to report to the
    driver, "" = this machine's name; `tiers`: cluster tiers that it is in, outer to inner.

    Dials again if the connection is closed: a flood of unauthenticated connections may have pushed it out. Raises
    OSError if it is not admitted within a minute, PermissionError if the peer cannot prove that it is the driver.
    """
    deadline = monotonic() + _DIAL_SECONDS
    while True:
        try:
            return _greet(socket.create_connection(address, timeout=10.0), token, number, node, tiers)
        except PermissionError:
            raise
        except (OSError, Garbled) as error:
            if monotonic() > deadline:
                raise OSError(f"the driver at {address[0]}:{address[1]} does not answer: {error}") from None
            sleep(0.2)


def _greet(connection: socket.socket, token: str, number: int, node: str, tiers: Sequence[str]) -> Line:
    """Exchange challenge, greeting and welcome on a new connection to the driver, in which both sides prove that they
    hold the `token` of member `number`; return the connection as a Line. Closes the connection on any error."""
    line, nonce = Line(connection), secret.new()
    try:
        connection.settimeout(_DIAL_SECONDS)  # whoever accepts and is silent is not waited for longer
        tune(connection)
        challenge = _first(line, Challenge).challenge
        proof = secret.proof(token, secret.MEMBER, challenge, nonce)
        hello = Hello(number, node or socket.gethostname(), os.getpid(), nonce, proof, list(tiers))
        line.send(encode(Greeting(hello)))
        welcome = _first(line, Welcome)
        if not secret.same(welcome.welcome, secret.proof(token, secret.DRIVER, challenge, nonce)):
            raise PermissionError(_NOT_THE_DRIVER)
        line.payload = welcome.payload
        connection.settimeout(None)
    except BaseException:
        line.close()
        raise
    return line


def _first(line: Line, kind: Any) -> Any:
    """Return the driver's next message of the greeting. Raises OSError, or PermissionError unless it is a `kind`."""
    if (message := next(line.messages(), None)) is None:
        raise ConnectionResetError("it hung up")
    try:
        return schema.read(kind, message)
    except Malformed:
        raise PermissionError(_NOT_THE_DRIVER) from None

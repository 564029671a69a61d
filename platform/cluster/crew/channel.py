"""Protocol between the driver and a worker process: length-prefixed JSON over TCP, never pickle. Its messages, their
encoding and decoding, the worker's end of the connection, and the addresses of this machine (`find_interface`).

On the wire each message is the map of its fields, whose names identify its kind; any other message is garbled.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Annotated, Any, NamedTuple

from platform.boundary import schema
from platform.boundary.schema import Count, Malformed, Span, Text, shorten_value
from platform.runtime.progress import Activity

_PROCESSES = 1 << 22  # upper bound of Linux process ids


class Printable(NamedTuple):
    """Bound on a string in a message: all of its characters are printable, and there are `most` at most."""

    most: int

    def check(self, value: str) -> None:
        """Raise Malformed if a text in a worker's message is not printable or longer than `most` characters."""
        if len(value) > self.most or not value.isprintable():
            raise Malformed(f"{shorten_value(value)} is no printable text of at most {self.most} characters")


Node = Annotated[str, Printable(512)]
DumpName = Annotated[str, Text("[0-9a-z-]{1,80}", "a name of digits, small letters and hyphens")]
_Digits = Annotated[str, Text("[0-9a-f]{64}", "a text of 64 hexadecimal digits")]


@dataclass(frozen=True)
class Challenge:
    """First message of the driver on a connection. `challenge`: a random nonce for it alone, to which the peer's proof
    belongs, so that an overheard greeting is worth nothing on another connection."""

    challenge: _Digits


@dataclass(frozen=True)
class Hello:
    """Introduction of a member to the driver, with the proof for the driver's challenge and its own random `nonce` that
    it holds its token. `tiers`: cluster tiers of its node, from outer to inner, as NAME=VALUE."""

    number: Count
    node: Node
    pid: Annotated[int, Span(2, _PROCESSES)]  # never 0: the driver may kill this pid, and 0 is its own group
    nonce: _Digits
    proof: _Digits
    tiers: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class Greeting:
    """First message of a member on its connection to the driver."""

    hello: Hello


@dataclass(frozen=True)
class Welcome:
    """First message of the driver to a member. `welcome`: proof, for the same nonces, that the driver holds the
    member's token too; `payload`: plain data for every member."""

    welcome: _Digits
    payload: Any = None


@dataclass(frozen=True)
class Call:
    """Order of the driver to run a method of the worker. `call`: number of the call, which the answer repeats."""

    call: Count
    method: str
    args: list[object]


@dataclass(frozen=True)
class Ask:
    """Order of the driver to send a `Beat` for the call numbered `beat` at once."""

    beat: Count


@dataclass(frozen=True)
class Dump:
    """Order of the driver to write where the worker stands into the dump of this name."""

    dump: DumpName


@dataclass(frozen=True)
class Abort:
    """Order of the driver to make the worker's running call raise if it waits in a collective and that can be
    aborted."""

    abort: bool = True


@dataclass(frozen=True)
class Answer:
    """Result of the worker's method in the call numbered `answer`; `value` is left unread until the method is known."""

    answer: Count
    value: object


@dataclass(frozen=True)
class Raised:
    """Exception of the worker's method in the call numbered `answer`. `error`: its traceback as text; `refusal`: the
    lines of a ConfigError, "" for any other; `of_world`: it is a fault of the world (`is_external_fault`)."""

    answer: Count
    error: str
    refusal: str = ""
    of_world: bool = False


@dataclass(frozen=True)
class Beat:
    """Heartbeat of a worker during the call numbered `beat`, sent when the driver asks; `progress`: its current
    activity."""

    beat: Count
    progress: Activity


@dataclass(frozen=True)
class Dumped:
    """Answer of a worker that has written its part of the dump of this name, or has not, for the reason `why`."""

    dumped: DumpName
    why: str = ""


Order = Call | Ask | Dump | Abort  # from the driver
Said = Answer | Raised | Beat | Dumped  # from an admitted member


# Mutual authentication on the control channel: no secret travels on it, and each member has its own token.
#
# The driver has a key; member N of a session has the token HMAC(key, session, N). On a new connection the driver sends
# a nonce, its challenge. In its greeting a member proves that it holds its token, for that nonce and one that it chose;
# in the welcome the driver proves for the same two that it holds the same token. Each side thus knows its peer, and
# neither message can be replayed on another connection.

MEMBER, DRIVER = "member", "driver"  # which side a proof is from


def new_nonce() -> str:
    """Draw a random key, session or nonce for the authentication between driver and workers: 64 hexadecimal digits."""
    return secrets.token_hex(32)


def member_token(key: str, session: str, number: int) -> str:
    """Derive the secret token with which member `number` of a switchboard's `session` authenticates, from the run's
    `key`; its holder cannot derive another member's. 64 hexadecimal digits."""
    return _hmac_digest(key, "token", session, str(number))


def compute_proof(token: str, side: str, challenge: str, nonce: str) -> str:
    """Compute the proof that side `side` (MEMBER or DRIVER) of a control connection holds the member's token `token`,
    for the driver's `challenge` and a `nonce` that the member chose: 64 hexadecimal digits, sent in place of the
    token."""
    return _hmac_digest(token, side, challenge, nonce)


def is_same_proof(received: str, expected: str) -> bool:
    """Compare two proofs of a worker's or driver's secret, in constant time; `received`: any text, from the peer."""
    return hmac.compare_digest(received.encode("utf-8", "surrogatepass"), expected.encode())


def _hmac_digest(key: str, *words: str) -> str:
    """Return the HMAC-SHA256 under `key` of `words`, joined by NUL, to authenticate a worker: 64 hex digits."""
    return hmac.new(key.encode(), "\0".join(words).encode(), hashlib.sha256).hexdigest()


LIMIT = 1 << 28  # bytes of one message
READ_BYTES = 1 << 16  # small enough for malloc to reuse; a larger buffer would be mapped anew for each read
_HEADER = struct.Struct("!I")
_DIAL_SECONDS = 60.0  # how long to redial a driver whose backlog is full, and to wait for what it says
_NOT_THE_DRIVER = "who answers is not the driver"
_LOST_SECONDS = 20  # without any packet before the other machine is considered gone


class Garbled(Exception):
    """Signals that the other end of the connection violated the protocol."""


def encode_message(message: object) -> bytes:
    """Encode a message between driver and worker as a frame: length, then JSON text. Raises TypeError, ValueError."""
    return frame_payload(encode_json(message))


def encode_json(value: object) -> bytes:
    """Return a value as the JSON text that stands for it in a message between driver and worker: a dataclass as the map
    of its fields, a tuple as a list. Floats may be infinite or NaN. Raises TypeError for anything but such plain data.
    """
    return json.dumps(value, separators=(",", ":"), default=schema.encode_fields).encode()


def frame_payload(payload: bytes) -> bytes:
    """Put the length, 4 bytes, big-endian, before the JSON of a message to driver or worker. Raises ValueError."""
    if len(payload) > LIMIT:
        raise ValueError(f"a message of {len(payload)} bytes; {LIMIT} are allowed")
    return _HEADER.pack(len(payload)) + payload


def parse_message(kind: Any, message: object) -> Any:
    """Validate a decoded JSON message between driver and worker against `kind`, a dataclass in
    `platform.cluster.crew.channel` or a union of them, and return it as an object of that kind. Raises Garbled if it
    does not fit."""
    try:
        return schema.parse_value(kind, message)
    except Malformed as error:
        raise Garbled(f"no message: {error}") from None


class Unframer:
    """Cuts the bytes received on a control connection into JSON messages, each of at most `limit` bytes."""

    def __init__(self, limit: int = LIMIT):
        """Start to split the bytes from driver or worker into messages, each of at most `limit` bytes."""
        self.limit = limit
        self._buffer = bytearray()

    def split_messages(self, data: bytes) -> Iterator[dict[str, Any]]:
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
            yield _parse_json(payload)


def _parse_json(payload: bytearray) -> dict[str, Any]:
    """Parse the JSON text of one message between driver and worker. Raises Garbled if it is not a JSON object."""
    try:
        message = json.loads(payload.decode())
    except (ValueError, RecursionError) as error:
        raise Garbled(f"no JSON: {type(error).__name__}") from None
    if not isinstance(message, dict):
        raise Garbled("no JSON object")
    return message


def tune_connection(connection: socket.socket) -> None:
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
    """Worker's end of its connection to the driver. `send_frame` may be called from any thread, `receive_messages` from
    only one.

    Attributes:
        payload: plain data that the driver sends every member in its welcome.
    """

    def __init__(self, connection: socket.socket):
        """Wrap a worker's TCP connection to its driver."""
        self._connection, self._lock, self._frames = connection, threading.Lock(), Unframer()
        self.payload: Any = None

    def send_frame(self, frame: bytes) -> None:
        """Send the driver a frame that `encode_message` made. Raises OSError if the driver has hung up."""
        with self._lock:
            self._connection.sendall(frame)

    def receive_messages(self) -> Iterator[dict[str, Any]]:
        """Yield the driver's messages to its worker, unvalidated JSON, until it hangs up. Raises OSError, Garbled."""
        # what came in one read with the message that was the last to be taken
        yield from self._frames.split_messages(b"")
        while data := self._connection.recv(READ_BYTES):
            yield from self._frames.split_messages(data)

    @property
    def local_address(self) -> str:
        """Return the address of this worker's machine at which the driver, and so other workers, reach it."""
        address: str = self._connection.getsockname()[0]
        return address

    def close(self) -> None:
        """Close this worker's connection to the driver."""
        self._connection.close()


def connect_to_driver(
    address: tuple[str, int], token: str, number: int, node: str = "", tiers: Sequence[str] = ()
) -> Line:
    """Connect this worker process to the driver's switchboard at `address` (host, port) as member `number`, which holds
    the secret `token`; return the connection once the driver has admitted it. `node`: failure domain to report to the
    driver, "" = this machine's name; `tiers`: cluster tiers that it is in, outer to inner.

    Dials again if the connection is closed: a flood of unauthenticated connections may have pushed it out. Raises
    OSError if it is not admitted within a minute, PermissionError if the peer cannot prove that it is the driver.
    """
    deadline = monotonic() + _DIAL_SECONDS
    while True:
        try:
            return _exchange_greetings(socket.create_connection(address, timeout=10.0), token, number, node, tiers)
        except PermissionError:
            raise
        except (OSError, Garbled) as error:
            if monotonic() > deadline:
                raise OSError(f"the driver at {address[0]}:{address[1]} does not answer: {error}") from None
            sleep(0.2)


def _exchange_greetings(connection: socket.socket, token: str, number: int, node: str, tiers: Sequence[str]) -> Line:
    """Exchange challenge, greeting and welcome on a new connection to the driver, in which both sides prove that they
    hold the `token` of member `number`; return the connection as a Line. Closes the connection on any error."""
    line, nonce = Line(connection), new_nonce()
    try:
        connection.settimeout(_DIAL_SECONDS)  # whoever accepts and is silent is not waited for longer
        tune_connection(connection)
        challenge = _receive_greeting(line, Challenge).challenge
        proof = compute_proof(token, MEMBER, challenge, nonce)
        hello = Hello(number, node or socket.gethostname(), os.getpid(), nonce, proof, list(tiers))
        line.send_frame(encode_message(Greeting(hello)))
        welcome = _receive_greeting(line, Welcome)
        if not is_same_proof(welcome.welcome, compute_proof(token, DRIVER, challenge, nonce)):
            raise PermissionError(_NOT_THE_DRIVER)
        line.payload = welcome.payload
        connection.settimeout(None)
    except BaseException:
        line.close()
        raise
    return line


def _receive_greeting(line: Line, kind: Any) -> Any:
    """Return the driver's next message of the greeting. Raises OSError, or PermissionError unless it is a `kind`."""
    if (message := next(line.receive_messages(), None)) is None:
        raise ConnectionResetError("it hung up")
    try:
        return schema.parse_value(kind, message)
    except Malformed:
        raise PermissionError(_NOT_THE_DRIVER) from None


_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_INET6 = Path("/proc/net/if_inet6")
_SCOPES = ("00", "10")  # there: of global addresses and of loopback; addresses of a link would need a zone


def find_interface(address: str) -> str:
    """Return this machine's network interface with the IPv4 or IPv6 `address`, for workers to use; "" for none."""
    plain_address = address.rpartition(":")[2] if "." in address else address  # an IPv4 address in IPv6's form
    names = {known: name for name, known in reversed([*list_addresses(4), *list_addresses(6)])}
    return names.get(plain_address, "")


def list_addresses(version: int) -> list[tuple[str, str]]:
    """Return (interface, routable address of an IP version) of this machine, for driver and workers; loopback last."""
    pairs = _list_ipv4() if version == 4 else _list_ipv6(_INET6)
    return sorted(pairs, key=lambda pair: pair[0] == "lo")


def _list_ipv4() -> list[tuple[str, str]]:
    """Return (interface, address) of this machine's network interfaces with an IPv4 address, for workers to use."""
    pairs = []
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                pairs.append((name, socket.inet_ntoa(answer[20:24])))
    return pairs


def _list_ipv6(table: Path) -> list[tuple[str, str]]:
    """Return (network interface, IPv6 address), global ones and loopback, from the kernel's table (_INET6)."""
    with suppress(OSError):
        rows = [line.split() for line in table.read_text().splitlines()]
        return [(row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))) for row in rows if row[3] in _SCOPES]
    return []

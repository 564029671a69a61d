"""Fuzz the driver's listener: an attempt is what one stranger, or one member out of its mind, sends. A true member is
served during each, nobody hears of the stranger, and of its connection nothing is left."""

from __future__ import annotations

import json
import os
import random
import socket
import string
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from time import monotonic
from typing import Any, NamedTuple

from platform.cluster.crew import channel, switchboard
from platform.cluster.crew.channel import Answer, Hello, Unframer, encode_message
from platform.cluster.crew.switchboard import WorkerSwitchboard

MEMBER = 0  # who is served all the while
EXPECTED = range(1, 9)  # for whom the driver waits, and who never comes
LIMIT = 4096  # bytes of a stranger's message
STRANGERS = 64  # at a time; fewer than by default, so that floods pass it
SILENT = 30  # strangers that are left connected and say nothing
GROWN = 24 << 20  # bytes that the process may grow by, whatever the count: caches of the interpreter and allocator
SETTLED = 2000  # attempts after which its size is taken
PATIENCE = 30.0  # seconds for what takes microseconds; only a failure waits so long

CUT, HELD = "cut", "held"  # what the driver is to do: hang up; wait for the rest


def framed(payload: bytes) -> bytes:
    return struct.pack("!I", len(payload)) + payload


def verdict(data: bytes) -> str:
    """What the protocol says of a stranger that has sent this and is no member."""
    if len(data) < 4:
        return HELD
    (length,) = struct.unpack_from("!I", data)
    return HELD if length <= LIMIT and len(data) - 4 < length else CUT


# What strangers send. Each takes the draw, and the connection that it is for.


def of_bytes(draw: random.Random, to: Target) -> bytes:
    return draw.randbytes(draw.choice((1, 3, 4, 5, 64, 3000)))


def of_protocols(draw: random.Random, to: Target) -> bytes:
    lines = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"SSH-2.0-x\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"PING\r\n",
        b"\0" * 90,
    ]
    return draw.choice(lines) * draw.randint(1, 9)


def text(draw: random.Random) -> str:
    kinds = (string.printable, "\ud800\udfff\ud8ff", "é世\U0001f600", "\0\n\r\x1b")
    return "".join(draw.choices(draw.choice(kinds), k=draw.randint(0, 12)))


def number(draw: random.Random) -> Any:
    huge = 10 ** draw.randint(1, 900)
    return draw.choice((True, False, None, -1, 0.0, 1.0, 1e308, float("nan"), float("inf"), huge, -huge, 2**63, "1"))


def value(draw: random.Random, depth: int = 3) -> Any:
    kind = draw.randrange(6 if depth else 4)
    if kind < 2:
        return number(draw)
    if kind < 4:
        return text(draw)
    if kind == 4:
        return [value(draw, depth - 1) for _ in range(draw.randint(0, 4))]
    keys = ("hello", "number", "token", "answer", "beat", "call", "welcome", text(draw))
    return {draw.choice(keys): value(draw, depth - 1) for _ in range(draw.randint(0, 4))}


def of_json(draw: random.Random, to: Target) -> bytes:
    return framed(json.dumps(value(draw)).encode()[:LIMIT])


class Target(NamedTuple):
    """A connection to the listener, as who is to say something on it knows it."""

    board: WorkerSwitchboard
    challenge: str


def greeting(to: Target, claimed: int, token: str | None = None, **changes: Any) -> bytes:
    """A greeting, with the token of the claimed number unless another is given."""
    nonce, token = channel.new_nonce(), to.board.member_token(claimed) if token is None else token
    fields = {"number": claimed, "node": "here", "pid": os.getpid(), "nonce": nonce}
    fields["proof"] = channel.compute_proof(token, channel.MEMBER, to.challenge, nonce)
    return framed(json.dumps({"hello": fields | changes}).encode())


def of_fields(draw: random.Random, to: Target) -> bytes:
    """A true greeting but for one field, which no member has so."""
    claimed = draw.choice(EXPECTED)
    field = draw.choice(("nonce", "proof", "pid", "node", "number", "more"))
    wrong = {"node": [value(draw)], "pid": -draw.randint(0, 9)}.get(field, value(draw))
    return greeting(to, claimed, **{field: wrong})


def of_surrogates(draw: random.Random, to: Target) -> bytes:
    claimed, lone = draw.choice(EXPECTED), draw.choice(("\ud800", "\udc00\ud800", "a\udfff"))
    if draw.random() < 0.3:  # as bytes that are no UTF-8
        return framed(json.dumps({"hello": {"token": lone}}, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    if draw.random() < 0.3:
        return framed(json.dumps({"hello": {"token": lone, "number": claimed}}).encode())
    field = draw.choice(("nonce", "proof", "node", "number", lone))
    return greeting(to, claimed, **{field: lone})


def of_numbers(draw: random.Random, to: Target) -> bytes:
    return greeting(to, 1, number=number(draw))


def of_depth(draw: random.Random, to: Target) -> bytes:
    deep = draw.randint(50, 800)
    payload = draw.choice((b"[" * 4000, b'{"hello":' * 400, b'{"hello":' + b"[" * deep + b"]" * deep + b"}"))
    return framed(payload)


def of_size(draw: random.Random, to: Target) -> bytes:
    length = draw.choice((LIMIT + 1, 1 << 16, 1 << 28, (1 << 28) + 1, 0xFFFFFFFF, draw.randint(LIMIT + 1, 2**32 - 1)))
    return struct.pack("!I", length) + draw.randbytes(draw.choice((0, 1, 1000)))


def of_emptiness(draw: random.Random, to: Target) -> bytes:
    return framed(draw.choice((b"", b" ", b"\0", b"{}", b"[]", b"null"))) * draw.randint(1, 3)


def of_parts(draw: random.Random, to: Target) -> bytes:
    """The beginning of a true greeting: the rest never comes."""
    claimed = draw.choice(EXPECTED)
    whole = greeting(to, claimed)
    return whole[: draw.randint(1, len(whole) - 1)]


def of_claims(draw: random.Random, to: Target) -> bytes:
    """One member's token for another's number."""
    own, other = draw.sample(EXPECTED, 2)
    return greeting(to, other, to.board.member_token(own))


def of_nobody(draw: random.Random, to: Target) -> bytes:
    """The true token of who is not expected: not yet, or not any more."""
    claimed = draw.choice((MEMBER, draw.randint(100, 10**6)))
    return greeting(to, claimed)


def of_guesses(draw: random.Random, to: Target) -> bytes:
    other = channel.member_token(to.board.session, to.board.session, 1)
    return greeting(to, draw.choice(EXPECTED), draw.choice((channel.new_nonce(), "", other)))


Claim = Callable[[random.Random, Target], bytes]
CLAIMS: dict[str, Claim] = {
    "bytes": of_bytes,
    "other protocols": of_protocols,
    "any JSON": of_json,
    "a wrong field": of_fields,
    "surrogates": of_surrogates,
    "numbers that are none": of_numbers,
    "deep": of_depth,
    "oversized": of_size,
    "empty": of_emptiness,
    "the rest never comes": of_parts,
    "another's number": of_claims,
    "nobody's number": of_nobody,
    "guessed tokens": of_guesses,
}

NONSENSE = (  # what no member says
    {"answer": True, "value": 1},
    {"answer": 1},
    {"answer": 1, "error": ["x"]},
    {"beat": 1, "progress": {"call": "", "section": "", "seconds": "1", "waiting": False}},
    {"beat": 1, "progress": {"call": "", "section": "", "seconds": -1e999, "waiting": False}},
    {"hello": {"node": 1}},
    {},
)


class Listener:
    """A switchboard with its one true member, and strangers that come and go."""

    def __init__(self, board: WorkerSwitchboard):
        self.board, self.count, self.size, self.late = board, 0, 0, 1000
        self.silent: deque[socket.socket] = deque()
        board.expect_members([MEMBER])
        self.member, to = self.knock()
        self.member.sendall(greeting(to, MEMBER))
        assert self.events(1)[0][0] == MEMBER
        board.expect_members(EXPECTED)
        self.files = len(os.listdir("/proc/self/fd"))

    def connect(self) -> socket.socket:
        source = f"127.0.0.{1 + self.count % 250}", 0  # ports are few: those of the last minute are not given again
        connection = socket.create_connection(self.board.address, source_address=source)
        connection.settimeout(PATIENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # pieces leave at once
        return connection

    def knock(self) -> tuple[socket.socket, Target]:
        """A connection whose challenge has been read."""
        connection, frames, deadline = self.connect(), Unframer(), monotonic() + PATIENCE
        connection.setblocking(False)
        while monotonic() < deadline:
            assert self.board.poll_events(0) == []
            with suppress(BlockingIOError):
                for said in frames.split_messages(connection.recv(LIMIT)):
                    connection.settimeout(PATIENCE)
                    return connection, Target(self.board, said["challenge"])
        raise AssertionError("no challenge")

    def events(self, count: int) -> list[Any]:
        heard, deadline = [], monotonic() + PATIENCE
        while len(heard) < count and monotonic() < deadline:
            heard += self.board.poll_events(0.05)
        assert len(heard) == count, f"the driver has heard {heard}"
        return heard

    def attempt(self, seed: int) -> str:
        draw = random.Random(seed)
        name = draw.choices(CLASSES, WEIGHTS)[0]
        if name in CLAIMS:
            self.stranger(CLAIMS[name], draw, pieces=draw.choice((1, 1, 1, 2, 3)))
        else:
            OTHERS[name](self, draw)
        self.count += 1
        self.serve()
        self.nothing_left(len(self.silent))
        return name

    def serve(self) -> None:
        """The member's message arrives, and no other."""
        said = Answer(self.count, None)
        self.member.sendall(encode_message(said))
        assert self.events(1) == [(MEMBER, said)]

    def stranger(self, claim: Claim, draw: random.Random, pieces: int) -> None:
        connection, to = self.knock()
        with connection:
            data, before = claim(draw, to), self.board.refused
            cuts = sorted(draw.randint(0, len(data)) for _ in range(pieces - 1))
            with suppress(ConnectionError):  # the driver has heard enough
                for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                    connection.sendall(data[start:end])
                    assert self.board.poll_events(0) == []
            if verdict(data) == CUT:
                self.until(lambda: ended(connection), "it is not cut off")
                assert self.board.refused == before + 1
            else:
                assert self.board.poll_events(0) == [] and not ended(connection), (
                    "hung up on before the message was whole"
                )

    def until(self, done: Callable[[], bool], late: str) -> None:
        """Let the driver go on until `done`, while nobody hears of it."""
        deadline = monotonic() + PATIENCE
        while not done():
            assert self.board.poll_events(0) == [], "somebody has heard of it"
            assert monotonic() < deadline, late

    def nothing_left(self, silent: int) -> None:
        self.until(lambda: len(self.board._strangers) <= silent, "strangers that are gone are kept")
        if self.count % 500 == 0:
            open_now = len(os.listdir("/proc/self/fd")) - 2 * silent
            assert open_now <= self.files, f"{open_now - self.files} descriptors are left"
            size = resident()
            if self.count <= SETTLED:
                self.size = size
            assert size - self.size < GROWN, f"grown by {size - self.size:,} bytes after {self.count} attempts"

    # classes in which more happens than that one stranger sends something

    def drip(self, draw: random.Random) -> None:
        self.stranger(lambda draw, to: of_fields(draw, to)[:60], draw, pieces=60)

    def silence(self, draw: random.Random) -> None:
        """Connects, and says nothing for as long as others are quicker."""
        self.silent.append(self.connect())
        self.board.poll_events(0)
        if len(self.silent) > SILENT:
            self.silent.popleft().close()

    def reset(self, draw: random.Random) -> None:
        connection = self.connect()
        connection.sendall(draw.randbytes(draw.choice((1, 3))))
        if draw.random() < 0.5:
            self.board.poll_events(0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    def flood(self, draw: random.Random) -> None:
        """More at once than there may be; the member is served in their midst."""
        crowd = [self.connect() for _ in range(STRANGERS + draw.randint(1, 40))]
        for connection in draw.sample(crowd, 20):
            connection.sendall(
                draw.choice(list(CLAIMS.values()))(draw, Target(self.board, channel.new_nonce()))[:LIMIT]
            )
        self.serve()
        assert len(self.board._strangers) <= STRANGERS
        for connection in [*crowd, *self.silent]:
            connection.close()
        self.silent.clear()

    def true_in_pieces(self, draw: random.Random) -> None:
        """A member that comes late and by bytes, and has said something before it is welcome."""
        connection, own = self.admitted(draw, draw.randint(1, 40), encode_message({"answer": 0, "value": "é"}))
        connection.close()
        assert self.events(1) == [(own, None)]

    def replay(self, draw: random.Random) -> None:
        """A true greeting, which somebody has overheard and sends first, and once more."""
        self.late += 1
        own, (connection, to) = self.late, self.knock()
        self.board.expect_members([own])
        data = greeting(to, own)
        with connection:
            self.stranger(lambda draw, other: data, draw, pieces=1)
            connection.sendall(data)
            assert [number for number, _ in self.events(1)] == [own]
            self.stranger(lambda draw, other: data, draw, pieces=1)
        assert self.events(1) == [(own, None)]

    def nonsense(self, draw: random.Random) -> None:
        """A member that says what no member says: it is lost, and nobody else."""
        garbage = [encode_message(draw.choice(NONSENSE)), framed(draw.randbytes(30)), struct.pack("!I", 0xFFFFFFFF)]
        connection, own = self.admitted(draw, 1, b"")
        with connection:
            connection.sendall(draw.choice(garbage))
            assert self.events(1) == [(own, None)]

    def admitted(self, draw: random.Random, pieces: int, more: bytes) -> tuple[socket.socket, int]:
        self.late += 1
        own, board = self.late, self.board
        board.expect_members([own])
        connection, to = self.knock()
        data = greeting(to, own) + more
        cuts, heard = sorted(draw.randint(0, len(data)) for _ in range(pieces - 1)), []
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            connection.sendall(data[start:end])
            heard += board.poll_events(0)
        heard += self.events(1 + bool(more) - len(heard))
        assert [number for number, _ in heard] == [own] * len(heard) and isinstance(heard[0][1], Hello)
        connection.recv(LIMIT)  # its welcome
        return connection, own


OTHERS = {
    "drip": Listener.drip,
    "silence": Listener.silence,
    "reset": Listener.reset,
    "flood": Listener.flood,
    "overheard": Listener.replay,
    "a true member in pieces": Listener.true_in_pieces,
    "a member's nonsense": Listener.nonsense,
}
CLASSES = [*CLAIMS, *OTHERS]
WEIGHTS = [5 if name == "flood" else 100 for name in CLASSES]  # a flood is a hundred strangers


def ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        connection.settimeout(PATIENCE)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def opened() -> Iterator[Callable[[int], str]]:
    before, switchboard._STRANGERS = switchboard._STRANGERS, STRANGERS
    try:
        with closing(WorkerSwitchboard("127.0.0.1")) as board:
            listener = Listener(board)
            yield listener.attempt
            listener.member.close()
            for connection in listener.silent:
                connection.close()
    finally:
        switchboard._STRANGERS = before

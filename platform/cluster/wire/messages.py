"""Messages of the control channel. On the wire each one is the map of its fields, whose names identify its kind; any
other message is garbled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from platform.boundary.schema import Count, Malformed, Span, Text, shown
from platform.parallel.communicator.progress import Activity

_PROCESSES = 1 << 22  # upper bound of Linux process ids


class Printable(NamedTuple):
    """Bound on a string in a message: all of its characters are printable, and there are `most` at most."""

    most: int

    def check(self, value: str) -> None:
        """Raise Malformed if a text in a worker's message is not printable or longer than `most` characters."""
        if len(value) > self.most or not value.isprintable():
            raise Malformed(f"{shown(value)} is no printable text of at most {self.most} characters")


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
    lines of a ConfigError, "" for any other."""

    answer: Count
    error: str
    refusal: str = ""


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

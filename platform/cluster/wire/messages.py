"""Messages of the control channel. On the wire each one is the map of its fields, and the names of these tell messages
apart; any other message is garbled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from platform.boundary.schema import Count, Malformed, Span, Text, shown
from platform.parallel.communicator.progress import Activity

_PROCESSES = 1 << 22  # upper bound of Linux process ids


class Printable(NamedTuple):
    """Bound on a string: all of its characters are printable, and there are `most` at most."""

    most: int

    def check(self, value: str) -> None:
        """Raise Malformed for any other string."""
        if len(value) > self.most or not value.isprintable():
            raise Malformed(f"{shown(value)} is no printable text of at most {self.most} characters")


Node = Annotated[str, Printable(512)]
_Digits = Annotated[str, Text("[0-9a-f]{64}", "a text of 64 hexadecimal digits")]


@dataclass(frozen=True)
class Hello:
    """Introduction of a member, with the proof for its own `nonce` that it holds its token."""

    number: Count
    node: Node
    pid: Annotated[int, Span(2, _PROCESSES)]  # never 0: the driver may kill this pid, and 0 is its own group
    nonce: _Digits
    proof: _Digits


@dataclass(frozen=True)
class Greeting:
    """First message of a member."""

    hello: Hello


@dataclass(frozen=True)
class Welcome:
    """First message of the driver: its own proof for the member's nonce, and what it tells every member."""

    welcome: _Digits
    told: Any = None


@dataclass(frozen=True)
class Call:
    """Order to run a method of the worker. `call`: its number, which the answer names."""

    call: Count
    method: str
    args: list[object]


@dataclass(frozen=True)
class Ask:
    """Order to send a `Beat` for the call of this number at once."""

    beat: Count


@dataclass(frozen=True)
class Abort:
    """Order to make a call that waits in a collective raise, if it can."""

    abort: bool = True


@dataclass(frozen=True)
class Answer:
    """Result of the call numbered `answer`; it is left unread until the method is known."""

    answer: Count
    value: object


@dataclass(frozen=True)
class Raised:
    """Traceback of the call numbered `answer`."""

    answer: Count
    error: str


@dataclass(frozen=True)
class Beat:
    """Sign of life during the call numbered `beat`."""

    beat: Count
    progress: Activity


Order = Call | Ask | Abort  # from the driver
Said = Answer | Raised | Beat  # from an admitted member

"""Declaration of a key at its field: type, default, legal values and one line of guidance, each said there alone; and
the parsers for durations that users type: `checkpoint.every=30m`, `run.time_limit=1:30:00`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from math import inf
from operator import attrgetter
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from platform.boundary.refusals import format_value, format_violation
from platform.boundary.schema import LARGEST

WORKERS = 10**6  # most workers in a mesh, and along each of its axes
_BOUND = r"(>=|>|<=|<) [-+]?(inf|[0-9]+(\.[0-9]*)?(e[-+]?[0-9]+)?)"
_BOUNDS = re.compile(rf"({_BOUND}( and {_BOUND})*)?")
SECONDS = 10**8  # longest duration (three years): clocks and timers take no more


@dataclass(frozen=True)
class Key:
    """Declaration of a configuration key: guidance for the user, and its legal values by itself; in a list or map, of
    each value in it.

    `platform.config.fields` refuses other values, `platform.config.reference` prints the rest for people.
    """

    guidance: str  # one line: what the key means, in which unit, and what 0 or "" stands for
    bounds: str = ""  # of a number, as the user reads it: ">= 0 and < 1"
    most: float = 10**12  # upper limit of a number whose bounds have none: beyond it memory, clocks or time run out
    choices: tuple[Any, ...] = ()  # all legal values, without names that a user's module registers
    open: bool = False  # a module named in `extend` may register another choice
    pattern: str = ""  # regular expression that all of a text must match
    constraint: str = ""  # pattern, or rule of `platform.config`, in words
    path: tuple[str, ...] | None = None  # words that may stand in place of the path or URL that it is; None: it is none
    planned: bool = False  # planning reads it
    read_if: Callable[[Any], Any] | None = None  # whether anything reads it, by the configuration; None: always
    left_open: int = 0  # place in `plan.search` of a key that the planner may choose; 0 = it never does
    # on resume: "fixed", in a mixture's source too if "share"; "free" if `resume.allow` says so; "" or "none": always
    identity: Literal["", "fixed", "share", "free", "none"] = ""

    def __post_init__(self) -> None:
        """Raise ValueError for a declaration of a key, or of a user's own setting, that no value could be held to."""
        if not (isinstance(self.bounds, str) and _BOUNDS.fullmatch(self.bounds)):
            raise ValueError(f'{self.bounds!r} are no bounds: they are such as ">= 0 and < 1", and choices are a tuple')
        try:
            re.compile(self.pattern)
        except (re.error, TypeError) as error:
            raise ValueError(f"pattern={self.pattern!r}: {error}") from None

    def describe_legal_values(self) -> str:
        """Describe the legal values of a configuration key to a user, such as "1 to 1,000" or "adamw, or a registered
        name"; "" if every value of the type is legal."""
        if self.choices:
            names = [format_value(choice) or '""' for choice in self.choices]
            return ", ".join(names) + (", or a registered name" if self.open else "")
        if self.constraint or self.most == Key.most:
            return self.constraint.removeprefix("must be ") or self.bounds
        least = self.bounds.removesuffix(" and < inf")
        most = f"{self.most:,}".removesuffix(".0")
        return f"{least[3:]} to {most}" if least.startswith(">=") else f"{least} and <= {most}"


def key(default: Any, guidance: str, legal: str | tuple[Any, ...] = "", **more: Any) -> Any:
    """Make the dataclass field that declares a configuration key: its default, and its `Key` as metadata. Each Config
    gets a copy of a default list or map.

    `legal` gives the choices as a tuple, or the bounds of a number as a text; `more` the other fields of the `Key`.
    """
    legal_fields: dict[str, Any] = {"choices": legal} if isinstance(legal, tuple) else {"bounds": legal}
    metadata = {"key": Key(guidance, **legal_fields, **more)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


free_key = partial(key, identity="free")  # on resume it changes if `resume.allow` says so
fixed_key = partial(key, identity="fixed")  # on resume it never changes


def violation_of_key(config: Any, key: str, constraint: str, legal: Iterable[Any] = ()) -> str:
    """Return the refusal line of configuration key `key`: `constraint` says why, `legal` are values to suggest."""
    return format_violation(key, attrgetter(key)(config), constraint, legal)


def declare_user_settings_key(what: str, **more: Any) -> Any:
    """Make the field of the key that configures a user's `what`: see `platform.config.extensions`, and `key`."""
    constraint = "what its dataclass declares"
    return key({}, f"settings of a {what} of your own, by name", most=LARGEST, constraint=constraint, **more)


WORDS = {  # type of a scalar -> it in words
    str: "text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
    Any: "texts, numbers, lists and maps",
}


def describe_type(hint: Any) -> str:
    """Describe the type of a configuration key to a user: "an integer", "a list, each of it text"."""
    if get_origin(hint) is list:
        return "a list, each of it " + describe_type(get_args(hint)[0])
    if get_origin(hint) is dict:
        return "keys with values"
    return WORDS.get(hint) or " or ".join(map(describe_type, get_args(hint)))


RHYTHM = "a number of steps, or a duration like 45s, 30m or 1h30m"
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}  # seconds
_DURATION = re.compile(r" *".join(rf"(?:([0-9]+(?:\.[0-9]+)?){unit})?" for unit in _UNITS))


def parse_rhythm(interval: int | str) -> tuple[int, float]:
    """Parse the configuration key `checkpoint.every`, a number of steps or a duration such as 1h30m, into (steps,
    seconds), at least one of them 0. Raises ValueError if it is neither."""
    if isinstance(interval, int) or re.fullmatch(r"[0-9]+", interval):
        if (steps := int(interval)) < 0:
            raise ValueError(interval)
        return steps, 0.0
    duration_match = _DURATION.fullmatch(interval.strip())
    amounts = [float(number or 0) for number in duration_match.groups()] if duration_match else []
    seconds = sum(n * unit for n, unit in zip(amounts, _UNITS.values(), strict=False))
    if not 0 < seconds < inf:
        raise ValueError(interval)
    return 0, seconds


def format_duration(seconds: float) -> str:
    """Format seconds as a key's value for a duration, such as 45s, 14m or 1h30m, to a minute from two minutes on."""
    if seconds < 120:
        return f"{max(1, round(seconds))}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes else "")


def suggest_rhythms(interval: str) -> list[str]:
    """Return legal values to suggest for a malformed key `checkpoint.every`: its first number as steps, as minutes."""
    number_match = re.search(r"[0-9]{1,9}", interval)
    number = int(number_match[0]) if number_match else 30
    return [str(number), f"{number or 1}m"]


def parse_duration(duration: str) -> float:
    """Parse a duration that a configuration gives in seconds, M:SS or H:MM:SS, as `run.time_limit` takes it, into
    seconds: 90, 1:30 and 0:01:30 are 90; "" is 0. Raises ValueError for any other form."""
    parts = duration.split(":") if duration else ["0"]
    numbers = [float(number_text) for number_text in parts]
    seconds = sum(n * 60**i for i, n in enumerate(reversed(numbers)))
    if len(parts) > 3 or not all(0 <= n < inf for n in numbers):
        raise ValueError(duration)
    return seconds


def format_hms(seconds: int) -> str:
    """Format seconds as H:MM:SS, one of the forms of a key's duration, such as run.time_limit."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

"""Declaration of a key at its field: type, default, legal values and one line of guidance, each said there alone."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from operator import attrgetter
from types import NoneType
from typing import Any, get_args, get_origin

from platform.boundary.refusals import in_words, violation
from platform.boundary.schema import LARGEST

WORKERS = 10**6  # most workers in a mesh, and along each of its axes
SECONDS = 10**8  # longest duration (three years): clocks and timers take no more


@dataclass(frozen=True)
class Key:
    """Declaration of a configuration key: guidance for the user, and its legal values by itself; in a list or map, of
    each value in it.

    `platform.config.bounds` refuses other values, `platform.config.reference` prints the rest for people.
    """

    guidance: str  # one line: what the key means, in which unit, and what 0 or "" stands for
    bounds: str = ""  # of a number, as the user reads it: ">= 0 and < 1"
    most: float = 10**12  # upper limit of a number whose bounds have none: beyond it memory, clocks or time run out
    choices: tuple[Any, ...] = ()  # all legal values, without names that a user's module registers
    open: bool = False  # a module named in `extend` may register another choice
    pattern: str = ""  # regular expression that all of a text must match
    constraint: str = ""  # pattern, or rule of `platform.config.rules`, in words

    def legal(self) -> str:
        """Describe the legal values of a configuration key to a user, such as "1 to 1,000" or "adamw, or a registered
        name"; "" if every value of the type is legal."""
        if self.choices:
            names = [in_words(choice) or '""' for choice in self.choices]
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
    said: dict[str, Any] = {"choices": legal} if isinstance(legal, tuple) else {"bounds": legal}
    metadata = {"key": Key(guidance, **said, **more)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def refused(config: Any, key: str, constraint: str, legal: Iterable[Any] = ()) -> str:
    """Return the refusal line of configuration key `key`: `constraint` says why, `legal` are values to suggest."""
    return violation(key, attrgetter(key)(config), constraint, legal)


def own_settings(what: str) -> Any:
    """Make the field of the key that configures a user's `what`: see `platform.config.extending.own_settings`."""
    constraint = "what its dataclass declares"
    return key({}, f"settings of a {what} of your own, by name", most=LARGEST, constraint=constraint)


WORDS = {  # type of a scalar -> it in words
    str: "text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
    Any: "texts, numbers, lists and maps",
}


def type_in_words(hint: Any) -> str:
    """Describe the type of a configuration key to a user: "an integer", "a list, each of it text"."""
    if get_origin(hint) is list:
        return "a list, each of it " + type_in_words(get_args(hint)[0])
    if get_origin(hint) is dict:
        return "keys with values"
    return WORDS.get(hint) or " or ".join(map(type_in_words, get_args(hint)))

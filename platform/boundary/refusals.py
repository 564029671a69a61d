"""Refusals of a user's mistakes: one line each, with key, value, constraint and the nearest legal values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from platform.boundary.terminal import one_refusal, printable

NEAREST = "; nearest legal: "  # between a refusal's constraint and its hints
SHOWN = 300  # most characters of a value in a line for the user


class ConfigError(ValueError):
    """Refusal for a user's mistakes, in the configuration or in the files it names; `violations` holds one line for
    each: key, value, constraint and the nearest legal values."""

    def __init__(self, violations: Sequence[str] | str):
        """Construct the refusal of a user's mistakes from one line or several, each made printable."""
        given = [violations] if isinstance(violations, str) else violations
        self.violations = [one_refusal(v) for v in given]
        super().__init__("\n".join(self.violations))


def refuse_all(lines: Iterable[str]) -> None:
    """Raise ConfigError with the lines that refuse a user's mistakes, each once, if there are any."""
    if found := list(dict.fromkeys(lines)):
        raise ConfigError(found)


def behind(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, then the one it was raised from or while handling, and so on, to find a refusal in it."""
    one: BaseException | None = error
    while one:
        yield one
        one = one.__cause__ or one.__context__


def refusal_in(error: BaseException) -> str:
    """Return the lines of the ConfigError that an exception is or was raised from; "" if none, or with an OSError."""
    if any(isinstance(one, OSError) for one in behind(error)):  # a disk or the network may do well elsewhere
        return ""
    return next((str(one) for one in behind(error) if isinstance(one, ConfigError)), "")


def violation(key: str, value: Any, constraint: str, legal: Iterable[Any] = ()) -> str:
    """Format a refused value of a configuration key as one printable line for the user: "KEY=VALUE: constraint; nearest
    legal: a, b". A value of more than SHOWN (300) characters is cut."""
    given, *names = [in_words(value), *(in_words(v) or "''" for v in legal)]
    if len(given) > SHOWN:
        given = f"{given[:SHOWN]}... ({len(given)} characters)"
    return printable(f"{key}={given}: {constraint}" + (f"{NEAREST}{', '.join(names)}" if names else ""))


@contextmanager
def as_refusal(key: str, value: Any, *failures: type[Exception], why: str = "{}") -> Iterator[None]:
    """Raise ConfigError, for a configuration key's value, in place of `failures` in the context; `why`: its text."""
    try:
        yield
    except failures as error:
        raise ConfigError(violation(key, value, why.format(error))) from None


@contextmanager
def rephrasing(change: Callable[[str], str]) -> Iterator[None]:
    """Apply `change` to each line that refuses a user's mistake, in a ConfigError raised within the context."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([*map(change, error.violations)]) from None


def in_words(value: Any) -> str:
    """Return a refused or legal value of the configuration as a user writes it: true and false in lower case."""
    try:
        return str(value).lower() if isinstance(value, bool) else str(value)
    except (ValueError, RecursionError):  # integers of thousands of digits
        return f"a very large {type(value).__name__}"


def closest(value: Any, legal: Iterable[Any]) -> list[Any]:
    """Return a configuration key's legal values, nearest to a refused `value` first: three integers, or all names."""
    values = list(legal)
    if all(type(v) is int for v in (value, *values)):
        return sorted(values, key=lambda v: (abs(v - value), v))[:3]
    names = {str(v): v for v in values}
    similar = get_close_matches(str(value), names, n=3, cutoff=0.5)
    return [names[n] for n in dict.fromkeys([*similar, *names])]

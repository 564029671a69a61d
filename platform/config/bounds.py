"""Legal values of each key by itself, as its field declares them, and the names that a user's module registers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import inf
from operator import attrgetter, ge, gt, le, lt
from typing import Any
from unicodedata import category

from platform.boundary.refusals import ConfigError, closest, violation
from platform.config.fields import Config, key_fields, violations_of_types
from platform.config.key import Key

KEYS: dict[str, Key] = {name: f.metadata["key"] for name, f in key_fields().items()}
_OURS = {name: legal.choices for name, legal in KEYS.items()}
_NAME = r"\w[\w.-]*"  # of what a user's module registers
LONGEST = 10_000  # most characters in one text


def allow(key: str, value: Any, *functions: Any) -> None:
    """Add `value`, such as a model's name, to the legal choices of a configuration key, such as "model.kind", when a
    user's module (named in `extend`) registers it with some `functions`. Raises ConfigError for a value that is no
    name, for a name of ours, and for a function that cannot be called."""
    if not isinstance(value, str) or not re.fullmatch(_NAME, value):
        raise ConfigError(violation(key, value, "no name to register: letters, digits, _, - and . are legal"))
    if value in _OURS[key]:
        raise ConfigError(violation(key, value, "is built in; register another name", [f"own_{value}"]))
    for function in functions:
        if not callable(function):
            reason = f"is registered with a {type(function).__name__}, where a function or a class is needed"
            raise ConfigError(violation(key, value, reason))
    KEYS[key] = replace(KEYS[key], choices=tuple(dict.fromkeys((*KEYS[key].choices, value))))


def flat_values(config: Config) -> dict[str, Any]:
    """Return every key of a configuration with its value, flat: {"seed": 0, "train.steps": 100, ...}."""
    return {key: attrgetter(key)(config) for key in KEYS}


def set_value(config: Config, key: str, value: Any) -> None:
    """Set the value of a key of a configuration's group, or of a mixture's source, data.sources.NAME.KEY, in place."""
    group, _, name = key.rpartition(".")
    source = group.removeprefix("data.sources.")
    place = vars(getattr(config, group)) if source == group else config.data.sources[source]
    place[name] = value


def violations_of_values(config: Config) -> dict[str, list[str]]:
    """Return the configuration keys whose values are illegal by themselves (type, choice, bounds, characters), each
    with one refusal line per mistake. Rules that relate keys are in `platform.config.checks`."""
    found = violations_of_types(config)
    if any(key not in KEYS for key in found):  # groups of keys are missing
        return found
    lines = {k: found.get(k) or [*violations_of_value(k, attrgetter(k)(config), legal)] for k, legal in KEYS.items()}
    return {key: wrong for key, wrong in lines.items() if wrong}


def impossible_values(config: Config) -> list[str]:
    """Return the refusal lines of a configuration's illegal values, in the order in which the keys are declared."""
    return [line for lines in violations_of_values(config).values() for line in lines]


def violations_of_value(key: str, value: Any, legal: Key) -> Iterator[str]:
    """Yield a refusal line per mistake in the value of one key, declared by `legal`: no legal choice, or else each
    number out of bounds and each illegal text in it."""
    if legal.choices and value not in legal.choices:
        yield violation(key, value, "unknown", closest(value, legal.choices))
        return
    for name, part in _scalars(value):
        where = f"{key}.{name}".rstrip(".")
        if isinstance(part, str):
            yield from _violations_of_text(where if isinstance(value, Mapping) else key, legal, part)
        elif type(part) in (int, float):
            yield from _violations_of_number(where, legal, part)


def _scalars(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (place, part) for every scalar nested in the value of a configuration key, so that each is checked. `name`
    is the place of `value` itself: names in maps and indices in lists joined by dots, such as "rows.0". Texts that are
    names in a map are yielded too, with the place ""."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from ((("", key),) if isinstance(key, str) else ())
            yield from _scalars(part, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _scalars(part, f"{name}.{number}".lstrip("."))
    else:
        yield name, value


def _violations_of_number(where: str, legal: Key, number: float) -> Iterator[str]:
    """Yield a refusal line if a number breaks the bounds that its key declares (`legal`); `where` is the key with the
    number's place in its value, such as "tensor.axes.t"."""
    bounds, most = legal.bounds, legal.most
    broken = [b for b in bounds.split(" and ") if bounds and not _holds(number, *b.split())]
    if broken:
        default = [value] if (value := flat_values(Config()).get(where)) is not None else []
        nearest = broken[0].split()[1:] if "=" in broken[0] else default  # an end that is not legal itself has none
        yield violation(where, number, f"must be {bounds}", nearest)
    elif not number <= most:
        yield violation(where, number, f"must be <= {most}", [most])
    elif not bounds and not number >= -most:
        yield violation(where, number, f"must be >= {-most}", [-most])


def _violations_of_text(where: str, legal: Key, text: str) -> Iterator[str]:
    """Yield a refusal line if a text has a control character, a line separator or half a surrogate pair, is too long,
    or does not match the pattern that its key declares (`legal`); `where` is the key with the text's place in its
    value."""
    if odd := next((c for c in text if category(c) in ("Cc", "Cs", "Zl", "Zp")), None):
        yield violation(where, text, f"has the character U+{ord(odd):04X}, which no text may have; leave it out")
    elif len(text) > LONGEST:
        yield violation(where, text, f"must have at most {LONGEST:,} characters")
    elif legal.pattern and not re.fullmatch(legal.pattern, text):
        yield violation(where, text, legal.constraint)


def _holds(number: float, comparison: str, limit: str) -> bool:
    """Return True if a configured `number` COMPARISON `limit` holds, such as >= "0" or < "inf"; never for NaN."""
    compare: Callable[[float, float], bool] = {">=": ge, ">": gt, "<=": le, "<": lt}[comparison]
    return compare(number, inf if limit == "inf" else float(limit))  # every comparison with NaN is False

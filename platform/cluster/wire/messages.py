"""Shapes of the messages that a member may send to the driver; any other message is treated as garbled."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

Shape = Callable[[Any], bool] | Mapping[str, Any]  # a predicate, or an object's keys with their shapes

_PROCESSES = 1 << 22  # upper bound of Linux process ids
_NODE = 512  # characters of a node's name, at most


def fits(value: Any, shape: Shape) -> bool:
    """Return True if plain data has the given shape; an object must have exactly the keys named."""
    if callable(shape):
        return shape(value)
    return isinstance(value, dict) and value.keys() == shape.keys() and all(fits(value[k], s) for k, s in shape.items())


def understood(message: Mapping[str, Any]) -> bool:
    """Return True if an admitted member may send `message`, that is, if it has one of the shapes in SAID."""
    return any(fits(message, shape) for shape in SAID)


def a_text(value: Any) -> bool:
    return isinstance(value, str)


def a_truth(value: Any) -> bool:
    return isinstance(value, bool)


def a_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53  # excludes bool


def a_duration(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < inf


def _process(value: Any) -> bool:
    return a_count(value) and 1 < value <= _PROCESSES  # never 0: the driver may kill this pid, and 0 is its own group


def a_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _NODE and value.isprintable()


def _digits(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def anything(value: Any) -> bool:
    return True


GREETING: Shape = {
    "hello": {"number": a_count, "node": a_name, "pid": _process, "nonce": _digits, "proof": _digits},
}
SAID: Sequence[Shape] = (
    {"answer": a_count, "value": anything},
    {"answer": a_count, "error": a_text},
    {"beat": a_count, "progress": {"call": a_text, "section": a_text, "waiting": a_truth, "seconds": a_duration}},
)

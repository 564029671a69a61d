"""What a member may say to the driver: anything else is garbled, whoever says it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

Shape = Callable[[Any], bool] | Mapping[str, Any]  # a predicate, or the keys that an object has and their shapes

_PROCESSES = 1 << 22  # Linux numbers them below that
_NODE = 512  # characters of a node's name


def fits(value: Any, shape: Shape) -> bool:
    """Whether plain data has a shape: of an object exactly the keys named."""
    if callable(shape):
        return shape(value)
    return isinstance(value, dict) and value.keys() == shape.keys() and all(fits(value[k], s) for k, s in shape.items())


def understood(message: Mapping[str, Any]) -> bool:
    """Whether an admitted member may say this."""
    return any(fits(message, shape) for shape in SAID)


def a_text(value: Any) -> bool:
    return isinstance(value, str)


def a_truth(value: Any) -> bool:
    return isinstance(value, bool)


def a_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53  # a bool is none


def a_duration(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < inf


def _process(value: Any) -> bool:
    return a_count(value) and 1 < value <= _PROCESSES  # the driver may have to kill it: never 0, which is its own group


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

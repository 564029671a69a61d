"""Mutations of documents: of plain data, and of the text that says it. All are drawn from a `random.Random`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

WRONG: list[Any] = [
    None, True, False, -1, 0, 1, -5, 2.5, 1 << 63, -(1 << 63), 1 << 200, "", "abc", "5", "NaN", [], {}, [[]], [None],
    {"a": {}}, "x" * 3000, [0] * 50, "\x00", "\x1b[2J", "../../x", "/etc/passwd",
]  # fmt: skip
NUMBERS = [-1, 0, 1 << 31, 1 << 53, 1 << 63, 1 << 64, 10**19, 10**60, -(10**30), 10**400, 1.5, 1e300, 5e-324, -0.0]
LETTERS = [
    "\ud800",
    "\udfff\ud800",
    "\u202e",
    "\x00",
    "\x1b[2J",
    "\n",
    "\u2028",
    "\ufeff",
    "\u0661\u0662",
    "e\u0301",
    "\U0001f600",
]
CONSTANTS = [math.nan, math.inf, -math.inf, "NaN", "Infinity"]
MARK = "@@mutated@@"  # stands for a text that JSON's writer cannot write


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (map or list, key) of all that is in plain data."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from places(item)


def replace(draw: Random, value: Any, pool: list[Any], wanted: Callable[[Any], bool] = lambda item: True) -> None:
    """Put one of `pool` into one of the wanted places."""
    wanted_places = [(part, key) for part, key in places(value) if wanted(part[key])]
    if wanted_places:
        part, key = draw.choice(wanted_places)
        part[key] = draw.choice(pool)


def number(item: Any) -> bool:
    """Return whether it is one."""
    return isinstance(item, int | float) and not isinstance(item, bool)


def types(draw: Random, value: Any) -> None:
    """Put what is of another type somewhere, up to three times."""
    for _ in range(draw.randint(1, 3)):
        replace(draw, value, WRONG)


def bounds(draw: Random, value: Any) -> None:
    """Put a number beside the others."""
    replace(draw, value, NUMBERS, number)


def constants(draw: Random, value: Any) -> None:
    """Put a NaN or infinity in the place of a number."""
    replace(draw, value, CONSTANTS, number)


def unicode(draw: Random, value: Any) -> None:
    """Put odd letters into a text, or a key."""
    part, key = draw.choice([p for p in places(value) if isinstance(p[0][p[1]], str) or isinstance(p[0], dict)])
    odd = draw.choice(LETTERS)
    if isinstance(part, dict) and draw.random() < 0.4:
        part[f"{key}{odd}"] = part.pop(key)
    else:
        part[key] = f"{part[key]}{odd}" if isinstance(part[key], str) else odd


def keys(draw: Random, value: Any) -> None:
    """Drop, rename, move or add something."""
    part, key = draw.choice(list(places(value)))
    item = part.pop(key)
    other, _ = draw.choice(list(places(value)) or [(value, 0)])
    how = draw.randrange(3)
    if how and isinstance(other, dict):
        other[draw.choice(["", "step", "extra", "kind", "__class__", str(key)])] = item
    elif how and isinstance(other, list):
        other.insert(draw.randint(0, len(other)), item)


def mark(draw: Random, value: Any) -> None:
    """Put MARK somewhere, for `text` to replace."""
    replace(draw, value, [MARK])


def text(value: Any, instead: str) -> bytes:
    """Return the JSON, with `instead` in the place of MARK. Half a surrogate pair stays escaped."""
    return json.dumps(value).replace(json.dumps(MARK), instead).encode()


def deep(draw: Random) -> str:
    """Return maps or lists in each other."""
    depth = draw.choice([33, 100, 900, 1100, 5000, 60_000])
    opened, closed = draw.choice([("[", "]"), ('{"a":', "}")])
    return opened * depth + "0" + closed * depth * draw.randint(0, 1)


def huge(draw: Random) -> str:
    """Return a number of many digits, a long text or a long list."""
    size = draw.choice([30, 400, 4400, 20_000])
    many = draw.choice([200_000, 1_500_000])
    long = f'"{"x" * many}"'
    return draw.choice(["9" * size, f"-{'9' * size}", f"1e{size}", f"0.{'1' * size}", long, f"[{'0,' * many}0]"])


def damaged(draw: Random, raw: bytes) -> bytes:
    """Return other bytes: some flipped, inserted, dropped or swapped."""
    data = bytearray(raw)
    for _ in range(draw.choice([1, 1, 2, 5, 50])):
        at = draw.randrange(len(data) or 1)
        how = draw.randrange(4)
        if how == 0 and data:
            data[at % len(data)] ^= 1 << draw.randrange(8)
        elif how == 1:
            data[at:at] = draw.choice([b"\x00", b"\xff", b"\x80", b",", b"{", b"[", b'"', b"9", b"-", b"\n", b"1e9"])
        elif how == 2:
            del data[at : at + draw.randint(1, 9)]
        else:
            end = draw.randrange(len(data) or 1)
            data[at:at] = data[end : end + 20]
    return bytes(data)


def cut(draw: Random, raw: bytes) -> bytes:
    """Return a part of it."""
    first = draw.choice([0, 0, 0, draw.randrange(len(raw))])
    return raw[first : draw.randrange(len(raw))]


def twice(draw: Random, raw: bytes) -> bytes:
    """Return it with a key said twice."""
    colons = [i for i in range(1, len(raw)) if raw[i : i + 2] == b'":']
    at = draw.choice(colons)
    begin = raw.rfind(b'"', 0, at)
    return raw[:begin] + raw[begin : at + 1] + b": 0, " + raw[begin:]


STRUCTURED: dict[str, Callable[[Random, Any], None]] = {
    "types": types, "bounds": bounds, "NaN": constants, "unicode": unicode, "keys": keys,
}  # fmt: skip
TEXTUAL: dict[str, Callable[[Random, bytes], bytes]] = {"bytes": damaged, "truncated": cut, "twice": twice}
MARKED: dict[str, Callable[[Random], str]] = {"deep": deep, "huge": huge}


def document(draw: Random, kind: str, value: Any) -> bytes:
    """Return the JSON text of `value`, which is changed, mutated as `kind` says."""
    if kind in STRUCTURED:
        STRUCTURED[kind](draw, value)
        return text(value, "0")
    if kind in MARKED:
        mark(draw, value)
        return text(value, MARKED[kind](draw))
    return TEXTUAL[kind](draw, text(value, "0"))


KINDS = [*STRUCTURED, *MARKED, *TEXTUAL]

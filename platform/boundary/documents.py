"""Readers of JSON and YAML from untrusted sources, with bounds on bytes, values and time to open a file.

They return plain data, whose shape `platform.boundary.schema` checks. All raise Malformed with the reason, and OSError
if a file cannot be read.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import Any

from platform.boundary.schema import DEEPEST, Malformed, shorten_value

SMALL = 256 << 10  # most bytes of a document written by hand, or of a note
VALUES = 1 << 20  # default limit of values in a document; each takes up to about 100 bytes, its lists and maps included
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def open_regular_file(path: str | os.PathLike[str]) -> io.FileIO:
    """Open the regular file at `path` for reading, unbuffered. Raises OSError for anything else (pipe, device), without
    waiting for it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # a zero byte, or half a surrogate pair
        raise OSError(errno.EINVAL, "Not the name of a file", os.fspath(path)) from None
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):
        os.close(file)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        reason = os.strerror(number) if stat.S_ISDIR(mode) else "Not a regular file"
        raise OSError(number, reason, os.fspath(path))
    return io.FileIO(file, "rb")


def read_bytes(path: str | os.PathLike[str], most: int = SMALL) -> bytes:
    """Read a regular file from an untrusted source and return its bytes. Raises Malformed if there are more than
    `most`, OSError if it cannot be read."""
    with open_regular_file(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise Malformed(f"more than {most} bytes")
        parts, room = [], most + 1
        while room and (chunk := file.read(room)):
            parts.append(chunk)
            room -= len(chunk)
    if not room:
        raise Malformed(f"more than {most} bytes")
    return b"".join(parts)


def find_lone_surrogate(text: str) -> str:
    """Return where a foreign text has half a surrogate pair, "U+D800, ..."; "" if UTF-8 can hold all of it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"U+{ord(text[error.start]):04X}, half a character, at place {error.start}"
    return ""


def printable_line(foreign: object, most: int = 300) -> str:
    """Return foreign bytes, or the text of an error, as one printable line of at most `most` characters."""
    raw = foreign if isinstance(foreign, bytes | bytearray) else str(foreign).encode(errors="replace")
    text = " ".join(bytes(raw[: 4 * most]).decode(errors="replace").split())
    return "".join(c if c.isprintable() else "?" for c in text)[:most]


def error_line(error: BaseException) -> str:
    """Return the first line of an error's text, after its type: a device, a storage or a worker may add a long one."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def parse_json(raw: bytes | bytearray, most: int = SMALL, values: int = VALUES, strict: bool = True) -> Any:
    """Parse an untrusted JSON text of at most `most` bytes and `values` values into plain data. Raises Malformed.

    With `strict`, NaN, infinity and a key given twice are refused too.
    """
    if len(raw) > most:
        raise Malformed(f"more than {most} bytes")
    if _has_too_many_values(raw, values):
        raise Malformed(f"more than {values} values")
    try:
        text = bytes(raw).decode()
        if not strict:
            return json.loads(text)
        hooks = {"parse_float": _parse_finite, "parse_constant": _refuse_constant}
        return json.loads(text, object_pairs_hook=_build_unique_map, **hooks)  # type: ignore[arg-type]
    except Malformed:
        raise
    except RecursionError:
        raise Malformed("too many maps and lists in each other") from None
    except ValueError as error:  # text that is not UTF-8 or not JSON, integers of thousands of digits
        raise Malformed(f"not JSON: {parser_error_line(error)}") from None


def _has_too_many_values(raw: bytes | bytearray, values: int) -> bool:
    """Return True if an untrusted JSON text has more than `values` values, by the marks , [ { outside of strings."""
    if len(raw) <= values:
        return False
    marks = b",[{"
    if sum(raw.count(mark) for mark in marks) <= values:
        return False
    return sum(_STRING.sub(b"", raw).count(mark) for mark in marks) > values


def _build_unique_map(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build the map of a parsed JSON object from its (key, value) pairs. Raises Malformed for a key given twice."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise Malformed(f"the key {_find_repeated_key(name for name, _ in pairs)} twice")
    return mapping


def _find_repeated_key(names: Iterable[str]) -> str:
    """Return the first key of a JSON or YAML map that occurs a second time, escaped for an error message."""
    seen: set[str] = set()
    return shorten_value(next(name for name in names if name in seen or seen.add(name)))  # type: ignore[func-returns-value]


def _parse_finite(text: str) -> float:
    """Convert the text of a number in untrusted JSON to a float. Raises Malformed if it is not finite."""
    if not isfinite(number := float(text)):
        raise Malformed(f"{shorten_value(text)} is too large a number")
    return number


def _refuse_constant(name: str) -> Any:
    """Raise Malformed for NaN or Infinity in untrusted JSON, where they are no numbers."""
    raise Malformed(f"{name} is no number of JSON")


def parse_yaml(raw: bytes) -> Any:
    """Parse an untrusted YAML text of at most SMALL bytes into plain data. Raises Malformed, also for an alias or a
    key given twice."""
    import yaml

    if len(raw) > SMALL:
        raise Malformed(f"more than {SMALL} bytes")

    class Loader(yaml.SafeLoader):
        """Reads YAML that has no alias, no key twice, and maps and lists in each other only so deep."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            """Parse one node of an untrusted YAML text; raises Malformed for an alias or too deep nesting."""
            if self.check_event(yaml.AliasEvent):
                raise Malformed("an alias; every value is written where it belongs")
            if len(self.states) > 3 * DEEPEST:  # the parser's stack: one or two states per open map or list
                raise Malformed("too many maps and lists in each other")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            """Build a map of an untrusted YAML text; raises Malformed for a key given twice."""
            keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
            if len(set(keys)) < len(keys):
                raise Malformed(f"the key {_find_repeated_key(keys)} twice")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(raw, Loader)
    except Malformed:
        raise
    except RecursionError:
        raise Malformed("too many maps and lists in each other") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, KeyError, AttributeError) as error:
        raise Malformed(f"not YAML: {parser_error_line(error)}") from None


def parser_error_line(error: Exception) -> str:
    """Return the first line of a JSON or YAML parser's error as printable text; its type if it has no text."""
    return printable_line((str(error).splitlines() or [type(error).__name__])[0])


def read_json_file(path: Path) -> Any:
    """Parse an untrusted JSON file of at most SMALL bytes. Raises Malformed, OSError."""
    return parse_json(read_bytes(path))

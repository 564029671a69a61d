"""Checked conversion of untrusted plain data into a shape declared as Python types.

The shape is a dataclass (read from a map), a NamedTuple (from a list of the same length) or a type such as
`dict[str, list[int]]`; `Annotated[int, Span(1, 9)]` adds a bound, and `object` leaves a value unread. Data of another
shape raises `Malformed`, which says where and why in one line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from math import isnan
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Reader = Callable[[Any], Any]

LARGEST = 1 << 64  # largest absolute value of any integer
LONGEST = 1 << 20  # most characters of any string
DEEPEST = 32  # deepest nesting of maps and lists in a value declared as Any
_SHOWN = 60  # most characters of a value in a message


class Malformed(ValueError):
    """Error for foreign data of another shape than declared. Its text is one line of printable ASCII: "PLACE:
    REASON"."""

    def __init__(self, reason: str, place: str = ""):
        """Construct the error of foreign data: the `reason`, and the `place` in the data, such as `layers[3].name`."""
        super().__init__(f"{place}: {reason}" if place else reason)
        self.reason, self.place = reason, place

    def add_outer_key(self, key: str | int) -> Malformed:
        """Return this error of foreign data with `key` of the map, or index of the list, in front of its place."""
        first = f"[{key}]" if isinstance(key, int) else shorten_value(key).strip("'")
        between = "." if self.place and not self.place.startswith("[") else ""
        return Malformed(self.reason, f"{first}{between}{self.place}")


class Span(NamedTuple):
    """Bound on a number, both ends included."""

    least: float
    most: float

    def check(self, value: Any) -> None:
        """Raise Malformed if the number `value` in foreign data is outside these bounds, as NaN always is."""
        if not self.least <= value <= self.most:
            raise Malformed(f"{shorten_value(value)} is not in {self.least} to {self.most}")


Count = Annotated[int, Span(0, (1 << 53) - 1)]  # as exact in JSON's numbers


class Text(NamedTuple):
    """Bound on a string: the regular expression that all of it must match."""

    pattern: str
    what: str  # what a legal string is called in messages

    def check(self, value: str) -> None:
        """Raise Malformed if the string `value` in foreign data does not match the pattern as a whole."""
        if not re.fullmatch(self.pattern, value):
            raise Malformed(f"{shorten_value(value)} is not {self.what}")


class OneOf(NamedTuple):
    """Bound on a value: one of a fixed set."""

    values: tuple[Any, ...]
    what: str

    def check(self, value: Any) -> None:
        """Raise Malformed if `value` in foreign data is not one of the legal values."""
        if value not in self.values:
            raise Malformed(f"unknown {self.what} {shorten_value(value)}")


class EntryBounds(NamedTuple):
    """Bound on the number of entries of a list or map."""

    least: int
    most: int

    def check(self, value: Any) -> None:
        """Raise Malformed if the list or map `value` in foreign data has more or fewer entries than allowed."""
        if not self.least <= len(value) <= self.most:
            raise Malformed(f"has {len(value)} entries, not {self.least} to {self.most}")


class By(NamedTuple):
    """Reader of a type that is not read as its fields are declared: stands in place of bounds."""

    read: Reader


class OpenMap(NamedTuple):
    """Bound on a map that may have other keys too: the types of its known keys, and the keys that it must have."""

    kinds: tuple[tuple[str, Any], ...]
    needed: tuple[str, ...] = ()

    def check(self, value: dict[str, Any]) -> None:
        """Raise Malformed if a map in foreign data lacks a needed key, or has another type of value at a known one."""
        for key in self.needed:
            if key not in value:
                raise Malformed(f"lacks {key}")
        for key, kind in self.kinds:
            if key in value:
                _read_at_place(key, build_reader(kind), value[key])


def parse_value(kind: type[T], value: Any) -> T:
    """Convert foreign plain data `value`, such as parsed JSON, to the declared type `kind`: a dataclass, a NamedTuple,
    or such as dict[str, int]. Raises Malformed, which names the place and the reason."""
    return build_reader(kind)(value)  # type: ignore[arg-type]


def encode_fields(value: object) -> dict[str, Any]:
    """Convert a dataclass to plain data for `parse_value`, without empty defaults; `default` of json.dumps."""
    if is_dataclass(value) and not isinstance(value, type):
        field_values = ((field, getattr(value, field.name)) for field in fields(value))
        return {f.name: each for f, each in field_values if each or f.default_factory is MISSING or f.default_factory()}
    raise TypeError(f"a {type(value).__name__} is no plain data")


def map_nested_values(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return nested plain data, before it is shown, with `change` of every value of type `kind`; map keys stay."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (str, int, float)):  # most of it: Mapping is slow to ask for
        return value
    if isinstance(value, Mapping):
        return {name: map_nested_values(part, kind, change) for name, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [map_nested_values(part, kind, change) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def iterate_texts(value: Any) -> Iterator[str]:
    """Yield every text in nested plain data, such as parsed JSON, names in maps excepted."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from iterate_texts(part)


def shorten_value(value: Any) -> str:
    """Return a short form of a foreign value for an error message: one line of printable ASCII."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        return ascii(value if len(value) <= _SHOWN else f"{value[:_SHOWN]}...")
    return ascii(value) if isinstance(value, bool | int | float | None) else type(value).__name__


def fits_type(value: Any, kind: Any) -> bool:
    """Return True if foreign plain data of any size has the declared type `kind`; an integer is accepted as a float."""
    try:
        build_reader(kind, False)(value)
    except Malformed:
        return False
    return True


@cache
def build_reader(kind: Any, limited: bool = True) -> Reader:
    """Return the function that converts foreign plain data to the declared type `kind`, or raises Malformed; built once
    per type. If not `limited`, it takes numbers and texts of any size, and returns a number as it is."""
    origin, arguments = get_origin(kind), get_args(kind)
    plain, inner_reader = _LIMITED if limited else _TYPES, partial(build_reader, limited=limited)
    if kind in plain:
        return plain[kind]
    if kind is Any:
        return partial(_check_any_value, plain)
    if origin is Annotated:
        return _build_bounded_reader(inner_reader(arguments[0]), arguments[1:])
    if origin in (Union, UnionType):
        return _build_union_reader([*map(inner_reader, arguments)])
    if origin is dict:
        return _build_map_reader(*map(inner_reader, arguments))
    if origin is list or arguments[1:] == (...,):
        return _build_sequence_reader(inner_reader(arguments[0]), origin, _span_of_declared_integer(arguments[0]))
    if origin is tuple:
        return _build_row_reader(tuple, dict(enumerate(map(inner_reader, arguments))))
    hints = get_type_hints(kind, include_extras=True)
    if is_dataclass(kind):
        return _build_record_reader(kind, {field.name: inner_reader(hints[field.name]) for field in fields(kind)})
    assert issubclass(kind, tuple), f"no reader of {kind}"
    return _build_row_reader(kind._make, {name: inner_reader(hint) for name, hint in hints.items()})


def _read_number(value: Any) -> float:
    """Return a number of foreign data as a float, infinite ones too; raises Malformed for any other value."""
    if type(value) is int and abs(value) <= LARGEST or type(value) is float and not isnan(value):
        return float(value)
    raise Malformed(f"{shorten_value(value)} is no number")


# may be NaN, as a loss
Real = Annotated[float, By(lambda value: value if type(value) is float else _read_number(value))]


def _read_integer(value: Any) -> int:
    """Return an integer of 64 bits of foreign data; raises Malformed for any other value."""
    if abs(_TYPES[int](value)) > LARGEST:
        raise Malformed(f"{shorten_value(value)} is no integer of 64 bits")
    return value


def _read_string(value: Any) -> str:
    """Return a text of foreign data, of bounded length and whole characters; raises Malformed for any other value."""
    if len(_TYPES[str](value)) > LONGEST:
        raise Malformed(f"a text of {len(value)} characters is too long")
    if not value.isascii() and re.search("[\ud800-\udfff]", value):
        raise Malformed(f"{shorten_value(value)} has half a surrogate pair")
    return value


def _build_exact_reader(otherwise: str, *kinds: type) -> Reader:
    """Return the function that accepts foreign values whose type is exactly one of `kinds`, and raises Malformed for
    others. `otherwise`: words for these in the message, such as "not null"."""

    def read_exactly(value: Any) -> Any:
        """Return a value of foreign data whose type is one of `kinds`; raises Malformed for others."""
        if type(value) not in kinds:
            raise Malformed(f"{shorten_value(value)} is {otherwise}")
        return value

    return read_exactly


def _read_at_place(place: Any, read_part: Reader, part: Any) -> Any:
    """Apply `read_part` to the part of foreign data at `place` (key or index), and add `place` to its error."""
    try:
        return read_part(part)
    except Malformed as error:
        raise error.add_outer_key(place) from None


def _check_any_value(plain: dict[Any, Reader], value: Any, depth: int = 0) -> Any:
    """Check foreign plain data of any shape, `depth` levels inside the whole: maps with texts as keys, lists, texts,
    numbers, booleans and null, at most DEEPEST levels of maps and lists. `plain`: the readers of texts and integers.
    Return the data, or raise Malformed."""
    kind = type(value)
    if kind in (dict, list) and depth == DEEPEST:
        raise Malformed(f"more than {DEEPEST} maps and lists in each other")
    if kind in (dict, list):
        place: Any = None
        try:
            for place, item in value.items() if kind is dict else enumerate(value):
                if kind is dict:
                    plain[str](place)
                if type(item) is not float:  # most of it
                    _check_any_value(plain, item, depth + 1)
        except Malformed as error:
            raise error.add_outer_key(place) from None
    elif kind in (int, str):
        plain[kind](value)
    elif kind not in (float, bool, NoneType):
        raise Malformed(f"a {kind.__name__} is no plain data")
    return value


_TYPES: dict[Any, Reader] = {
    int: _build_exact_reader("no integer", int),
    float: _build_exact_reader("no number", float, int),
    str: _build_exact_reader("no text", str),
    bool: _build_exact_reader("neither true nor false", bool),
    NoneType: _build_exact_reader("not null", NoneType),
    object: lambda value: value,
}
_LIMITED = _TYPES | {int: _read_integer, float: _read_number, str: _read_string}


def _build_bounded_reader(inner: Reader, bounds: Sequence[Any]) -> Reader:
    """Return the function that reads foreign data declared as Annotated[base, *bounds]: it reads as `inner`, the reader
    of the base, then lets each bound, such as Span(1, 9), check the value."""
    if isinstance(bounds[0], By):
        return bounds[0].read

    def read_bounded(value: Any) -> Any:
        """Read a value of foreign data by `inner`, and check it against the declared bounds."""
        value = inner(value)
        for bound in bounds:
            bound.check(value)
        return value

    return read_bounded


def _build_union_reader(readers: Sequence[Reader]) -> Reader:
    """Return the function that reads foreign data declared as a Union: it gives what the first of the `readers` that
    accepts a value makes of it, and raises Malformed with the reason of the first one if none does."""

    def read_either(value: Any) -> Any:
        """Read a value of foreign data by the first of the readers of a Union's types that accepts it."""
        reasons = []
        for read_member in readers:
            try:
                return read_member(value)
            except Malformed as error:
                reasons.append(error.reason)
        raise Malformed(reasons[0])

    return read_either


def _build_map_reader(read_key: Reader, read_item: Reader) -> Reader:
    """Return the function that reads foreign data declared as dict[KEY, ITEM] from a map, or raises Malformed."""

    def read_map(value: Any) -> dict[Any, Any]:
        """Read a map of foreign data: its keys by `read_key`, its values by `read_item`."""
        if type(value) is not dict:
            raise Malformed(f"{shorten_value(value)} is no map")
        entries = {}
        for name, part in value.items():
            place = name if isinstance(name, str) else shorten_value(name)
            entries[_read_at_place(place, read_key, name)] = _read_at_place(place, read_item, part)
        return entries

    return read_map


def _build_sequence_reader(read_item: Reader, kind: type, span: Span | None) -> Reader:
    """Return the function that reads foreign data declared as list[ITEM] or tuple[ITEM, ...] from a list, or raises
    Malformed. `kind`: list or tuple; `span`: the bounds on integers, None for other items."""

    def read_sequence(value: Any) -> Any:
        """Read a list of foreign data, each item by `read_item`; return it as a `kind`, list or tuple."""
        if type(value) is not list:
            raise Malformed(f"{shorten_value(value)} is no list")
        if span and set(map(type, value)) == {int} and span.least <= min(value) and max(value) <= span.most:
            return kind(value)  # long lists are of numbers
        return kind([_read_at_place(place, read_item, part) for place, part in enumerate(value)])

    return read_sequence


def _span_of_declared_integer(hint: Any) -> Span | None:
    """Return the bounds on foreign data declared as int or Annotated[int, Span(1, 9)]; None for other types."""
    base, *bounds = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if base is not int or not all(isinstance(bound, Span) for bound in bounds):
        return None
    return Span(max(-LARGEST, *(b.least for b in bounds), -LARGEST), min(LARGEST, *(b.most for b in bounds), LARGEST))


def _build_row_reader(construct: Callable[[list[Any]], Any], readers: dict[Any, Reader]) -> Reader:
    """Return the function that reads foreign data declared as a tuple or NamedTuple from a list of the same length, or
    raises Malformed. `readers`: the reader of each entry, by its name or index; `construct`: the function that makes
    the tuple of the list of converted entries."""

    def read_row(value: Any) -> Any:
        """Read a list of foreign data as a tuple with declared entries, each by its own reader."""
        if type(value) is not list or len(value) != len(readers):
            raise Malformed(f"{shorten_value(value)} is no list of {len(readers)}")
        entries = zip(readers.items(), value, strict=True)
        return construct([_read_at_place(name, read_entry, part) for (name, read_entry), part in entries])

    return read_row


def _build_record_reader(kind: Any, readers: dict[str, Reader]) -> Reader:
    """Return the function that reads foreign data declared as the dataclass `kind` from a map of its fields, each by
    its reader; it raises Malformed for unknown keys, and for missing ones without a default."""
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]

    def read_record(value: Any) -> Any:
        """Read a map of foreign data as the dataclass `kind`, each field by its reader."""
        if type(value) is not dict:
            raise Malformed(f"{shorten_value(value)} is no map")
        if unknown := [key for key in value if key not in readers]:
            key = unknown[0] if isinstance(unknown[0], str) else shorten_value(unknown[0])
            raise Malformed("unknown key").add_outer_key(key)
        if missing := [name for name in needed if name not in value]:
            raise Malformed(f"lacks {missing[0]}")
        return kind(**{name: _read_at_place(name, readers[name], part) for name, part in value.items()})

    return read_record

"""Plain data against declared shapes, and files that somebody else may have written."""

import json
import os
import re
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import pytest

from platform.boundary.documents import parse_json, parse_yaml, printable_line, read_bytes
from platform.boundary.schema import EntryBounds, Malformed, OneOf, OpenMap, Span, Text, parse_value


class Pair(NamedTuple):
    first: int
    second: tuple[Annotated[int, Span(0, 9)], ...]


@dataclass
class Shape:
    name: Annotated[str, Text("[a-z]+", "a word")]
    size: Annotated[int, Span(1, 9)] = 1
    share: float = 0.5
    flag: bool | None = None
    pairs: dict[str, Pair] = field(default_factory=dict)
    kind: Annotated[str, OneOf(("a", "b"), "kind")] = "a"
    rest: Annotated[dict[str, Any], OpenMap((("step", int),), ("step",))] = field(default_factory=dict)
    few: Annotated[list[str], EntryBounds(0, 2)] = field(default_factory=list)


def test_what_fits_is_read():
    shape = parse_value(
        Shape, {"name": "x", "share": 1, "pairs": {"p": [1, [2, 3]]}, "rest": {"step": 3, "more": [None, {}]}}
    )
    assert shape == Shape("x", share=1.0, pairs={"p": Pair(1, (2, 3))}, rest={"step": 3, "more": [None, {}]})
    assert type(shape.share) is float and parse_value(bool | None, None) is None


DEEP: list = []
for _ in range(40):
    DEEP = [DEEP]
MALFORMED = {
    "none": (None, "None is no map"),
    "a list": ([], "list is no map"),
    "missing": ({}, "lacks name"),
    "unknown": ({"name": "x", "sise": 1}, "sise: unknown key"),
    "unknown, no text": ({"name": "x", 1: 1}, "1: unknown key"),
    "a type": ({"name": 1}, "name: 1 is no text"),
    "a word": ({"name": "x\n"}, r"name: 'x\n' is not a word"),
    "a long word": ({"name": "X" * 10**6}, f"name: '{'X' * 60}...' is not a word"),
    "a bound": ({"name": "x", "size": 0}, "size: 0 is not in 1 to 9"),
    "a bool": ({"name": "x", "size": True}, "size: True is no integer"),
    "a float": ({"name": "x", "size": 1.0}, "size: 1.0 is no integer"),
    "huge": ({"name": "x", "size": 1 << 20000}, "size: an integer of 20001 bits is no integer of 64 bits"),
    "a huge float": ({"name": "x", "share": 1 << 20000}, "share: an integer of 20001 bits is no number"),
    "nan": ({"name": "x", "share": float("nan")}, "share: nan is no number"),
    "text for a number": ({"name": "x", "share": "1"}, "share: '1' is no number"),
    "neither": ({"name": "x", "flag": 1}, "flag: 1 is neither true nor false"),
    "a row": ({"name": "x", "pairs": {"p": [1]}}, "pairs.p: list is no list of 2"),
    "in a row": ({"name": "x", "pairs": {"p": [1, [2, 10]]}}, "pairs.p.second[1]: 10 is not in 0 to 9"),
    "a choice": ({"name": "x", "kind": "c"}, "kind: unknown kind 'c'"),
    "needed": ({"name": "x", "rest": {}}, "rest: lacks step"),
    "known": ({"name": "x", "rest": {"step": "1"}}, "rest.step: '1' is no integer"),
    "deep": ({"name": "x", "rest": {"step": 1, "a": DEEP}}, "more than 32 maps and lists in each other"),
    "no plain data": ({"name": "x", "rest": {"step": 1, "a": {1, 2}}}, "rest.a: a set is no plain data"),
    "keys": ({"name": "x", "rest": {"step": 1, 2: 1}}, "rest.2: 2 is no text"),
    "surrogates": ({"name": "x", "rest": {"step": 1, "a": "\ud800"}}, r"rest.a: '\ud800' has half a surrogate pair"),
    "many": ({"name": "x", "few": ["", "", ""]}, "few: has 3 entries, not 0 to 2"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_what_does_not_fit_is_told_in_one_line(what):
    value, reason = MALFORMED[what]
    with pytest.raises(Malformed) as caught:
        parse_value(Shape, value)
    assert reason in str(caught.value) and str(caught.value).isascii() and len(str(caught.value)) < 400


JSON = {
    "deep": (b"[" * 900, "not JSON"),
    "deeper": (b"[" * 90_000, "in each other"),
    "deep maps": (b'{"a":' * 50_000, "in each other"),
    "nan": (b'{"a": NaN}', "NaN is no number"),
    "infinite": (b"[-Infinity]", "-Infinity is no number"),
    "too large": (b"[1e999]", "'1e999' is too large"),
    "digits": (b"1" * 10**5, "not JSON"),
    "twice": (b'{"a": 1, "b": 2, "b": 3}', "the key 'b' twice"),
    "bytes": (b'{"a": "\xff"}', "not JSON: 'utf-8' codec"),
    "torn": (b'{"a": ', "not JSON"),
    "empty": (b"", "not JSON"),
    "many": (b"[" + b"0," * 10**5 + b"0]", "more than 1000 values"),
    "large": (b'"' + b"x" * 10**7, "more than 1000000 bytes"),
    "nul": (b"\0" * 99, "not JSON"),
}


@pytest.mark.parametrize("what", JSON)
def test_json_is_bounded(what):
    raw, reason = JSON[what]
    with pytest.raises(Malformed, match=re.escape(reason)):
        parse_json(raw, 1_000_000, 100_000 if reason == "in each other" else 1000)


def test_commas_in_texts_are_no_values():
    text = ',[{":\\' * 10_000
    assert parse_json(json.dumps([text, text]).encode(), values=1000) == [text, text]


YAML = {
    "an alias": (b"a: &x [1]\nb: *x", "an alias"),
    "itself": (b"&x [*x]", "an alias"),
    "laughs": (b"a: &a [x]\nb: &b [*a, *a]\nc: {<<: *b}", "an alias"),
    "deep": (b"[" * 500, "in each other"),
    "twice": (b"a: 1\na: 2", "the key 'a' twice"),
    "an object": (b"!!python/object/apply:os.system [true]", "not YAML"),
    "a day": (b"2001-99-99", "not YAML"),
    "bytes": (b"a: \xff", "not YAML"),
    "a list as a key": (b"? [a]\n: 1", "not YAML"),
    "large": (b"a" * (1 << 20), "more than"),
}


@pytest.mark.parametrize("what", YAML)
def test_yaml_is_bounded(what):
    raw, reason = YAML[what]
    with pytest.raises(Malformed, match=reason):
        parse_yaml(raw)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)])
def test_only_files_are_read_and_nothing_is_waited_for(tmp_path, make):
    make(tmp_path / "x")
    began = time.monotonic()
    with pytest.raises(OSError):
        read_bytes(tmp_path / "x")
    assert time.monotonic() - began < 5


def test_no_more_of_a_file_is_read_than_may_be(tmp_path):
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(Malformed, match="more than 1000 bytes"):
        read_bytes(path, 1000)
    path.write_bytes(b"x" * 1000)
    assert read_bytes(path, 1000) == b"x" * 1000


def test_notes_are_lines():
    assert printable_line(b"a\nb\t\x1b[2Jc \xff") == "a b ?[2Jc \ufffd" and len(printable_line(b"x" * 10**6)) == 300

"""What the safetensors package refuses, we refuse: headers of files that somebody else wrote, altered at random."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors
import torch

from platform.boundary.schema import Malformed
from platform.checkpoint.__main__ import main
from platform.checkpoint.interchange import import_safetensors
from platform.checkpoint.manifest import Refused
from tests.fuzz import mutations
from tests.fuzz.mutations import places

CASES = 3000
SIZES = {"F32": 4, "BF16": 2, "I64": 8, "U8": 1}

Header = dict[str, Any]


def file_of(header: Any, data: bytes) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def drawn(draw: Random) -> tuple[Header, bytes]:
    """A right file: up to five tensors, some of them without an element, in any order in the header."""
    header: Header = {"__metadata__": {"format": "pt"}} if draw.random() < 0.7 else {}
    at = 0
    for i in range(draw.randint(1, 5)):
        kind = draw.choice([*SIZES])
        shape = [draw.randint(0 if draw.random() < 0.2 else 1, 4) for _ in range(draw.randint(0, 3))]
        end = at + prod(shape) * SIZES[kind]
        header[f"layer.{i}"] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    items = [*header.items()]
    draw.shuffle(items)
    return dict(items), draw.randbytes(at)


def right(draw: Random, header: Header, data: bytes) -> tuple[Any, bytes]:
    return header, data


def moved(draw: Random, header: Header, data: bytes) -> tuple[Any, bytes]:
    """A tensor's place shifted by a few bytes, its length as it was or not."""
    name = draw.choice([n for n in header if n != "__metadata__"])
    by = draw.choice([-8, -4, -1, 1, 4, 8])
    header[name]["data_offsets"][draw.randint(0, 1)] += by
    if draw.random() < 0.7:
        start, end = header[name]["data_offsets"]
        header[name]["data_offsets"] = [start + by, end + by]
    return header, data


def shared(draw: Random, header: Header, data: bytes) -> tuple[Any, bytes]:
    """Two tensors at one place."""
    names = [n for n in header if n != "__metadata__"]
    one, other = draw.choice(names), draw.choice(names)
    header[one] = copy.deepcopy(header[other])
    return header, data


def holed(draw: Random, header: Header, data: bytes) -> tuple[Any, bytes]:
    """A tensor left out of the header: its bytes are no tensor's."""
    del header[draw.choice([n for n in header if n != "__metadata__"])]
    return header, data


def longer(draw: Random, header: Header, data: bytes) -> tuple[Any, bytes]:
    return header, data + bytes(draw.randint(1, 9))


def shorter(draw: Random, header: Header, data: bytes) -> tuple[Any, bytes]:
    return header, data[: -draw.randint(1, 9)]


def described(draw: Random, header: Header, data: bytes) -> tuple[Any, bytes]:
    """Another __metadata__, of any values."""
    header["__metadata__"] = draw.choice([{"a": v} for v in mutations.WRONG] + mutations.WRONG)
    return header, data


def replaced(draw: Random, header: Header, data: bytes) -> tuple[Any, bytes]:
    """Any value in the header is another one, or is left out."""
    part, key = draw.choice([*places(header)])
    if draw.random() < 0.3 and isinstance(part, dict):
        del part[key]
    else:
        part[key] = draw.choice(mutations.WRONG + mutations.NUMBERS)
    return header, data


def flipped(draw: Random, header: Header, data: bytes) -> tuple[Any, bytes]:
    """A byte of the header's text is another one."""
    raw = bytearray(json.dumps(header).encode())
    raw[draw.randrange(len(raw))] = draw.choice(b'{}[]",:0123456789 \\\x00\xff\x80ae-.')
    return bytes(raw), data


KINDS: list[Callable[[Random, Header, bytes], tuple[Any, bytes]]] = [
    right, moved, shared, holed, longer, shorter, described, replaced, flipped,
]  # fmt: skip


def theirs(raw: bytes) -> dict[str, bytes] | None:
    """The tensors that the package finds in a file, None if it refuses it."""
    try:
        return {name: bytes(entry["data"]) for name, entry in safetensors.deserialize(raw)}
    except (safetensors.SafetensorError, OverflowError):
        return None


def ours(path: Path) -> dict[str, bytes] | None:
    try:
        _, tensors = import_safetensors(str(path))
        return {name: bytes(t.contiguous().view(-1).view(torch.uint8).tolist()) for name, t in tensors}
    except (Malformed, Refused):
        return None


def test_what_the_package_refuses_is_refused(tmp_path):
    path, counts = tmp_path / "x.safetensors", {"both": 0, "neither": 0, "we alone": 0}
    for seed in range(CASES):
        draw = Random(seed)
        kind = draw.choice(KINDS)
        try:
            raw = file_of(*kind(draw, *drawn(draw)))
        except UnicodeEncodeError:
            continue
        path.write_bytes(raw)
        reference, actual = theirs(raw), ours(path)
        if reference is None:
            assert actual is None, (seed, raw)
        elif kind is right or actual is not None:
            assert actual == reference, (seed, raw)
        counts["neither" if reference is None else "we alone" if actual is None else "both"] += 1
    assert counts["both"] > 300 and counts["neither"] > 1000, counts


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TWO = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}
FILES: dict[str, tuple[bytes, str]] = {
    "overlap": (file_of({"a": ONE, "b": ONE}, bytes(8)), "b: overlaps a: it begins at 0, and not at 8"),
    "hole": (file_of({"a": ONE, "b": TWO | {"data_offsets": [12, 20]}}, bytes(20)), "b: leaves 4 bytes unused"),
    "trailing": (file_of({"a": ONE, "b": TWO}, bytes(17)), "1 bytes behind its last tensor are no tensor's"),
    "metadata": (file_of({"__metadata__": {"x": 1}, "a": ONE}, bytes(8)), "__metadata__.'x': is no text"),
    "nothing": (b"\0" * 4, "its 4 bytes are too few for a header"),
}


@pytest.mark.parametrize("case", FILES)
def test_the_command_says_what_is_wrong(tmp_path, capsys, case):
    raw, why = FILES[case]
    (tmp_path / "x.safetensors").write_bytes(raw)
    assert main(["import", str(tmp_path / "x.safetensors"), str(tmp_path / "storage")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert why in line and not (tmp_path / "storage").exists()

"""Reads a W&B run that was written offline: a LevelDB log (32 KiB blocks of framed fragments) of protobuf records."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE_HEADER, _BLOCK, _FRAME = 7, 1 << 15, struct.Struct("<IHB")  # checksum, length, kind
_FULL, _LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """`wandb_internal_pb2.Record` messages, in the order in which they were written."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data.startswith(b":W&B")
    at, fragments = _FILE_HEADER, b""
    while at + _FRAME.size <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _FRAME.size:  # the rest of a block is padding
            at += left
            continue
        _, length, kind = _FRAME.unpack_from(data, at)
        fragments += data[at + _FRAME.size : at + _FRAME.size + length]
        at += _FRAME.size + length
        if kind in (_FULL, _LAST):
            yield Record.FromString(fragments)
            fragments = b""


def history(path: Path) -> list[dict[str, Any]]:
    """The logged rows, without W&B's own `_...` keys."""
    rows = [
        {item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json) for item in r.history.item}
        for r in records(path)
        if r.WhichOneof("record_type") == "history"
    ]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]

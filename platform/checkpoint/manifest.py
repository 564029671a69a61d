"""The manifest: what a checkpoint holds, as one JSON document whose last line is the SHA-256 of the lines before it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from platform.checkpoint.box import Box, gaps
from platform.checkpoint.state import DTYPES

KIND = "elastic-platform checkpoint"
FORMAT = 1  # tests/checkpoint/format_1 holds a checkpoint of it: every later version reads every earlier one
NAME = "manifest.json"


class Refused(Exception):
    """A checkpoint that cannot be used, with the reason in one line."""


class Corrupt(Refused):
    """It never can: what it holds is not what was written."""


class Newer(Refused):
    """A later version of the platform can."""


@dataclass(frozen=True)
class Meta:
    """What a checkpoint knows beside its tensors: plain JSON data, without NaN or infinities."""

    step: int  # updates done
    samples: int  # of the global order, consumed: the data position
    seed: int
    corpus: str  # hash of the tokenised corpus
    identity: dict[str, Any]  # of the run: platform.config.identity
    configuration: str  # hash of the whole configuration
    plan: dict[str, Any]  # Plan.to_dict
    values: dict[str, Any] = field(default_factory=dict)  # state that is not a tensor: loss scale, counters
    versions: dict[str, str] = field(default_factory=dict)  # library -> version


class Stored(NamedTuple):
    """A block in a file: its bytes are [at, at + size) of the file, row-major and little-endian."""

    box: Box
    file: str
    at: int
    sha256: str


@dataclass(frozen=True)
class StoredTensor:
    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[Stored, ...]

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    def nbytes(self, block: Stored) -> int:
        return block.box.size * self.itemsize


@dataclass(frozen=True)
class Manifest:
    meta: Meta
    files: dict[str, int]  # name -> bytes
    tensors: dict[str, StoredTensor]

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())

    @classmethod
    def of(cls, meta: Meta, reports: Iterable[Mapping[str, Any]]) -> Manifest:
        """Puts together what the workers report; see `Image.write`."""
        files: dict[str, int] = {}
        kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        blocks: dict[str, list[Stored]] = {}
        for report in reports:
            files[report["file"]] = report["bytes"]
            for name, dtype, shape, offset, extent, at, sha256 in report["blocks"]:
                if kinds.setdefault(name, (dtype, tuple(shape))) != (dtype, tuple(shape)):
                    raise Refused(f"{name} has several shapes or types in the workers' reports")
                stored = Stored(Box(tuple(offset), tuple(extent)), report["file"], at, sha256)
                blocks.setdefault(name, []).append(stored)
        tensors = {n: StoredTensor(*kinds[n], tuple(sorted(found))) for n, found in blocks.items()}
        return cls(meta, files, tensors)

    def faults(self) -> list[str]:
        """What is impossible in it, one line each: holes, overlaps, bytes of a file in no block or in two."""
        lines = [
            f"{name}: {line}" for name, t in self.tensors.items() for line in gaps(t.shape, [b.box for b in t.blocks])
        ]
        spans: dict[str, list[tuple[int, int]]] = {name: [] for name in self.files}
        for t in self.tensors.values():
            for b in t.blocks:
                spans.setdefault(b.file, []).append((b.at, b.at + t.nbytes(b)))
        for name, found in spans.items():
            size = self.files.get(name, -1)
            ends = [(0, 0), *sorted(found), (size, size)]
            if any(end != start for (_, end), (start, _) in pairwise(ends)):
                lines.append(f"{name}: its blocks are not its bytes, one after the other")
        return lines

    def encode(self) -> bytes:
        """Raises ValueError for metadata that JSON cannot hold, NaN among it."""
        tensors = ",\n".join(
            _json({"name": n, "dtype": t.dtype, "shape": t.shape, "blocks": t.blocks}) for n, t in self.tensors.items()
        )
        body = (
            f'{{\n"kind": {_json(KIND)},\n"format": {FORMAT},\n"meta": {_json(asdict(self.meta))},\n'
            f'"files": {_json(self.files)},\n"tensors": [\n{tensors}\n],\n'
        ).encode()
        return body + _seal(body)

    @classmethod
    def decode(cls, raw: bytes) -> Manifest:
        """Raises Refused with the reason, Corrupt where the bytes are not those that were written."""
        body = raw[: raw.rfind(b'"sha256": ')]
        if raw != body + _seal(body):
            raise Corrupt(f"{NAME} is torn or damaged: its SHA-256 does not hold")
        try:
            found = json.loads(raw)
            if found["kind"] != KIND:
                raise Refused(f"{NAME} is not of this platform")
            if found["format"] > FORMAT:
                raise Newer(f"format {found['format']} is newer than {FORMAT}, the newest that this version reads")
            return cls(Meta(**found["meta"]), _files(found["files"]), dict(map(_tensor, found["tensors"])))
        except (KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"{NAME} is malformed: {type(error).__name__}: {error}") from None


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _seal(body: bytes) -> bytes:
    """The last line. Every later format ends with it too."""
    return f'"sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


def _files(found: dict[str, int]) -> dict[str, int]:
    if strange := [name for name in found if not re.fullmatch(r"[\w-]+\.bin", name)]:
        raise ValueError(f"{strange[0]!r} is not the name of a block file")  # it could lead out of the directory
    return found


def _tensor(found: Mapping[str, Any]) -> tuple[str, StoredTensor]:
    if found["dtype"] not in DTYPES:
        raise ValueError(f"{found['name']}: unknown type {found['dtype']!r}")
    blocks = (Stored(Box(*map(tuple, box)), file, at, sha256) for box, file, at, sha256 in found["blocks"])
    return found["name"], StoredTensor(found["dtype"], tuple(found["shape"]), tuple(blocks))


def check_against(manifest: Manifest, tensors: Mapping[str, Sequence[int]]) -> None:
    """Raises Refused where `tensors`, name -> global shape, are not what the manifest holds."""
    wrong = [f"has no {n}" for n in tensors if n not in manifest.tensors] + [
        f"{n} is {list(manifest.tensors[n].shape)} there, {list(shape)} here"
        for n, shape in tensors.items()
        if n in manifest.tensors and manifest.tensors[n].shape != tuple(shape)
    ]
    if wrong:
        raise Refused(wrong[0] + (f", and {len(wrong) - 1} more" if wrong[1:] else ""))

"""The manifest: a checkpoint's contents as one JSON document whose last line is the SHA-256 of the lines before it.
`FileReport` is a worker's report on its file; nothing here imports torch, as the driver reads it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from platform.boundary import documents, schema
from platform.boundary.schema import EntryBounds, Malformed, OneOf, OpenMap, Span, Text
from platform.boundary.sealed_blocks import LARGEST_BLOCK
from platform.checkpoint.blocks import ITEMSIZE, Box, Shapes, find_tiling_faults

KIND = "elastic-platform checkpoint"
FORMAT = 2  # the one that is written and read: tests/checkpoint/format_2 is in it, and stays readable
NAME = "manifest.json"
LARGEST = 256 << 20  # bytes of a manifest: about two million blocks, 30 TB
VALUES = 1 << 25  # JSON values in a manifest

SampleCount = Annotated[int, Span(0, 10**18)]
Bytes = Annotated[int, Span(0, 1 << 60)]
File = Annotated[str, Text(r"[A-Za-z0-9_-]{1,200}\.bin", "the name of a block file")]  # stays in its folder
Name = Annotated[str, Text(r"[^\x00-\x1f\x7f-\x9f]{1,1000}", "a name")]
TensorShape = Annotated[tuple[Annotated[int, Span(1, 1 << 48)], ...], EntryBounds(0, 16)]
PLAN = OpenMap((("mesh", dict[Name, Annotated[int, Span(1, 1 << 31)]]), ("scheme", str)))  # fields that are read


class Refused(Exception):
    """Signals that a checkpoint cannot be used; the message is the reason, in one line."""


class Corrupt(Refused):
    """Signals a damaged checkpoint, which can never be used: its bytes are not the written ones."""


class OtherFormat(Refused):
    """Signals a checkpoint in a newer or older format, which only another version of the platform can use."""


@dataclass(frozen=True)
class Meta:
    """Metadata of a checkpoint, all but its tensors: plain JSON data, without NaN or infinities."""

    step: Annotated[int, Span(0, 10**15)]  # updates done
    samples: SampleCount  # consumed of the global order: the data position
    seed: Annotated[int, Span(0, schema.LARGEST)]
    corpus: str  # hash of the tokenised corpus
    identity: dict[str, Any]  # of the run: platform.config.identity.run_identity
    configuration: str  # hash of the whole configuration
    plan: Annotated[dict[str, Any], PLAN]  # its mesh, scheme and digest
    values: dict[str, Any] = field(default_factory=dict)  # state that is not a tensor: loss scale, counters
    versions: dict[str, str] = field(default_factory=dict)  # library -> version
    format: int = FORMAT  # of the checkpoint that the tensors were first written to

    @classmethod
    def parse_json(cls, document: Any) -> Meta:
        """Read a checkpoint's metadata from JSON data. Raises OtherFormat, also if it has no format, or Malformed."""
        if type(document) is dict:
            _check_format(document.get("format", 1))
        return schema.parse_value(cls, document)


class StoredBlock(NamedTuple):
    """Block in a file: its bytes are [at, at + size) of the file, row-major and little-endian."""

    box: Box
    file: File
    at: Bytes
    sha256: Annotated[str, Text(r"[0-9a-f]{64}", "a SHA-256")]


@dataclass(frozen=True)
class StoredTensor:
    """Global tensor and the blocks of which it is stored."""

    name: Name
    dtype: Annotated[str, OneOf(tuple(ITEMSIZE), "type")]
    shape: TensorShape
    blocks: tuple[StoredBlock, ...]

    @property
    def itemsize(self) -> int:
        """Return the bytes of one element of this tensor of a checkpoint."""
        return ITEMSIZE[self.dtype]

    def block_bytes(self, block: StoredBlock) -> int:
        """Return the bytes that one of this tensor's blocks takes in a checkpoint's file."""
        return block.box.num_elements * self.itemsize


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint: its metadata, its files of blocks and the tensors in them."""

    meta: Meta
    files: dict[str, int]  # name -> bytes
    tensors: dict[str, StoredTensor]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all block files of the checkpoint."""
        return sum(self.files.values())

    @classmethod
    def build_from_reports(cls, meta: Meta, reports: Iterable[FileReport]) -> Manifest:
        """Assemble a checkpoint's manifest from its metadata and the workers' reports on their block files
        (`FileImage.write_file`). Raises Refused if they contradict each other."""
        files: dict[str, int] = {}
        kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        blocks: dict[str, list[StoredBlock]] = {}
        for report in reports:
            files[report.file] = report.bytes
            for name, dtype, shape, box, at, sha256 in report.blocks:
                if kinds.setdefault(name, (dtype, shape)) != (dtype, shape):
                    raise Refused(f"{name} has several shapes or types in the workers' reports")
                blocks.setdefault(name, []).append(StoredBlock(box, report.file, at, sha256))
        tensors = {n: StoredTensor(n, *kinds[n], tuple(sorted(stored_blocks))) for n, stored_blocks in blocks.items()}
        return cls(meta, files, tensors)

    def list_faults(self) -> list[str]:
        """Return the faults of a checkpoint with this manifest, one line each: holes and overlaps in a tensor, bytes of
        a file in no block or in two, and blocks larger than any that is ever written, which a reader would have to hold
        as a whole."""
        faults = {name: find_tiling_faults(t.shape, [b.box for b in t.blocks]) for name, t in self.tensors.items()}
        lines = [f"{name}: {line}" for name, tensor_faults in faults.items() for line in tensor_faults]
        largest = {name: max(map(t.block_bytes, t.blocks), default=0) for name, t in self.tensors.items()}
        too_large = {name: size for name, size in largest.items() if size > 2 * LARGEST_BLOCK}
        lines += [f"{name}: a block of {size} bytes is too large" for name, size in too_large.items()]
        spans: dict[str, list[tuple[int, int]]] = {name: [] for name in self.files}
        for t in self.tensors.values():
            for b in t.blocks:
                spans.setdefault(b.file, []).append((b.at, b.at + t.block_bytes(b)))
        for name, file_spans in spans.items():
            size = self.files.get(name, -1)
            ends = [(0, 0), *sorted(file_spans), (size, size)]
            if any(end != start for (_, end), (start, _) in pairwise(ends)):
                lines.append(f"{name}: its blocks are not its bytes, one after the other")
        return lines

    def encode(self) -> bytes:
        """Return a checkpoint's manifest as the bytes of `manifest.json`, sealed by their SHA-256. Raises ValueError
        for metadata that JSON cannot hold, such as NaN."""
        tensors = ",\n".join(_dump_json(vars(t)) for t in self.tensors.values())
        body = (
            f'{{\n"kind": {_dump_json(KIND)},\n"format": {FORMAT},\n"meta": {_dump_json(asdict(self.meta))},\n'
            f'"files": {_dump_json(self.files)},\n"tensors": [\n{tensors}\n],\n'
        ).encode()
        return body + _seal_line(body)

    @classmethod
    def decode(cls, raw: bytes) -> Manifest:
        """Parse the bytes of a checkpoint's `manifest.json`. Raises Corrupt if they are damaged: they do not have the
        SHA-256 in their last line, or a field is malformed; OtherFormat if their format is not FORMAT; else Refused if
        another program wrote them."""
        body = raw[: raw.rfind(b'"sha256": ')]
        if raw != body + _seal_line(body):
            raise Corrupt(f"{NAME} is torn or damaged: its SHA-256 does not hold")
        try:
            raw_fields = documents.parse_json(raw, LARGEST, VALUES)
            if type(raw_fields) is not dict or raw_fields.get("kind") != KIND:
                raise Refused(f"{NAME} is not of this platform")
            _check_format(raw_fields.get("format"))
            meta = Meta.parse_json(raw_fields.pop("meta", None))
            document = schema.parse_value(_Document, raw_fields)
            tensors = {t.name: t for t in document.tensors}
            if len(tensors) < len(document.tensors):
                raise Malformed("two tensors of one name")
            return cls(meta, document.files, tensors)
        except Malformed as error:
            raise Corrupt(f"{NAME} is malformed: {error}") from None


def _check_format(version: Any) -> None:
    """Raise OtherFormat for a checkpoint's format that an earlier version wrote or a later one may write."""
    if type(version) is int and version > FORMAT:
        newer = schema.shorten_value(version)
        raise OtherFormat(f"format {newer} is newer than {FORMAT}, the newest that this version reads")
    if type(version) is int and 0 < version < FORMAT:
        raise OtherFormat(f"format {version} is older than {FORMAT}, the oldest that this version reads")


def _dump_json(value: Any) -> str:
    """Return a part of a checkpoint's manifest as JSON text; raises ValueError for NaN and infinities."""
    return json.dumps(value, allow_nan=False)


def _seal_line(body: bytes) -> bytes:
    """Return the last line of a checkpoint's manifest: the SHA-256 of the lines before it (`body`)."""
    return f'"sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


@dataclass(frozen=True)
class _Document:
    """JSON document without its metadata."""

    kind: str
    format: Annotated[int, Span(FORMAT, FORMAT)]
    files: dict[File, Bytes]
    tensors: list[StoredTensor]
    sha256: str


def check_tensors(manifest: Manifest, tensors: Shapes) -> None:
    """Raise Refused if a checkpoint's manifest lacks any of `tensors` (name -> global shape) or has other shapes."""
    mismatches = [f"has no {n}" for n in tensors if n not in manifest.tensors]
    pairs = [(n, manifest.tensors[n].shape, tuple(shape)) for n, shape in tensors.items() if n in manifest.tensors]
    mismatches += [f"{n} is {list(saved)} there, {list(shape)} here" for n, saved, shape in pairs if saved != shape]
    refuse_faults(mismatches)


def refuse_faults(faults: Sequence[str]) -> None:
    """Raise Refused with the first of a checkpoint's faults and the number of further ones, if there is any."""
    if faults:
        raise Refused(faults[0] + (f", and {len(faults) - 1} more" if faults[1:] else ""))


class BlockReport(NamedTuple):
    """Block `box` of the global tensor `name`: its bytes begin at `at` of the file and have the hash `sha256`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    at: int
    sha256: str


@dataclass(frozen=True)
class FileReport:
    """Content of one worker's block file, of `bytes` bytes."""

    file: str
    bytes: int
    blocks: list[BlockReport]

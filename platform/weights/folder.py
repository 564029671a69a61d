"""A folder of safetensors with a config.json, as transformers saves a model: its headers, and pieces of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from platform.boundary import documents, schema
from platform.boundary.files.file_storage import Storage, open_storage
from platform.boundary.files.sealed import LARGEST_BLOCK, THREADS
from platform.boundary.redaction import bare_url
from platform.boundary.refusals import ConfigError, violation
from platform.boundary.schema import Malformed, OpenMap, Text
from platform.checkpoint.blocks.box import Box
from platform.checkpoint.blocks.chain import shares
from platform.checkpoint.blocks.placement import HeldTensor, Piece
from platform.checkpoint.interchange import ForeignTensor, read_header, split_file
from platform.checkpoint.storage.manifest import Name, Refused
from platform.weights.names import MatrixPart, Stored

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
LARGEST_CONFIG, LARGEST_INDEX = 1 << 20, 64 << 20  # bytes
_VALUES = 1 << 21  # of an index: two for each tensor
_HEADERS: dict[tuple[str, ...], dict[str, tuple[str, ForeignTensor]]] = {}  # by the versions of files: the last model's

_File = Annotated[str, Text(r"[\w.-]{1,250}\.safetensors", "the name of a safetensors file")]  # stays in its folder

_Index = Annotated[dict[str, object], OpenMap((("weight_map", dict[Name, _File]),), ("weight_map",))]


class Place(NamedTuple):
    """Bytes [start, end) of a file of a folder, and how they hold a piece: as they are, or (`width` > 0) as rows of so
    many elements, of which columns [first, last), every `step`-th, are the piece turned."""

    file: str
    start: int
    end: int
    width: int = 0
    first: int = 0
    last: int = 0
    step: int = 1


class SavedModel:
    """Model as transformers saves it, at a path or URL `source`: a folder, or one safetensors file beside a
    config.json. `config`: its config.json; `tensors`: name -> (file, description); `place`: the path or URL of its
    folder.

    Raises ConfigError, in one line that names `key` and the source, for what cannot be read or is malformed.
    """

    def __init__(self, source: str, key: str = "source"):
        """Open the model that transformers saved at a path or URL: read its config.json and the headers of its tensors.
        `key`: the configuration key or argument that refusals name."""
        self.url, self._key = bare_url(source), key
        try:
            self._folder, only = _opened(source)
            self.place = source.rstrip("/").rpartition("/")[0] or "." if only else source
            there = self._folder.list("")
            self.config = self._config(there)
            files = [only] if only else self._files(there)
            self.tensors = self._tensors({file: there.get(file) for file in files})
        except (Malformed, Refused, OSError) as error:
            raise self.refused(str(error)) from None

    def small(self, name: str) -> bytes:
        """Return a small file beside the saved weights; b"" if it is missing or larger than a config.json may be."""
        size = self._folder.list("").get(name, 0)
        return bytes(self._folder.read(name)) if 0 < size <= LARGEST_CONFIG else b""

    def refused(self, why: str) -> ConfigError:
        """Return the ConfigError that refuses this saved model for the reason `why`."""
        return ConfigError(violation(self._key, self.url, why))

    def _config(self, there: dict[str, int]) -> dict[str, Any]:
        """Read config.json of the saved model as a map; raises Refused if it is missing or malformed. `there`: name ->
        bytes of the folder's files."""
        if CONFIG not in there:
            raise Refused(f"holds no {CONFIG}")
        raw = self._folder.read(CONFIG, 0, LARGEST_CONFIG + 1)
        try:
            return schema.read(dict[str, Any], documents.from_json(raw, LARGEST_CONFIG))
        except Malformed as error:
            raise Refused(f"{CONFIG}: {error}") from None

    def _files(self, there: dict[str, int]) -> list[str]:
        """Return the names of the safetensors files with the model's weights: all in the index, else model.safetensors,
        else the only one in the folder. `there`: name -> bytes of the folder's files. Raises Refused if that is
        ambiguous."""
        if INDEX in there:
            try:
                raw = self._folder.read(INDEX, 0, LARGEST_INDEX + 1)
                index: dict[str, Any] = schema.read(_Index, documents.from_json(raw, LARGEST_INDEX, _VALUES))
            except Malformed as error:
                raise Refused(f"{INDEX}: {error}") from None
            return sorted(set(index["weight_map"].values()))
        if SINGLE in there:
            return [SINGLE]
        found = sorted(name for name in there if name.endswith(".safetensors"))
        if len(found) != 1:
            raise Refused(f"holds {'several files' if found else 'no file'} of safetensors, and no {INDEX}")
        return found

    def _tensors(self, files: dict[str, int | None]) -> dict[str, tuple[str, ForeignTensor]]:
        """Return the saved model's tensors, name -> (file, description), from its files; cached until one changes."""
        versions = [f"{file} {size} {self._folder.version(file)}" for file, size in files.items() if size is not None]
        key = self._folder.url, *versions
        if len(versions) < len(files) or key not in _HEADERS:
            _HEADERS.clear()
            _HEADERS[key] = dict(self._headers([*files]))
        return _HEADERS[key]

    def _headers(self, files: Sequence[str]) -> Iterator[tuple[str, tuple[str, ForeignTensor]]]:
        """Yield each tensor of the safetensors `files` as (name, (file, description)); raises Refused for a name in
        several files."""
        seen: set[str] = set()
        for file in files:
            try:
                _, described = read_header(self._folder, file)
            except (Malformed, Refused) as error:
                raise Refused(f"{file}: {error}") from None
            if twice := sorted(seen & described.keys()):
                raise Refused(f"{', '.join(twice)}: in several files")
            seen |= described.keys()
            yield from ((name, (file, t)) for name, t in described.items())

    def pieces(self, stored: Stored, name: str) -> list[Piece[Place]]:
        """Return the pieces of our parameters in the tensor `stored` of a saved model, called `name` in its files, each
        of at most LARGEST_BLOCK bytes and a row, in the order of the file where it can be."""
        file, t = self.tensors[name]
        dtype, size = str(t.type).removeprefix("torch."), t.type.itemsize
        begin, _ = t.data_offsets
        out: list[Piece[Place]] = []
        for parts in stored.matrices:
            if stored.turned or stored.alternate:
                out += _turned(parts, dtype, Place(file, begin, begin), size, stored.alternate)
                begin += sum(part.rows * part.columns for part in parts) * size
                continue
            for part in parts:
                whole = HeldTensor(f"model.{part.name}", dtype, part.shape, {part.box: (0,)})
                for share in shares([whole], 0):
                    out.append(Piece(whole.name, dtype, share.box, Place(file, begin, begin + share.nbytes)))
                    begin += share.nbytes
        return out

    def fetch(self, wanted: Sequence[Piece[Place]], into: Sequence[Tensor]) -> None:
        """Read pieces of the saved weights from files into the memory of each, uint8 [bytes]; Refused, OSError."""
        with ThreadPoolExecutor(THREADS, "weights-read") as pool:
            for _ in pool.map(self._read, wanted, into):
                pass

    def _read(self, piece: Piece[Place], memory: Tensor) -> None:
        """Read the bytes of a piece of the saved weights into `memory`, uint8 [bytes], transposed where its place says
        so."""
        place = piece.source
        data = self._folder.read(place.file, place.start, place.end)
        if len(data) != place.end - place.start:
            raise Refused(f"{self.url}/{place.file} is shorter than its header says")
        if not data:
            return
        found = torch.frombuffer(data, dtype=torch.uint8)
        if place.width:
            size = piece.nbytes // piece.box.size
            rows = found.view(-1, place.width, size)[:, place.first : place.last : place.step].transpose(0, 1)
            memory.view(len(rows), -1, size).copy_(rows)
        else:
            memory.copy_(found)

    def equal(self, one: str, other: str) -> bool:
        """Return True if two tensors of the saved model, by their names in its files, are equal in every bit."""
        (file, t), (other_file, u) = self.tensors[one], self.tensors[other]
        if (t.type, t.shape) != (u.type, u.shape):
            return False
        nbytes = prod(t.shape) * t.type.itemsize
        for a in range(0, nbytes, LARGEST_BLOCK):
            b = min(nbytes, a + LARGEST_BLOCK)
            parts = ((f, tensor.data_offsets[0]) for f, tensor in ((file, t), (other_file, u)))
            left, right = (self._folder.read(f, begin + a, begin + b) for f, begin in parts)
            if left != right:
                return False
        return True


def is_saved(url: str) -> bool:
    """Return True if a URL is a model that transformers saved, not checkpoints; raises OSError, ConfigError."""
    return url.rstrip("/").endswith(".safetensors") or CONFIG in open_storage(url, "source").list("")


def _opened(source: str) -> tuple[Storage, str]:
    """Open the folder of a model that transformers saved; return it, and the .safetensors file in `source`, or ""."""
    if source.rstrip("/").endswith(".safetensors"):
        return split_file(source)
    return open_storage(source, "source"), ""


def _turned(
    parts: Sequence[MatrixPart], dtype: str, begin: Place, size: int, alternate: bool
) -> Iterator[Piece[Place]]:
    """Yield the pieces of our parameters in a matrix of a saved model that is stored with columns first, from `begin`
    on, in elements of `size` bytes; `alternate`: a row of each in turn."""
    width, columns = sum(part.rows for part in parts), parts[0].columns
    unit = _unit(parts[0])
    step = max(1, LARGEST_BLOCK // (width * size * unit)) * unit
    for a in range(0, columns, step):
        b, row = min(columns, a + step), 0
        start, end = (begin.start + at * width * size for at in (a, b))
        for number, part in enumerate(parts):
            rows = (number, width, len(parts)) if alternate else (row, row + part.rows, 1)
            yield Piece(f"model.{part.name}", dtype, _columns(part, a, b), Place(begin.file, start, end, width, *rows))
            row += part.rows


def _first_column(part: MatrixPart) -> int:
    """Return the first dim of our parameter whose indices are columns, not rows, of its matrix in a saved model."""
    extent = part.box.extent
    return max(i for i in range(len(extent) + 1) if prod(extent[:i]) == part.rows)


def _unit(part: MatrixPart) -> int:
    """Return the width of one index of a first column dim in a weight's saved matrix: d_kv for heads, else 1."""
    return prod(part.box.extent[_first_column(part) + 1 :])


def _columns(part: MatrixPart, a: int, b: int) -> Box:
    """Return the block of our parameter that is in columns [a, b), whole heads, of its matrix in a saved model."""
    first, unit = _first_column(part), _unit(part)
    offset, extent = list(part.box.offset), list(part.box.extent)
    if first < len(extent):
        offset[first], extent[first] = offset[first] + a // unit, (b - a) // unit
    return Box(tuple(offset), tuple(extent))

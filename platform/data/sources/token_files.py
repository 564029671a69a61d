"""Files of tokens that somebody else made: Megatron-LM's .bin with its .idx, and the plain .bin of nanoGPT and llm.c.

They are read and written where they lie: a `TokenFile` says where the tokens of a .bin file are, in which type.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from platform.boundary.documents import open_regular
from platform.config.fields import ConfigError, Data
from platform.data.sources.data_files import DataFile, RemoteFile, find_files, naming_file

_MAGIC = b"MMIDIDX\0\0"  # of Megatron-LM's .idx
_COUNTS = struct.Struct("<9sQBQQ")  # magic, version, code of the type, sequences, documents and one
_CODES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_HEADER = 1024  # bytes of llm.c's header: 256 int32, of which the first are magic, version, tokens
_MAGICS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # of llm.c: for GPT-2, for Llama 3
_DTYPES = {"uint16": "<u2", "uint32": "<u4", "int32": "<i4", "int64": "<i8", "uint8": "|u1"}
ENDINGS = [".bin", ".jsonl", ".parquet", ".arrow"]  # of the files of data=tokens in a folder
_AT_ONCE = 1 << 22  # tokens that are read at once
Positions = NDArray[np.int64]


@dataclass(frozen=True)
class TokenFile:
    """Place of the tokens of a .bin file: `count` integers of type `dtype` from byte `offset` on. `starts`: the tokens
    at which its documents begin, if an index says so."""

    file: Path
    dtype: str
    offset: int
    count: int
    starts: Positions | None = None

    def tokens(self) -> NDArray[np.integer]:
        """Return the tokens, mapped into memory."""
        if not self.count:
            return np.empty(0, self.dtype)
        return np.memmap(self.file, self.dtype, "r", self.offset, (self.count,)).view(np.ndarray)

    def largest(self) -> int:
        """Return the largest token, -1 if there is none. Raises ConfigError for a negative one."""
        tokens, most = self.tokens(), -1
        for start in range(0, self.count, _AT_ONCE):
            part = tokens[start : start + _AT_ONCE]
            if (least := int(part.min())) < 0:
                raise ConfigError(
                    f"token {start + int(part.argmin())} is {least}: of another type; data.dtype says which"
                )
            most = max(most, int(part.max()))
        return most


def token_files(data: Data) -> list[DataFile]:
    """Find the files of data=tokens: .bin, or records that hold lists of tokens in field `data.field`. Raises
    ConfigError."""
    if not data.path:
        raise ConfigError("data.path: data=tokens needs a file, a folder or a glob")
    return [file for file in find_files("data.path", data.path, ENDINGS) if not file.name.endswith(".idx")]


def index_of(file: Path) -> Path | None:
    """Return the .idx beside a .bin file, None if there is none."""
    found = file.with_suffix(".idx")
    return found if found.is_file() else None


def locate(file: DataFile, data: Data) -> TokenFile:
    """Find the tokens in a .bin file. Raises ConfigError, naming the file, if it is none, or not whole."""
    with naming_file(file):
        if isinstance(file, RemoteFile):
            raise ConfigError("a .bin is read in place: copy it to a path, or mount its storage")
        size, head = _size_and_head(file)
    if index := index_of(file):
        with naming_file(index):
            return _megatron(file, index, size)
    with naming_file(file):
        if len(head) == 12 and (known := _MAGICS.get(int(np.frombuffer(head, "<i4")[0]))):
            return _llm_c(file, np.frombuffer(head, "<i4"), *known, size)
        dtype = np.dtype(_DTYPES[data.dtype])
        if size % dtype.itemsize:
            raise ConfigError(f"{size} bytes are no whole number of tokens of data.dtype={data.dtype}")
        return TokenFile(file, dtype.str, 0, size // dtype.itemsize)


def _size_and_head(file: Path) -> tuple[int, bytes]:
    """Return the size of a file in bytes, and its first 12 bytes."""
    with open_regular(file) as raw:
        size = raw.seek(0, 2)
        raw.seek(0)
        return size, raw.read(12)


def _llm_c(file: Path, header: NDArray[np.integer], version: int, dtype: str, size: int) -> TokenFile:
    """Find the tokens of llm.c's .bin of `size` bytes, whose `header` begins with magic, version and tokens."""
    count = int(header[2])
    if int(header[1]) != version:
        raise ConfigError(f"version {header[1]} of llm.c's format is not known, {version} is")
    if size != (wanted := _HEADER + count * np.dtype(dtype).itemsize):
        raise ConfigError(f"{size} bytes, where {count} tokens of llm.c's format take {wanted}")
    return TokenFile(file, dtype, _HEADER, count)


def _megatron(file: Path, index: Path, size: int) -> TokenFile:
    """Find the tokens of Megatron-LM's .bin of `size` bytes and where its documents begin, by its .idx. Raises
    ConfigError if the two do not fit, or the sequences do not lie end to end."""
    with open_regular(index) as raw:
        head, there = raw.read(_COUNTS.size), raw.seek(0, 2)
    if len(head) < _COUNTS.size or head[: len(_MAGIC)] != _MAGIC:
        raise ConfigError("no index of Megatron-LM: its first bytes are others")
    _, version, code, sequences, documents = _COUNTS.unpack(head)
    if version != 1 or code not in _CODES:
        raise ConfigError(f"version {version} and type {code} of Megatron-LM's format are not known")
    itemsize, ends = np.dtype(_CODES[code]).itemsize, _COUNTS.size + 12 * sequences + 8 * documents
    if there not in (ends, ends + sequences):  # the last part, of one byte each, is that of other modes
        raise ConfigError(f"{there} bytes, where {sequences} sequences and {documents} documents take {ends}")
    lengths = np.memmap(index, "<i4", "r", _COUNTS.size, (sequences,)) if sequences else np.empty(0, "<i4")
    pointers, bounds = (
        np.memmap(index, "<i8", "r", start, (n,)) if n else np.empty(0, "<i8")
        for start, n in ((_COUNTS.size + 4 * sequences, sequences), (_COUNTS.size + 12 * sequences, documents))
    )
    first = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if (lengths < 0).any() or not np.array_equal(pointers, first[:-1] * itemsize):
        raise ConfigError("its sequences do not lie end to end in the .bin")
    if size != first[-1] * itemsize:
        raise ConfigError(f"it tells of {first[-1] * itemsize} bytes of tokens, and {file.name} has {size}")
    if not documents or bounds[0] != 0 or bounds[-1] != sequences or (np.diff(bounds) < 0).any():
        raise ConfigError("its documents are not made of its sequences")
    return TokenFile(file, _CODES[code], 0, int(first[-1]), np.unique(first[bounds[:-1]]))


def write_megatron(path: Path, documents: Iterable[NDArray[np.integer]], vocab: int) -> None:
    """Write documents of tokens as PATH.bin and PATH.idx, as Megatron-LM reads them. Raises OSError."""
    code = 8 if vocab <= 1 << 16 else 4
    dtype, lengths = np.dtype(_CODES[code]), []
    with path.with_name(f"{path.name}.bin").open("wb") as file:
        for document in documents:
            file.write(document.astype(dtype).tobytes())
            lengths.append(len(document))
    sizes = np.array(lengths, "<i4")
    pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * dtype.itemsize
    with path.with_name(f"{path.name}.idx").open("wb") as file:
        file.write(_COUNTS.pack(_MAGIC, 1, code, len(sizes), len(sizes) + 1))
        for part in (sizes, pointers.astype("<i8"), np.arange(len(sizes) + 1, dtype="<i8")):
            file.write(part.tobytes())


def write_nanogpt(path: Path, documents: Iterable[NDArray[np.integer]], vocab: int) -> None:
    """Write documents of tokens end to end as PATH.bin, as nanoGPT reads it; a vocabulary above 65,536 entries, which
    it cannot read, in llm.c's format for Llama 3. Raises OSError."""
    with path.with_name(f"{path.name}.bin").open("wb") as file:
        if vocab <= 1 << 16:
            _append(file, documents, "<u2")
            return
        file.write(bytes(_HEADER))
        if (count := _append(file, documents, "<u4")) >= 1 << 31:
            raise ConfigError(f"{path}.bin: {count} tokens, of which llm.c's format may have {(1 << 31) - 1}")
        file.seek(0)
        file.write(np.array([20240801, 7, count], "<i4").tobytes())


def _append(file: BinaryIO, documents: Iterable[NDArray[np.integer]], dtype: str) -> int:
    """Write documents of tokens as integers of a type, and return how many tokens they have."""
    count = 0
    for document in documents:
        file.write(document.astype(dtype).tobytes())
        count += len(document)
    return count


WRITERS = {"megatron": write_megatron, "nanogpt": write_nanogpt}

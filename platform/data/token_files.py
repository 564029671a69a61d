"""Source of tokens made by other programs: .bin files, read where they lie (Megatron-LM's with its .idx, the plain ones
of nanoGPT and llm.c), and records that hold lists of tokens."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from platform.boundary.documents import open_regular_file
from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data import data_files, source_kind
from platform.data.data_files import ROWS, DataFile, content_hash, file_size, name_file_in_errors, uncompressed_suffix
from platform.data.source_kind import KINDS, Documents, Encoded, SourceKind, describe_splits, is_streamed
from platform.data.tokenizer import Vocabulary
from platform.plan.layout import format_count

_MAGIC = b"MMIDIDX\0\0"  # of Megatron-LM's .idx
_COUNTS = struct.Struct("<9sQBQQ")  # magic, version, code of the type, sequences, documents and one
_CODES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_HEADER = 1024  # bytes of llm.c's header: 256 int32, of which the first are magic, version, tokens
_MAGICS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # of llm.c: for GPT-2, for Llama 3
_DTYPES = {"uint16": "<u2", "uint32": "<u4", "int32": "<i4", "int64": "<i8", "uint8": "|u1"}
ENDINGS = [".bin", ".jsonl", ".parquet", ".arrow"]  # of the files of data=tokens in a folder
_AT_ONCE = 1 << 22  # tokens that are read at once
_STRETCHES = 16  # of a .bin that is not read as a whole: as many stretches of _AT_ONCE tokens
_INDEX = 4 << 30  # most bytes of an .idx, which is held in memory
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

    def map_tokens(self) -> NDArray[np.integer]:
        """Return the token ids of a .bin file as an array mapped into memory."""
        if not self.count:
            return np.empty(0, self.dtype)
        return np.memmap(self.file, self.dtype, "r", self.offset, (self.count,)).view(np.ndarray)

    def check_tokens(self, vocab: int, whole: bool) -> None:
        """Raise ConfigError if a token in this .bin file is not in a vocabulary of `vocab` entries. `whole`: True to
        check the whole file; False to check stretches of it, spread evenly from the first to the last token."""
        tokens, largest, largest_position = self.map_tokens(), 0, 0
        starts = range(0, self.count, _AT_ONCE)
        if not whole and len(starts) > _STRETCHES:
            starts = range(0, self.count - _AT_ONCE + 1, (self.count - _AT_ONCE) // (_STRETCHES - 1))
        for start in starts:
            part = tokens[start : start + _AT_ONCE]
            check_token_ids(part, start)
            if (stretch_largest := int(part.max())) > largest:
                largest, largest_position = stretch_largest, start + int(part.argmax())
        check_token_ids(np.array([largest]), largest_position, vocab)


@dataclass(frozen=True)
class CheckedTokens:
    """Tokens of a .bin file, mapped into memory, each of which is checked when it is read, as the file may be too long
    to be read before, and may change. Raises ConfigError for one that a vocabulary of `vocab` entries does not have."""

    tokens: NDArray[np.integer]
    file: Path
    vocab: int

    def __len__(self) -> int:
        """Return the number of tokens in the .bin file."""
        return len(self.tokens)

    def __getitem__(self, index: Positions) -> NDArray[np.integer]:
        """Return the tokens of the .bin file at `index`. Raises ConfigError for one beyond the vocabulary."""
        ids = self.tokens[index]
        with name_file_in_errors(self.file):
            check_token_ids(ids, index, self.vocab)
        return ids


def check_token_ids(ids: NDArray[np.integer], place: Positions | int, vocab: int | None = None) -> None:
    """Raise ConfigError for a negative token id, or one outside a vocabulary of `vocab` entries. `place`: the number of
    each token in its file, or of the first."""
    least, most = (int(ids.min()), int(ids.max())) if ids.size else (0, -1)
    if least >= 0 and (vocab is None or most < vocab):
        return
    where = int(ids.argmin() if least < 0 else ids.argmax())
    number = place + where if isinstance(place, int) else int(place.flat[where])
    if least < 0:
        raise ConfigError(f"token {number} is {least}: of another type; data.dtype says which")
    raise ConfigError(f"token {number} is {most}, and the model has {vocab}; nearest legal: model.vocab={most + 1}")


def find_token_files(data: Data) -> list[DataFile]:
    """Find the files of data=tokens: .bin, or records with lists of tokens in `data.field`. Raises ConfigError."""
    if not data.path:
        raise ConfigError("data.path: data=tokens needs a file, a folder or a glob")
    files = [
        file for file in data_files.find_data_files("data.path", data.path, ENDINGS) if not file.name.endswith(".idx")
    ]
    if is_streamed(data) and not all(uncompressed_suffix(file) in ROWS for file in files):
        reason = ".bin files are read where they lie, without a copy"
        raise ConfigError("data.streaming", True, reason, [False])
    return files


def find_index_file(file: Path) -> Path | None:
    """Return the path of Megatron-LM's .idx file beside a .bin file of tokens, None if there is none."""
    index_path = file.with_suffix(".idx")
    return index_path if index_path.is_file() else None


def locate_tokens(file: DataFile, data: Data) -> TokenFile:
    """Find where the tokens in a .bin file are: their type, offset and number. Raises ConfigError, naming the file, if
    it is no such file, or not whole."""
    with name_file_in_errors(file):
        if isinstance(file, data_files.RemoteFile):
            raise ConfigError("a .bin is read in place: copy it to a path, or mount its storage")
        size, head = _read_size_and_head(file)
    if index := find_index_file(file):
        with name_file_in_errors(index):
            return _locate_megatron_tokens(file, index, size)
    with name_file_in_errors(file):
        if len(head) == 12 and (known := _MAGICS.get(int(np.frombuffer(head, "<i4")[0]))):
            return _locate_llm_c_tokens(file, np.frombuffer(head, "<i4"), *known, size)
        dtype = np.dtype(_DTYPES[data.dtype])
        if size % dtype.itemsize:
            raise ConfigError(f"{size} bytes are no whole number of tokens of data.dtype={data.dtype}")
        located = TokenFile(file, dtype.str, 0, size // dtype.itemsize)
        _refuse_wider_integers(located.map_tokens()[:_AT_ONCE], data.dtype)
        return located


def _refuse_wider_integers(tokens: NDArray[np.integer], dtype: str) -> None:
    """Raise ConfigError if the first tokens of a plain .bin, read as `dtype`, are parts of wider integers: of each 2, 4
    or 8 all are 0 but the first, or the last, which mostly are not."""
    size, filled = tokens.dtype.itemsize, np.flatnonzero(tokens)
    for name in ("int64", "uint32", "uint16"):
        parts = np.dtype(_DTYPES[name]).itemsize // size
        places = np.unique(filled % max(parts, 1))
        if parts < 2 or 2 * parts * len(filled) < max(len(tokens), 32) or len(places) != 1:
            continue
        order = "" if places[0] == 0 else ", once its bytes are in the other order"
        reason = f"all tokens but one in {parts} are 0, read as data.dtype={dtype}"
        raise ConfigError(f"{reason}; nearest legal: data.dtype={name}{order}")


def _read_size_and_head(file: Path) -> tuple[int, bytes]:
    """Return the size of a .bin file of tokens in bytes, and its first 12 bytes, which show its format."""
    with open_regular_file(file) as raw:
        size = raw.seek(0, 2)
        raw.seek(0)
        return size, raw.read(12)


def _locate_llm_c_tokens(file: Path, header: NDArray[np.integer], version: int, dtype: str, size: int) -> TokenFile:
    """Find the tokens in llm.c's .bin of `size` bytes. `header`: its first integers, magic, version and tokens."""
    count = int(header[2])
    if int(header[1]) != version:
        raise ConfigError(f"version {header[1]} of llm.c's format is not known, {version} is")
    if size != (expected_size := _HEADER + count * np.dtype(dtype).itemsize):
        raise ConfigError(f"{size} bytes, where {count} tokens of llm.c's format take {expected_size}")
    return TokenFile(file, dtype, _HEADER, count)


def _locate_megatron_tokens(file: Path, index: Path, size: int) -> TokenFile:
    """Find the tokens of Megatron-LM's .bin of `size` bytes and where its documents begin, by its .idx. Raises
    ConfigError if the two do not fit, or the sequences do not lie end to end."""
    with open_regular_file(index) as raw:
        head, index_size = raw.read(_COUNTS.size), raw.seek(0, 2)
    if index_size > _INDEX:
        raise ConfigError(f"{index_size} bytes of an index, and at most {_INDEX} are read; divide it, and its .bin")
    if len(head) < _COUNTS.size or head[: len(_MAGIC)] != _MAGIC:
        raise ConfigError("no index of Megatron-LM: its first bytes are others")
    _, version, code, sequences, documents = _COUNTS.unpack(head)
    if version != 1 or code not in _CODES:
        raise ConfigError(f"version {version} and type {code} of Megatron-LM's format are not known")
    itemsize, ends = np.dtype(_CODES[code]).itemsize, _COUNTS.size + 12 * sequences + 8 * documents
    if index_size not in (ends, ends + sequences):  # the last part, of one byte each, is that of other modes
        counts = f"{format_count(sequences, 'sequence')} and {format_count(documents, 'document')}"
        raise ConfigError(f"{index_size} bytes, where {counts} take {ends}")
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
    with path.with_name(f"{path.name}.bin").open("wb") as file:
        sizes = np.array(_append_documents(file, documents, _CODES[code]), "<i4")
    pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * np.dtype(_CODES[code]).itemsize
    with path.with_name(f"{path.name}.idx").open("wb") as file:
        file.write(_COUNTS.pack(_MAGIC, 1, code, len(sizes), len(sizes) + 1))
        for part in (sizes, pointers.astype("<i8"), np.arange(len(sizes) + 1, dtype="<i8")):
            file.write(part.tobytes())


def write_nanogpt(path: Path, documents: Iterable[NDArray[np.integer]], vocab: int) -> None:
    """Write documents of tokens end to end as PATH.bin, as nanoGPT reads it; a vocabulary above 65,536 entries, which
    it cannot read, in llm.c's format for Llama 3. Raises OSError."""
    with path.with_name(f"{path.name}.bin").open("wb") as file:
        if vocab <= 1 << 16:
            _append_documents(file, documents, "<u2")
            return
        file.write(bytes(_HEADER))
        if (count := sum(_append_documents(file, documents, "<u4"))) >= 1 << 31:
            raise ConfigError(f"{path}.bin: {count} tokens, of which llm.c's format may have {(1 << 31) - 1}")
        file.seek(0)
        file.write(np.array([20240801, 7, count], "<i4").tobytes())


def _append_documents(file: BinaryIO, documents: Iterable[NDArray[np.integer]], dtype: str) -> list[int]:
    """Write documents, arrays of token ids, to a file as integers of `dtype`; return the number of tokens of each."""
    lengths = []
    for document in documents:
        file.write(document.astype(dtype).tobytes())
        lengths.append(len(document))
    return lengths


WRITERS = {"megatron": write_megatron, "nanogpt": write_nanogpt}


_BATCH = 1024  # documents that are written at once
_WHOLE = 8 << 30  # bytes of the .bin files of a source that are read as a whole before a run; of more, parts of each
Ids = NDArray[np.int64]


def _deciding_values(data: Data, files: Sequence[DataFile]) -> list[Any]:
    """Return the values that name the cache entry of files of tokens: hashes of the files and of their indices, and how
    they are read. Of .bin files too long to be read as a whole, sizes and samples are hashed."""
    reads_whole = _are_bin_files_short([*files, *(held_out_files := source_kind.find_validation_files(data, ENDINGS))])

    def hash_files(some: Sequence[DataFile]) -> list[list[Any]]:
        """Return, for each file of tokens, its format and the hash of its content (or of samples), and its index's."""
        each = [(file, [index] if isinstance(file, Path) and (index := find_index_file(file)) else []) for file in some]
        content = {
            file: content_hash(file)
            if reads_whole or uncompressed_suffix(file) in ROWS
            else data_files.sample_file_content(file)
            for file in some
        }
        return [
            [*map(uncompressed_suffix, [file, *index]), content[file], *map(content_hash, index)]
            for file, index in each
        ]

    return ["tokens", hash_files(files), hash_files(held_out_files), data.field, data.dtype]


def _are_bin_files_short(files: Sequence[DataFile]) -> bool:
    """Return True if .bin files of tokens are short enough to be checked as a whole before a run, not in training."""
    return sum(file_size(file) for file in files if uncompressed_suffix(file) not in ROWS) <= _WHOLE


def _describe_bin_files(
    folder: Path, files: Sequence[DataFile], held_out_files: Sequence[DataFile], data: Data, vocab: int
) -> dict[str, Any]:
    """Describe .bin files of tokens that stay where they are, for a cache entry: `files` to train on, `held_out_files`
    held out. Without held-out files the end of the tokens is held out, from the beginning of a document on if an index
    has the beginnings; these are written to starts.bin in `folder`."""
    bin_files = [locate_tokens(file, data) for file in (*files, *held_out_files)]
    reads_whole = _are_bin_files_short([*files, *held_out_files])
    for file in bin_files:
        with name_file_in_errors(file.file):
            file.check_tokens(vocab, reads_whole)
    ends = [0, *accumulate(file.count for file in bin_files)]
    starts = [file.starts + end for file, end in zip(bin_files, ends, strict=False) if file.starts is not None]
    known = np.concatenate(starts) if len(starts) == len(bin_files) else np.empty(0, np.int64)
    trained = ends[len(files)] if held_out_files else ends[-1] - round(ends[-1] * data.validation)
    if len(known) and not held_out_files:
        trained = int(known[np.searchsorted(known, trained)]) if trained <= known[-1] else ends[-1]
    known.astype("<i8").tofile(folder / "starts.bin")
    return {"arrays": [_describe_bin_place(file) for file in bin_files], "splits": describe_splits(trained, ends[-1])}


def _describe_bin_place(file: TokenFile) -> dict[str, Any]:
    """Describe where the tokens of a .bin file are, for a cache entry: path, type, offset, number, file size."""
    size = file.file.stat().st_size
    path = str(file.file.absolute())
    return {"path": path, "dtype": file.dtype, "offset": file.offset, "count": file.count, "bytes": size}


def read_tokens(
    files: Sequence[DataFile], data: Data, key: str = "data.path", vocab: int = 1 << 31
) -> Iterator[tuple[int, Ids]]:
    """Yield (number, token ids) of each record in data files, from its field `data.field`; empty ones are left out. A
    .bin, which is read in place, is only located. Raises ConfigError, naming the file, by the `key` that leads to it,
    and the place, for a value that is no list of tokens of the vocabulary."""
    number = 0
    for file in files:
        if uncompressed_suffix(file) not in ROWS:
            locate_tokens(file, data)
            continue
        with name_file_in_errors(file, key):
            for place, values in ROWS[uncompressed_suffix(file)](file, [data.field]):
                if data.field not in values:
                    raise ConfigError(f"data.field={data.field} is missing in {place}")
                ids = _parse_token_ids(values[data.field])
                if ids is None:
                    raise ConfigError(f"data.field={data.field} is no list of tokens in {place}")
                if len(ids) and int(ids.min()) < 0:
                    raise ConfigError(f"data.field={data.field} has token {ids.min()} in {place}")
                if len(ids):
                    source_kind.check_largest_id(int(ids.max()), vocab)
                    yield number, ids
                    number += 1


def encode_tokens(vocabulary: Vocabulary | None, documents: Documents, characters: int) -> Iterator[Encoded]:
    """Yield documents that are token ids already, batch by batch: the ids, and where each document begins."""
    while batch := [ids for _, ids in islice(documents, _BATCH)]:
        ends = np.cumsum([len(ids) for ids in batch])
        yield Encoded(np.concatenate(batch), [0, *ends[:-1].tolist()])


def _parse_token_ids(value: Any) -> Ids | None:
    """Return a data record's list of token ids as an int64 array, None if it is no list of integers."""
    if not isinstance(value, list) or not all(type(i) is int and abs(i) < 1 << 62 for i in value):
        return None
    return np.array(value, np.int64)


class TokenKind(SourceKind):
    """Kind of source of tokens made by other programs."""

    def write_cache_entry(
        self, folder: Path, files: Sequence[DataFile], data: Data, vocab: int, existing_vocabulary: Vocabulary | None
    ) -> dict[str, Any]:
        """Build the cache entry of files of tokens: starts.bin, where their documents begin (training ones first), and
        tokens.bin for records; .bin files are only referred to. Return its description. Raises ConfigError, also for
        tokens that a vocabulary of `vocab` entries does not have."""
        held_out_files = self.find_held_out_files(data)
        forms = {uncompressed_suffix(file) in ROWS for file in (*files, *held_out_files)}
        if len(forms) > 1:
            raise ConfigError(f"data.path={data.path}: .bin files beside records of tokens; name either by a glob")
        if True in forms:
            kind = replace(self, read=partial(read_tokens, vocab=vocab))
            return SourceKind.write_cache_entry(kind, folder, files, data, vocab, existing_vocabulary)
        if existing_vocabulary:
            existing_vocabulary.save(folder)
        return _describe_bin_files(folder, files, held_out_files, data, vocab)


KINDS["tokens"] = TokenKind(
    find_token_files, read_tokens, encode_tokens, _deciding_values, endings=ENDINGS, starts=True
)

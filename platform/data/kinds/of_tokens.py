"""Tokens that somebody else made: .bin files, which are read where they lie, and records that hold lists of tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from platform.config.fields import ConfigError, Data
from platform.data.kinds.of_documents import Documents, Encoded, Form, write_documents
from platform.data.kinds.source_kind import SourceKind, check_largest, checked, held_files
from platform.data.sources.data_files import DataFile, content_hash, ending, naming_file
from platform.data.sources.record_files import ROWS
from platform.data.sources.token_files import ENDINGS, TokenFile, index_of, locate, token_files
from platform.data.vocabulary import Vocabulary

_BATCH = 1024  # documents that are written at once
Ids = NDArray[np.int64]


def _held(data: Data) -> list[DataFile]:
    return held_files(data, ENDINGS)


def _check(data: Data) -> list[str]:
    """Return one refusal line per mistake in files of tokens that shows without reading them all."""
    lines = checked(token_files, data) or checked(_held, data)
    for file in [] if lines else [*token_files(data), *_held(data)]:
        lines += checked(lambda data, file=file: _begin(file, data), data)  # type: ignore[misc]
    return lines


def _begin(file: DataFile, data: Data) -> None:
    """Read the beginning of a file of tokens. Raises ConfigError for a fault in it."""
    next(read_tokens([file], data), None) if ending(file) in ROWS else locate(file, data)


def _options(data: Data, files: Sequence[DataFile]) -> list[Any]:
    """Return what decides which tokens files hold: the contents of them and of their indices, and how they are read."""

    def hashes(some: Sequence[DataFile]) -> list[list[str]]:
        each = [[file, *([index] if isinstance(file, Path) and (index := index_of(file)) else [])] for file in some]
        return [[ending(file) for file in files] + [content_hash(file) for file in files] for files in each]

    return ["tokens", hashes(files), hashes(_held(data)), data.field, data.dtype]


def _write(folder: Path, files: Sequence[DataFile], data: Data, vocab: int, given: Vocabulary | None) -> dict[str, Any]:
    """Build the cache entry of files of tokens: starts.bin, where their documents begin (training ones first), and
    tokens.bin for records; .bin files are only named. Return its description. Raises ConfigError, for tokens that a
    vocabulary of `vocab` entries does not have too."""
    others = _held(data)
    forms = {ending(file) in ROWS for file in (*files, *others)}
    if len(forms) > 1:
        raise ConfigError(f"data.path={data.path}: .bin files beside records of tokens; name either by a glob")
    if True in forms:
        form = replace(RECORDS, read=partial(read_tokens, vocab=vocab))
        return write_documents(form, folder, files, data, vocab, given)
    if given:
        given.save(folder)
    return _name(folder, files, others, data, vocab)


def _name(
    folder: Path, files: Sequence[DataFile], others: Sequence[DataFile], data: Data, vocab: int
) -> dict[str, Any]:
    """Describe .bin files where they lie, those of the training split and then those held out; without these the end of
    the tokens is held out, from the beginning of a document on if an index says where these are."""
    found = [locate(file, data) for file in (*files, *others)]
    for file in found:
        with naming_file(file.file):
            check_largest(file.largest(), vocab)
    ends = [0, *accumulate(file.count for file in found)]
    starts = [file.starts + end for file, end in zip(found, ends, strict=False) if file.starts is not None]
    known = np.concatenate(starts) if len(starts) == len(found) else np.empty(0, np.int64)
    trained = ends[len(files)] if others else ends[-1] - round(ends[-1] * data.validation)
    if len(known) and not others:
        trained = int(known[np.searchsorted(known, trained)]) if trained <= known[-1] else ends[-1]
    known.astype("<i8").tofile(folder / "starts.bin")
    return {"arrays": [_place(file) for file in found], "splits": _splits(trained, ends[-1])}


def _place(file: TokenFile) -> dict[str, Any]:
    """Describe where the tokens of a .bin file are."""
    size = file.file.stat().st_size
    path = str(file.file.absolute())
    return {"path": path, "dtype": file.dtype, "offset": file.offset, "count": file.count, "bytes": size}


def _splits(trained: int, end: int) -> dict[str, list[int]]:
    return {"train": [0, trained], "validation": [trained, end]}


def read_tokens(
    files: Sequence[DataFile], data: Data, key: str = "data.path", vocab: int = 1 << 31
) -> Iterator[tuple[int, Ids]]:
    """Yield (number, tokens) of each record of files, from field `data.field`; empty ones are left out. Raises
    ConfigError, naming the file, by the `key` that leads to it, and the place, for what is no list of tokens of the
    vocabulary."""
    number = 0
    for file in files:
        with naming_file(file, key):
            for place, values in ROWS[ending(file)](file, [data.field]):
                if data.field not in values:
                    raise ConfigError(f"data.field={data.field} is missing in {place}")
                ids = _array(values[data.field])
                if ids is None:
                    raise ConfigError(f"data.field={data.field} is no list of tokens in {place}")
                if len(ids) and int(ids.min()) < 0:
                    raise ConfigError(f"data.field={data.field} has token {ids.min()} in {place}")
                if len(ids):
                    check_largest(int(ids.max()), vocab)
                    yield number, ids
                    number += 1


def encode_tokens(vocabulary: Vocabulary | None, documents: Documents, characters: int) -> Iterator[Encoded]:
    """Yield documents that are tokens already, some at a time."""
    while batch := [ids for _, ids in islice(documents, _BATCH)]:
        ends = np.cumsum([len(ids) for ids in batch])
        yield Encoded(np.concatenate(batch), [0, *ends[:-1].tolist()])


def _array(given: Any) -> Ids | None:
    """Return a list of integers as an array, None if it is something else."""
    if not isinstance(given, list) or not all(type(i) is int and abs(i) < 1 << 62 for i in given):
        return None
    return np.array(given, np.int64)


RECORDS = Form(read_tokens, encode_tokens, endings=ENDINGS, starts=True)
TOKENS = SourceKind(find=token_files, check=_check, decisive=_options, write=_write, form=RECORDS)

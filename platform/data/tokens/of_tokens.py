"""Tokens that somebody else made: .bin files, which are read where they lie, and records that hold lists of tokens."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from platform.config.fields import ConfigError, Data
from platform.data.sources.data_files import DataFile, content_hash, ending, naming_file
from platform.data.sources.record_files import ROWS
from platform.data.sources.token_files import ENDINGS, TokenFile, index_of, locate, token_files
from platform.data.tokens.kinds import SourceKind, checked, held_files, held_out, type_of
from platform.data.vocabulary import Vocabulary

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
    next(_records([file], data), None) if ending(file) in ROWS else locate(file, data)


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
    if given:
        given.save(folder)
    return (_copy if True in forms else _name)(folder, files, others, data, vocab)


def _name(
    folder: Path, files: Sequence[DataFile], others: Sequence[DataFile], data: Data, vocab: int
) -> dict[str, Any]:
    """Describe .bin files where they lie, those of the training split and then those held out; without these the end of
    the tokens is held out, from the beginning of a document on if an index says where these are."""
    found = [locate(file, data) for file in (*files, *others)]
    for file in found:
        with naming_file(file.file):
            _check_largest(file.largest(), vocab)
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


def _check_largest(largest: int, vocab: int) -> None:
    """Raise ConfigError for a token that the vocabulary of a model does not have."""
    if largest >= vocab:
        raise ConfigError(f"has token {largest}, and the model {vocab}; nearest legal: model.vocab={largest + 1}")


def _copy(
    folder: Path, files: Sequence[DataFile], others: Sequence[DataFile], data: Data, vocab: int
) -> dict[str, Any]:
    """Write the tokens of records, those to train on and then those held out, end to end to tokens.bin."""
    sizes = [len(ids) for ids in _records(files, data, vocab)]
    if not sizes:
        raise ConfigError(f"data.path={data.path}: no tokens in it")
    chosen = set() if others else held_out(sizes, data.validation)
    dtype, starts, place, ends = type_of(vocab), [], 0, []
    with (folder / "tokens.bin").open("wb") as file:
        for held in (False, True):
            every = enumerate(_records(others if held and others else files, data, vocab))
            for ids in (ids for n, ids in every if (held if others else (n in chosen) == held)):
                file.write(ids.astype(dtype).tobytes())
                starts.append(place)
                place += len(ids)
            ends.append(place)
    np.array(starts, "<i8").tofile(folder / "starts.bin")
    trained = ends[0] if chosen or others else place - round(place * data.validation)
    return {"dtype": dtype.str, "splits": _splits(trained, place)}


def _records(files: Sequence[DataFile], data: Data, vocab: int = 1 << 31) -> Iterator[Ids]:
    """Yield the tokens of each record of files, from field `data.field`; empty ones are left out. Raises ConfigError,
    naming the file and the place, for what is no list of tokens of the vocabulary."""
    for file in files:
        with naming_file(file):
            for place, values in ROWS[ending(file)](file, [data.field]):
                if data.field not in values:
                    raise ConfigError(f"data.field={data.field} is missing in {place}")
                ids = _array(values[data.field])
                if ids is None:
                    raise ConfigError(f"data.field={data.field} is no list of tokens in {place}")
                if len(ids) and int(ids.min()) < 0:
                    raise ConfigError(f"data.field={data.field} has token {ids.min()} in {place}")
                if len(ids):
                    _check_largest(int(ids.max()), vocab)
                    yield ids


def _array(given: Any) -> Ids | None:
    """Return a list of integers as an array, None if it is something else."""
    if not isinstance(given, list) or not all(type(i) is int and abs(i) < 1 << 62 for i in given):
        return None
    return np.array(given, np.int64)


TOKENS = SourceKind(find=token_files, check=_check, decisive=_options, write=_write)

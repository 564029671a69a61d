"""Source of text: files of text or of records, the standard library's, or files that a user's function finds."""

from __future__ import annotations

import codecs
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from platform.boundary.own_code import READING, OwnCodeError, own_code
from platform.boundary.refusals import ConfigError
from platform.config.extending.own_settings import admit, with_settings
from platform.config.fields import Data
from platform.data import tokenizer
from platform.data.reading.data_files import Bounded, DataFile, RemoteFile, ending, naming_file, open_unpacked
from platform.data.reading.listing import find_files, walk
from platform.data.reading.record_files import ROWS, text_of
from platform.data.sources.source_kind import KINDS, Encoded, SourceKind, contents, held_files, place_of
from platform.data.sources.stream_blocks import Documents
from platform.data.vocabulary import Vocabulary

_READ_AT_ONCE = 64 * 1024  # bytes of a long document that are read at once
# Third-party packages, and parts of the standard library that are tests, tables or second copies.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings"}


def stdlib_files(data: Data) -> list[Path]:
    """Find the files of data=stdlib: Python sources of the running interpreter's standard library (about 9 MB)."""
    return walk(Path(sysconfig.get_path("stdlib")), [".py"], skip=_NOT_STDLIB)


def stdlib_bytes(data: Data) -> int:
    """Return the size in bytes of the text of data=stdlib: the standard library's source files, all together."""
    return sum(file.stat().st_size for file in stdlib_files(data))


def text_files(data: Data) -> list[DataFile]:
    """Find the user's files of data=text: `data.path` is a file, a glob, a folder (of which non-hidden files with the
    suffixes ENDINGS count), or a URL. Raises ConfigError if there is none."""
    if not data.path:
        raise ConfigError(f"data.path: data={data.kind} needs a file, a folder or a glob")
    return find_files("data.path", data.path)


def register_source(name: str, files: Callable[..., Sequence[DataFile | str]], settings: type | None = None) -> None:
    """Register a user's source of text as `data.kind=NAME`: the function `files`, given the keys of group data, returns
    the paths of its text files. `settings`: a dataclass of data.settings, which `files` gets as `settings`."""
    admit("data.kind", name, settings, files)
    KINDS[name] = replace(KINDS["text"], find=partial(registered_files, files))


def registered_files(find: Callable[..., object], data: Data) -> list[DataFile]:
    """Return the text files of a user's data source, which its function `find` returns. Raises ConfigError, naming the
    source, if that raises, or gives anything but an iterable of paths; its own ConfigError and OSError pass
    unchanged."""
    given: object = None
    try:
        with own_code(f"data.kind={data.kind}", (ConfigError, OSError), READING):
            given = with_settings(find, "data.kind", data.kind, data.settings)(data)
            found = [file if isinstance(file, RemoteFile) else Path(file) for file in cast(Iterable[Any], given)]
    except OwnCodeError as error:
        what = "" if given is None else f" gives {type(given).__name__}, not paths of files:"
        reason = str(error).removeprefix("raises ")
        raise ConfigError(f"data.kind={data.kind}: its source{what} {reason}") from error
    if not found:
        raise ConfigError(f"{place_of(data)}: no file in it")
    return found


def read_documents(files: Iterable[DataFile], data: Data, key: str = "data.path") -> Iterator[tuple[int, str]]:
    """Read the documents in files of text: yield (number of the document, next piece of its text); no piece is empty.

    Raises ConfigError, naming the file, by the `key` that leads to it, and the place, for content that is unreadable,
    not text, or lacks `data.field`.
    """
    number = -1
    for file in files:
        reader = _records if ending(file) in ROWS else _blocks
        with naming_file(file, key):
            for begins, piece in reader(file, data):
                number += begins
                yield number, piece


def _blocks(file: DataFile, data: Data) -> Iterator[tuple[bool, str]]:
    """Read a text file as one document: yield its pieces of about _READ_AT_ONCE bytes, each with True if it is the
    first, ended by a line end if one is near. Raises ConfigError for a NUL byte or text that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    begins = True
    with open_unpacked(file) as stream:
        while True:
            start = stream.tell()
            block = stream.read(_READ_AT_ONCE) + stream.readline(_READ_AT_ONCE)
            piece = _decoded(decoder, block, start, stream)
            if piece:
                yield begins, piece
                begins = False
            if not block:
                return


def _decoded(decoder: codecs.IncrementalDecoder, block: bytes, start: int, stream: Bounded) -> str:
    """Decode the next block of a text file from UTF-8; `start`: its first byte's number. Raises ConfigError for a NUL
    byte, or bytes that are not UTF-8."""
    if (nul := block.find(0)) >= 0:
        raise ConfigError(f"a binary file (NUL at byte {start + nul}); text is needed")
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        offset = stream.tell() - len(error.object) + error.start
        raise ConfigError(f"not UTF-8 at byte {offset}; convert it (iconv -t UTF-8) or leave it out") from None


def _records(file: DataFile, data: Data) -> Iterator[tuple[bool, str]]:
    """Yield (True, text of field `data.field`) of each record in a data file, a document each; skip empty texts."""
    for record in ROWS[ending(file)](file, [data.field]):
        if text := text_of(record, data.field):
            yield True, text


def encode_texts(vocabulary: Vocabulary | None, pieces: Documents, characters: int) -> Iterator[Encoded]:
    """Yield the token ids of documents that come in `pieces`; `characters`: their total length, 0 if unknown."""
    assert vocabulary
    return map(Encoded, tokenizer.encode_documents(vocabulary, pieces, characters))


def deciding(data: Data, files: Sequence[DataFile]) -> list[Any]:
    """Return formats, content hashes and field of text files, which decide their documents and name a cache entry."""
    others = held_files(data)
    return [contents(files), data.field, *([contents(others)] if others else [])]


KINDS["text"] = SourceKind(text_files, read_documents, encode_texts, deciding, texts=lambda piece: [piece])
KINDS["stdlib"] = replace(KINDS["text"], find=stdlib_files)

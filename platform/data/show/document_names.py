"""Names of documents: the file and record that a document of a token stream was read from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from os.path import commonpath
from pathlib import Path
from typing import Any

from platform.config.fields import Data
from platform.data.corpus import SourceTokens
from platform.data.reading.data_files import DataFile, size_of
from platform.data.sources.source_kind import SourceKind, kind_of
from platform.data.sources.stream_blocks import Documents
from platform.data.tokens.streamed import StreamedTokens
from platform.data.tokens.streams import JoinedTokens, beneath

MOST = 1 << 28  # bytes of a source that is read again to find the files of its documents
NameOf = Callable[[int, int], str]  # number of a document in its stream, position of a token in it -> its name


def names_of(data: Data, part: SourceTokens, stream: Any) -> NameOf:
    """Return the function that names the documents of a source's training `stream`; a source of more than MOST bytes
    is not read for it, and its documents have numbers alone."""
    tokens = beneath(stream)
    if isinstance(tokens, JoinedTokens):
        return lambda number, place: f"{_seen_path(tokens.file_at(place))}, document {number + 1}"
    streamed = part.streams["train"]
    if isinstance(streamed, StreamedTokens):
        files = kind_of(data).find(data)
        parts, root = kind_of(data).parts(files), _root(files)
        block, places = streamed.documents(stream)
        return lambda number, _: f"{_document_name(parts[places[number].file], 0, root)} in block {block}"
    found = [] if data.kind == "synthetic" else _read_again(data)
    return lambda number, _: found[number] if number < len(found) else f"document {number + 1}"


def _read_again(data: Data) -> list[str]:
    """Return the names of a source's training documents, in the order of their tokens; [] if it is too large."""
    kind = kind_of(data)
    where: list[str] = []
    files = kind.find(data)
    if sum(map(size_of, files)) > MOST:
        return []

    def read(some: Sequence[DataFile], data: Data, key: str) -> Documents:
        """Read a source's documents as its kind does, and note the name of each."""
        if key != "data.path":
            yield from kind.read(some, data, key)
            return
        for number, name, document in _named_documents(kind, kind.parts(some) if some else [some], data, key):
            if number == len(where):
                where.append(name)
            yield number, document

    splits = replace(kind, read=read).splits(files, data)
    return [where[number] for number in dict.fromkeys(number for number, _ in splits.read(False))]


def _named_documents(
    kind: SourceKind, parts: Sequence[Sequence[DataFile]], data: Data, key: str
) -> Iterator[tuple[int, str, Any]]:
    """Yield (number, name, piece) of each piece of a source's documents, group of files by group."""
    word = "pair" if data.kind == "pairs" else "document"
    before, root = 0, _root([file for files in parts for file in files])
    for files in parts:
        count = 0
        for number, piece in kind.read(files, data, key):
            count = number + 1
            yield before + number, _document_name(files, number, root, word), piece
        before += count


def _document_name(files: Sequence[DataFile], number: int, root: str = "", word: str = "document") -> str:
    """Return the name of document `number` of a group of files, seen from the folder `root`."""
    if len(files) != 1:
        return f"{word} {number + 1}"
    return _seen_path(files[0], root) + (f", {word} {number + 1}" if number else "")


def _seen_path(file: DataFile | None, root: str = "") -> str:
    """Return the path of a data file, seen from the working directory, else from the folder `root`; or its URL."""
    for folder in (str(Path.cwd()), root):
        if folder and isinstance(file, Path) and file.is_relative_to(folder):
            return str(file.relative_to(folder))
    return str(file)


def _root(files: Sequence[DataFile]) -> str:
    """Return the innermost folder that has all the files of a source; "" for URLs."""
    paths = [file.parent for file in files if isinstance(file, Path)]
    return commonpath(paths) if paths else ""

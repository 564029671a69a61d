"""Streamed sources: the reader of their documents, block by block, and the entry of the cache that stays of them, which
holds the tokenizer and the documents held out. See `platform.data.tokens.streamed`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from platform.boundary.refusals import ConfigError, violation
from platform.config.fields import Data
from platform.data.reading.data_files import DataFile, content_hash, ending, stamp
from platform.data.reading.record_files import ROWS
from platform.data.sources.conversations import more_fields
from platform.data.sources.document_entry import Documents, Form, write_tokens
from platform.data.sources.source_kind import SourceKind, Texts, held_files, tokenizer_for, violations_of_finding
from platform.data.sources.token_files import RECORDS
from platform.data.vocabulary import Vocabulary

FORMAT = 1  # of streams: raise it when the same documents would give other blocks


def is_streamed(data: Data) -> bool:
    """Return True if a source is read while it is trained on; one that is held out as a whole is not."""
    return data.streaming and data.validation < 1


def violations_of_stream(data: Data, kind: SourceKind) -> list[str]:
    """Return one refusal line per mistake in the keys of a streamed source, which is of a kind."""
    lines = []
    if kind.form is None or data.kind == "synthetic":
        return [violation("data.streaming", True, f"data={data.kind} is read as a whole", [False])]
    if data.validation and not data.validation_path:
        reason = "of a source that is never read as a whole no part can be held out"
        lines.append(violation("data.validation", data.validation, reason, [0, "data.validation_path=FILE"]))
    return lines


def head_kind(kind: SourceKind) -> SourceKind:
    """Return the kind of a streamed source, of which only a head is written: its tokenizer, and its documents held
    out."""
    form: Form = kind.form

    def find(data: Data) -> Sequence[DataFile]:
        files = kind.find(data)
        if form is RECORDS and not all(ending(file) in ROWS for file in files):
            reason = ".bin files are read where they lie, without a copy"
            raise ConfigError(violation("data.streaming", True, reason, [False]))
        return files

    return replace(
        kind,
        find=find,
        check=lambda data: kind.check(data) or violations_of_finding(find, data),
        decisive=partial(_decisive, form),
        write=partial(_write_head, form),
        texts=partial(_first_texts, form) if form.texts else None,
    )


class PiecePlace(NamedTuple):
    """PiecePlace in a source: a file, and how many pieces of documents come before in it."""

    file: int
    piece: int


BEGIN = PiecePlace(0, 0)


class BlockReader:
    """Reader of the documents in files, block by block from any place. It reads on from where it is if the place lies
    there or further in the same file; else it opens the place's file again."""

    def __init__(self, form: Form, files: Sequence[DataFile], data: Data):
        self._form, self._data = form, data
        self._parts: list[list[DataFile]] = [[file] for file in files] or [[]]
        self._rest: Iterator[tuple[PiecePlace, bool, Any]] = iter(())
        self._next: tuple[PiecePlace, bool, Any] | None = None  # what _rest has given and no block has taken

    def block(self, start: PiecePlace) -> tuple[list[tuple[int, Any]], PiecePlace | None]:
        """Return the documents of the block that begins at `start`, in pieces, each with the number of its document,
        and where the next block begins, None at the end of the source. Raises ConfigError, OSError."""
        if not self._next or self._next[0].file != start.file or self._next[0] > start:
            self._rest = self._pieces(start)
            self._advance()
        while self._next and self._next[0] < start:
            self._advance()
        found: list[tuple[int, Any]] = []
        size, number = 0, 0
        while self._next:
            place, begins, piece = self._next
            if size >= (self._data.block if begins else 2 * self._data.block):
                return found, place
            number += begins
            found.append((number, piece))
            size += self._form.size(piece)
            self._advance()
        return found, None

    def _advance(self) -> None:
        self._next = None  # what raises is not read on from
        self._next = next(self._rest, None)

    def _pieces(self, start: PiecePlace) -> Iterator[tuple[PiecePlace, bool, Any]]:
        """Yield the place of each piece from `start` on, whether it begins a document, and it."""
        for file in range(start.file, len(self._parts)):
            before = -1
            pieces = self._form.read(self._parts[file], self._data, "data.path")
            for count, (document, piece) in enumerate(pieces):
                if (place := PiecePlace(file, count)) >= start:
                    yield place, document != before, piece
                before = document


def _first_block(form: Form, files: Sequence[DataFile], data: Data) -> list[tuple[int, Any]]:
    """Return the documents of a source's first block. Raises ConfigError if there is none."""
    found, _ = BlockReader(form, files, data).block(BEGIN)
    if not found:
        where = f"data.path={data.path}" if data.path else f"data.kind={data.kind}"
        raise ConfigError(f"{where}: no {'text' if form.texts else 'tokens'} in it")
    return found


def _first_texts(form: Form, files: Sequence[DataFile], data: Data) -> Texts:
    """Return the texts of the first block, on which a tokenizer is trained."""
    assert form.texts
    documents = _first_block(form, files, data)
    texts = [text for _, document in documents for text in form.texts(document)]
    return Texts(texts, sum(map(len, texts)))


def _decisive(form: Form, data: Data, files: Sequence[DataFile]) -> list[Any]:
    """Return what decides which documents a streamed source holds, and how they are divided into blocks: of each file
    the format, the size and a part of its content; of a function of the user's own its first documents."""
    digest = hashlib.sha256()
    for _, document in [] if files else _first_block(form, files, data):
        digest.update(document.encode() if isinstance(document, str) else document.astype("<i8").tobytes())
    stamps = [[ending(file), *stamp(file)] for file in files] or [[digest.hexdigest()]]
    held = [content_hash(file) for file in held_files(data, form.endings)]
    return ["stream", FORMAT, data.kind, stamps, held, data.field, *more_fields(data), data.block]


def _write_head(
    form: Form, folder: Path, files: Sequence[DataFile], data: Data, vocab: int, given: Vocabulary | None
) -> dict[str, Any]:
    """Build the entry that stays of a streamed source: the tokenizer, which is trained on the first block if none is
    `given`, and the tokens of the files that are held out. Return its description."""
    vocabulary = given
    if form.texts:
        vocabulary = tokenizer_for(folder, given, lambda: _first_texts(form, files, data), vocab, data)
    elif given:
        given.save(folder)
    others = held_files(data, form.endings)
    held: Documents = form.read(others, data, "data.validation_path") if others else iter(())
    return write_tokens(form, folder, vocabulary, vocab, [(iter(()), 0), (held, 0)])

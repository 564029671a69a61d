"""Tokens of documents of text, from files or from a function of the user's own."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from platform.config.fields import ConfigError, Data
from platform.data import tokenizer
from platform.data.sources import texts
from platform.data.sources.data_files import DataFile
from platform.data.tokens.kinds import (
    SourceKind,
    Texts,
    checked,
    contents,
    held_files,
    held_out,
    tokenizer_for,
    type_of,
)
from platform.data.vocabulary import Vocabulary

Pieces = Iterator[tuple[int, str]]  # (number of the document, next piece of its text)
Reader = Callable[[Sequence[DataFile], Data, str], Pieces]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Splits:
    """Documents of a source, in two splits that can be read again and again."""

    read: Callable[[bool], Pieces]  # True: those held out
    documents: int
    characters: int
    tail: float  # part of the stream of tokens that is held out at its end, as no document is

    def texts(self) -> Texts:
        return Texts((piece for _, piece in self.read(False)), self.characters)


def splits_of(read: Reader, files: Sequence[DataFile], data: Data) -> Splits:
    """Read the documents of a source once, for their faults, and divide them into those to train on and those held out.
    Raises ConfigError."""
    sizes: list[int] = []
    for number, piece in read(files, data, "data.path"):
        if number == len(sizes):
            sizes.append(0)
        sizes[number] += len(piece)
    if not sizes:
        raise ConfigError(f"data.path={data.path}: no text in it")
    if others := held_files(data):
        for _ in read(others, data, "data.validation_path"):
            pass
        named = {False: (files, "data.path"), True: (others, "data.validation_path")}
        return Splits(lambda held: read(named[held][0], data, named[held][1]), len(sizes), sum(sizes), 0.0)
    chosen = held_out(sizes, data.validation)

    def split(held: bool) -> Pieces:
        return ((n, piece) for n, piece in read(files, data, "data.path") if (n in chosen) == held)

    return Splits(split, len(sizes), sum(sizes), 0.0 if chosen else data.validation)


def write_texts(
    read: Reader, folder: Path, files: Sequence[DataFile], data: Data, vocab: int, given: Vocabulary | None
) -> dict[str, Any]:
    """Build the cache entry of a corpus of documents: write into `folder` tokens.bin (the training documents, then
    those held out) and the tokenizer, of at most `vocab` entries, which is trained if none is `given`. Return its
    description. The documents are read once for their sizes and their faults, once to train the tokenizer, and once per
    split to encode them."""
    splits = splits_of(read, files, data)
    logger.info("tokenising %d documents, %.1f million characters", splits.documents, splits.characters / 1e6)
    vocabulary = tokenizer_for(folder, given, splits.texts, vocab, data)
    ends, dtype = [], type_of(vocab)
    with (folder / "tokens.bin").open("wb") as file:
        for held in (False, True):
            for ids in tokenizer.encode_documents(vocabulary, splits.read(held), 0 if held else splits.characters):
                file.write(ids.astype(dtype).tobytes())
            ends.append(file.tell() // dtype.itemsize)
    trained, end = ends
    if splits.tail:
        trained = end - round(end * splits.tail)
    return {"dtype": dtype.str, "splits": {"train": [0, trained], "validation": [trained, end]}}


def _options(data: Data, files: Sequence[DataFile]) -> list[Any]:
    """Return what decides which documents files of text hold: their formats and contents, and the field."""
    others = held_files(data)
    return [contents(files), data.field, *([contents(others)] if others else [])]


def _check(data: Data) -> list[str]:
    return texts.check_files(data) + checked(held_files, data)


TEXTS = SourceKind(
    find=texts.files_of,
    check=_check,
    decisive=_options,
    write=partial(write_texts, texts.read_documents),
    texts=lambda files, data: splits_of(texts.read_documents, files, data).texts(),
)

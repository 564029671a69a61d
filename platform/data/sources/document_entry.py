"""Tokens of documents in any form: texts, lists of tokens, conversations, each of which says how it is read and
encoded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data.reading.data_files import DataFile
from platform.data.sources.source_kind import Texts, check_largest, held_files, held_out, tokenizer_for, type_of
from platform.data.vocabulary import Vocabulary

Documents = Iterator[tuple[int, Any]]  # (number of the document, it or its next piece)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Encoded:
    """Tokens of some documents, end to end. `starts`: positions in `ids` at which documents begin; `learned`: mask of
    the tokens to predict, None for all."""

    ids: NDArray[Any]
    starts: Sequence[int] = ()
    learned: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Form:
    """Form of documents. `read(files, data, key)` yields the documents in files, which the key leads to, and raises
    ConfigError for faults; `encode(vocabulary, documents, characters)` turns them into tokens; `texts`: the part of a
    document that trains a tokenizer, None if it holds tokens; `endings`: suffixes of its files in a folder, None for
    text; `starts`: document boundaries are stored in starts.bin, because the tokens do not mark them; `learned`: the
    tokens to predict are stored too, in learned.bin."""

    read: Callable[[Sequence[DataFile], Data, str], Documents]
    encode: Callable[[Vocabulary | None, Documents, int], Iterator[Encoded]]
    texts: Callable[[Any], Iterable[str]] | None = None
    size: Callable[[Any], int] = len
    endings: Sequence[str] | None = None
    starts: bool = False
    learned: bool = False


@dataclass(frozen=True)
class Splits:
    """Documents of a source, in two splits that can be read again and again."""

    form: Form
    read: Callable[[bool], Documents]  # True: those held out
    documents: int
    characters: int
    tail: float  # part of the stream of tokens that is held out at its end, as no document is

    def texts(self) -> Texts:
        parts = self.form.texts or (lambda _: ())
        return Texts((text for _, document in self.read(False) for text in parts(document)), self.characters)


def splits_of(form: Form, files: Sequence[DataFile], data: Data) -> Splits:
    """Read the documents of a source once, for their faults, and divide them into those to train on and those held out.
    Raises ConfigError."""
    sizes: list[int] = []
    for number, document in form.read(files, data, "data.path"):
        if number == len(sizes):
            sizes.append(0)
        sizes[number] += form.size(document)
    if not sizes:
        place = f"data.path={data.path}" if data.path else f"data.kind={data.kind}"
        raise ConfigError(f"{place}: no {'text' if form.texts else 'tokens'} in it")
    if others := held_files(data, form.endings):
        for _ in form.read(others, data, "data.validation_path"):
            pass
        named = {False: (files, "data.path"), True: (others, "data.validation_path")}
        return Splits(form, lambda held: form.read(named[held][0], data, named[held][1]), len(sizes), sum(sizes), 0.0)
    chosen = held_out(sizes, data.validation)

    def split(held: bool) -> Documents:
        return (found for found in form.read(files, data, "data.path") if (found[0] in chosen) == held)

    return Splits(form, split, len(sizes), sum(sizes), 0.0 if chosen else data.validation)


def write_documents(
    form: Form, folder: Path, files: Sequence[DataFile], data: Data, vocab: int, given: Vocabulary | None
) -> dict[str, Any]:
    """Build the cache entry of a source of documents: write into `folder` tokens.bin (the training documents, then the
    held-out ones), the arrays beside them (starts.bin, int64; learned.bin, a byte per token), and the tokenizer, of at
    most `vocab` entries, which is trained if none is `given`. Return its description. The documents are read once for
    their sizes and their faults, once to train the tokenizer, and once per split to encode them."""
    splits = splits_of(form, files, data)
    vocabulary = given
    if form.texts:
        logger.info("tokenising %d documents, %.1f million characters", splits.documents, splits.characters / 1e6)
        vocabulary = tokenizer_for(folder, given, splits.texts, vocab, data)
    elif given:
        given.save(folder)
    parts = [(splits.read(False), splits.characters), (splits.read(True), 0)]
    found = write_tokens(form, folder, vocabulary, vocab, parts)
    if splits.tail:
        end = found["splits"]["validation"][1]
        trained = end - round(end * splits.tail)
        found["splits"] = {"train": [0, trained], "validation": [trained, end]}
    return found


def write_tokens(
    form: Form, folder: Path, vocabulary: Vocabulary | None, vocab: int, parts: Sequence[tuple[Documents, int]]
) -> dict[str, Any]:
    """Write into `folder` the tokens of documents, and the arrays beside them; return their description. `parts`: the
    documents to train on, then the held-out ones, each with the characters in them, 0 if that is not known."""
    ends, place, dtype = [], 0, type_of(vocab)
    with ExitStack() as opened:
        names = ["tokens", *(["starts"] if form.starts else []), *(["learned"] if form.learned else [])]
        open_ = {name: opened.enter_context((folder / f"{name}.bin").open("wb")) for name in names}
        for documents, characters in parts:
            for part in form.encode(vocabulary, documents, characters):
                check_largest(int(part.ids.max(initial=0)), vocab)
                open_["tokens"].write(part.ids.astype(dtype).tobytes())
                if form.starts:
                    open_["starts"].write((np.array(part.starts, "<i8") + place).astype("<i8").tobytes())
                if form.learned:
                    learned = np.ones(len(part.ids), bool) if part.learned is None else part.learned
                    open_["learned"].write(learned.astype("|u1").tobytes())
                place += len(part.ids)
            ends.append(place)
    return {"dtype": dtype.str, "splits": {"train": [0, ends[0]], "validation": ends}}

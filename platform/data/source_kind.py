"""Kinds of sources: what each says of itself, and what follows for all of them: the check of their files, documents in
two splits, a tokenizer trained on them, and an entry of the cache."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from platform.boundary.refusals import ConfigError
from platform.boundary.terminal import phase
from platform.config.fields import Data
from platform.data import tokenizer
from platform.data.data_files import ENDINGS, ROWS, DataFile, content_hash, ending, find_files, size_of, stamp
from platform.data.mixture import order
from platform.data.tokenizer import Vocabulary, added_tokens, open_vocabulary, template_of
from platform.data.tokenizer_files import JSON, TEMPLATE
from platform.plan.layout import count_of

# Blocks of a streamed source: the reader of its documents, block by block. See `platform.data.cache_entries`.

Documents = Iterator[tuple[int, Any]]  # (number of the document, it or its next piece)


def is_streamed(data: Data) -> bool:
    """Return True if a data source is tokenised during training, block by block; one that is held out never is."""
    return data.streaming and data.validation < 1


class PiecePlace(NamedTuple):
    """PiecePlace in a source: a file, and how many pieces of documents come before in it."""

    file: int
    piece: int


BEGIN = PiecePlace(0, 0)


class BlockReader:
    """Reader of the documents in the `parts` of a source, which `read` yields in pieces, block by block from any place:
    `most` characters, by `size` of the pieces, make a block. It reads on from where it is if the place lies there or
    further in the same file; else it opens the place's file again."""

    def __init__(
        self,
        parts: Sequence[Sequence[DataFile]],
        read: Callable[[Sequence[DataFile]], Documents],
        size: Callable[[Any], int],
        most: int,
    ):
        """Prepare to read the files `parts` of a streamed data source in blocks of `most` characters, by `size` of
        pieces."""
        self._parts, self._read, self._size, self._most = parts, read, size, most
        self._rest: Iterator[tuple[PiecePlace, bool, Any]] = iter(())
        self._next: tuple[PiecePlace, bool, Any] | None = None  # what _rest has given and no block has taken

    def block(self, start: PiecePlace) -> tuple[list[tuple[int, Any]], PiecePlace | None]:
        """Read the block of a streamed source that begins at `start`: return its documents in pieces, (number of the
        document, piece) each, and where the next block begins, None at the end of the source. Raises ConfigError,
        OSError."""
        if not self._next or self._next[0].file != start.file or self._next[0] > start:
            self._rest = self._pieces(start)
            self._advance()
        while self._next and self._next[0] < start:
            self._advance()
        found: list[tuple[int, Any]] = []
        size, number = 0, 0
        while self._next:
            place, begins, piece = self._next
            if size >= (self._most if begins else 2 * self._most):
                return found, place
            number += begins
            found.append((number, piece))
            size += self._size(piece)
            self._advance()
        return found, None

    def beginnings(self, start: PiecePlace, end: PiecePlace | None) -> list[PiecePlace]:
        """Return where the documents of the block from `start` to `end` begin; None: to the end of the source."""
        inside = takewhile(lambda piece: end is None or piece[0] < end, self._pieces(start))
        return [place for i, (place, begins, _) in enumerate(inside) if begins or not i]

    def _advance(self) -> None:
        """Read the next piece of a streamed source's documents, and hold it for the next block; None at the end."""
        self._next = None  # what raises is not read on from
        self._next = next(self._rest, None)

    def _pieces(self, start: PiecePlace) -> Iterator[tuple[PiecePlace, bool, Any]]:
        """Yield the pieces of a streamed source's documents from `start` on: (place, True to begin one, piece)."""
        for file in range(start.file, len(self._parts)):
            before = -1
            for count, (document, piece) in enumerate(self._read(self._parts[file])):
                if (place := PiecePlace(file, count)) >= start:
                    yield place, document != before, piece
                before = document


logger = logging.getLogger(__name__)

FORMAT = 1  # of streams: raise it when the same documents would give other blocks
UNREAD = "none"  # data.input_field: no field goes on a prompt
_TRAINING = 16_000_000  # characters that the tokenizer is trained on: evenly spaced pieces of a longer corpus
_SNIFFED = 32  # files whose beginnings `violations_of_source` reads


@dataclass(frozen=True)
class Encoded:
    """Tokens of some documents, end to end. `bounds`: positions in `ids` at which documents begin, or texts of pairs
    end; `learned`: mask of the tokens to predict, None for all."""

    ids: NDArray[Any]
    bounds: Sequence[int] = ()
    learned: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Texts:
    """Training documents of a source, in pieces, and the characters of them all, for a tokenizer to be trained on."""

    pieces: Iterable[str]
    characters: int


@dataclass(frozen=True)
class Splits:
    """Documents of a source, in two splits that can be read again and again. `texts`: texts for a tokenizer to be
    trained on."""

    read: Callable[[bool], Documents]  # True: those held out
    texts: Callable[[], Texts]
    documents: int = 0
    characters: int = 0
    tail: float = 0.0  # part of the stream of tokens that is held out at its end, as no document is


@dataclass(frozen=True)
class SourceKind:
    """Kind of source. `find(data)` returns its files; `read(files, data, key)` yields the documents in files, which the
    key leads to, and raises ConfigError for faults; `encode(vocabulary, documents, characters)` turns them into tokens;
    `content(data, files)`: what decides which documents they are; `texts`: the part of a document that trains a
    tokenizer, None if it holds tokens; `endings`: suffixes of its files in a folder; `starts`: document
    boundaries are stored in starts.bin, because the tokens do not mark them; `learned`: the tokens to predict are
    stored too, in learned.bin; `blockwise`: it can be streamed."""

    find: Callable[[Data], Sequence[DataFile]]
    read: Callable[[Sequence[DataFile], Data, str], Documents]
    encode: Callable[[Vocabulary | None, Documents, int], Iterator[Encoded]]
    content: Callable[[Data, Sequence[DataFile]], list[Any]]
    texts: Callable[[Any], Iterable[str]] | None = None
    size: Callable[[Any], int] = len
    endings: list[str] = field(default_factory=ENDINGS.copy)
    starts: bool = False
    learned: bool = False
    blockwise: bool = True

    def parts(self, files: Sequence[DataFile]) -> list[Sequence[DataFile]]:
        """Return the files of a data source in groups, each of which can be read without the others."""
        return [[file] for file in files]

    def held(self, data: Data) -> list[DataFile]:
        """Return the files of a data source that are held out for validation as a whole. Raises ConfigError."""
        return held_files(data, self.endings)

    def violations_of_source(self, data: Data) -> list[str]:
        """Return a refusal line for each mistake in a data source that shows at the beginnings of its files."""
        lines: list[str] = []
        files: Sequence[DataFile] = ()
        held: Sequence[DataFile] = ()
        with _noting(lines, data):
            found = self.find(data)
            if found and not any(map(size_of, found)):
                raise self._nothing_in(data)
            files = found
        with _noting(lines, data):
            held = self.held(data)
        parts = [("data.path", part) for part in self.parts(files)[:_SNIFFED]]
        for key, part in [*parts, *(("data.validation_path", [file]) for file in held[:_SNIFFED])]:
            with _noting(lines, data):
                next(self.read(part, data, key), None)
        return lines

    def decisive(self, data: Data, files: Sequence[DataFile]) -> list[Any]:
        """Return the values that decide which documents a data source has, and how a streamed one is divided into
        blocks; they name its cache entry. Of each file of a streamed source: format, size and samples of its
        content."""
        if not is_streamed(data):
            return self.content(data, files)
        digest = hashlib.sha256()
        for _, document in [] if files else self._first_block(files, data):
            digest.update(document.encode() if isinstance(document, str) else document.astype("<i8").tobytes())
        stamps = [[ending(file), *stamp(file)] for file in files] or [[digest.hexdigest()]]
        held = [content_hash(file) for file in self.held(data)]
        return ["stream", FORMAT, data.kind, stamps, held, data.field, *more_fields(data), data.block]

    def blocks(self, files: Sequence[DataFile], data: Data) -> BlockReader:
        """Construct the reader that yields a streamed source's documents block by block, while training goes on."""
        return BlockReader(self.parts(files), lambda part: self.read(part, data, "data.path"), self.size, data.block)

    def splits(self, files: Sequence[DataFile], data: Data) -> Splits:
        """Read all documents of a data source once, to find faults, and divide them into training and validation; of a
        streamed source only the held-out ones are read, and its first block trains a tokenizer. Raises ConfigError."""
        others = self.held(data)

        def held_documents() -> Documents:
            """Return the documents in the data files that are held out for validation; none without such files."""
            return self.read(others, data, "data.validation_path") if others else iter(())

        if is_streamed(data):
            return Splits(lambda held: held_documents() if held else iter(()), lambda: self._first_texts(files, data))
        sizes: list[int] = []
        with phase("reading documents", unit="characters" if self.texts else "tokens") as shown:
            for number, document in self.read(files, data, "data.path"):
                if number == len(sizes):
                    sizes.append(0)
                sizes[number] += (size := self.size(document))
                shown.add(size)
            if not sizes:
                raise self._nothing_in(data)
            for _ in held_documents():
                pass
        chosen = set() if others else held_out(sizes, data.validation)

        def split(held: bool) -> Documents:
            """Return the documents for validation if `held`, else the documents for training, of this data source."""
            if others and held:
                return held_documents()
            return (found for found in self.read(files, data, "data.path") if (found[0] in chosen) == held)

        tail = 0.0 if others or chosen else data.validation
        return Splits(split, lambda: self._texts(split(False), sum(sizes)), len(sizes), sum(sizes), tail)

    def training_texts(self, files: Sequence[DataFile], data: Data) -> Texts:
        """Return the texts of a data source, in pieces, for a tokenizer to be trained on. Raises ConfigError."""
        return self.splits(files, data).texts()

    def write_entry(
        self, folder: Path, files: Sequence[DataFile], data: Data, vocab: int, given: Vocabulary | None
    ) -> dict[str, Any]:
        """Build the cache entry of a data source: write into `folder` tokens.bin (the training documents, then the
        held-out ones), the arrays beside them (starts.bin, int64; learned.bin, a byte per token), and the tokenizer, of
        at most `vocab` entries, which is trained if none is `given`. Return its description. The documents are read
        once for their sizes and their faults, once to train the tokenizer, and once per split to encode them."""
        splits = self.splits(files, data)
        if self.texts and splits.documents:
            documents = count_of(splits.documents, "document")
            logger.info("tokenising %s, %.1f million characters", documents, splits.characters / 1e6)
        vocabulary = self.vocabulary(folder, splits.texts, data, vocab, given)
        parts = [(splits.read(False), splits.characters), (splits.read(True), 0)]
        found = self.write_tokens(folder, vocabulary, vocab, parts)
        if splits.tail:
            end = found["splits"]["validation"][1]
            trained = end - round(end * splits.tail)
            found["splits"] = splits_at(trained, end)
        return found

    def vocabulary(
        self, folder: Path, texts: Callable[[], Texts], data: Data, vocab: int, given: Vocabulary | None
    ) -> Vocabulary | None:
        """Return the tokenizer of a data source, saved in its cache entry `folder`: the one `given` or, for a source of
        text, one trained on `texts`, as the keys of `data` say; None if the source holds token ids."""
        if given:
            given.save(folder)
        return given or (train_on(folder, texts(), vocab, data) if self.texts else None)

    def write_tokens(
        self, folder: Path, vocabulary: Vocabulary | None, vocab: int, parts: Sequence[tuple[Documents, int]]
    ) -> dict[str, Any]:
        """Tokenize documents into the cache entry `folder`, tokens.bin and the arrays beside it; return their
        description. `parts`: the documents for training, then the held-out ones, each with their number of characters,
        0 if unknown."""
        ends, place, dtype = [], 0, type_of(vocab)
        with ExitStack() as opened:
            names = ["tokens", *(["starts"] if self.starts else []), *(["learned"] if self.learned else [])]
            open_ = {name: opened.enter_context((folder / f"{name}.bin").open("wb")) for name in names}
            for documents, characters in parts:
                for part in self.encode(vocabulary, documents, characters):
                    check_largest(int(part.ids.max(initial=0)), vocab)
                    open_["tokens"].write(part.ids.astype(dtype).tobytes())
                    if self.starts:
                        open_["starts"].write((np.array(part.bounds, "<i8") + place).astype("<i8").tobytes())
                    if self.learned:
                        learned = np.ones(len(part.ids), bool) if part.learned is None else part.learned
                        open_["learned"].write(learned.astype("|u1").tobytes())
                    place += len(part.ids)
                ends.append(place)
        return {"dtype": dtype.str, "splits": splits_at(*ends)}

    def _texts(self, documents: Iterable[tuple[int, Any]], characters: int) -> Texts:
        """Return the texts in documents, and their total number of `characters`, for a tokenizer to be trained on."""
        parts = self.texts or (lambda _: ())
        return Texts((text for _, document in documents for text in parts(document)), characters)

    def _first_block(self, files: Sequence[DataFile], data: Data) -> list[tuple[int, Any]]:
        """Return the documents of a streamed data source's first block, numbered. Raises ConfigError without one."""
        found, _ = self.blocks(files, data).block(BEGIN)
        if not found:
            raise self._nothing_in(data)
        return found

    def _first_texts(self, files: Sequence[DataFile], data: Data) -> Texts:
        """Return the texts of a streamed data source's first block, for a tokenizer to be trained on."""
        documents = self._first_block(files, data)
        return self._texts(documents, sum(self.size(document) for _, document in documents))

    def _nothing_in(self, data: Data) -> ConfigError:
        """Return the ConfigError that refuses a data source without a document, naming its path or kind."""
        return ConfigError(f"{place_of(data)}: no {'text' if self.texts else 'tokens'} in it")


KINDS: dict[str, SourceKind] = {}  # by data.kind; each is in a file here, or of the user's own


def kind_of(data: Data) -> SourceKind:
    """Return the SourceKind that reads a data source, by its data.kind (pairs, tokens, ...); text by default."""
    return KINDS.get(data.kind, KINDS["text"])


def place_of(data: Data) -> str:
    """Return the setting that names a data source to the user, in a refusal: data.path=PATH, or data=KIND."""
    return f"data.path={data.path}" if data.path else f"data={data.kind}"


def more_fields(data: Data) -> list[str]:
    """Return the field names of a data record, beside `data.field`, that decide the text read from it."""
    return [data.target_field, *([data.input_field] if data.input_field not in ("", UNREAD) else [])]


@contextmanager
def _noting(lines: list[str], data: Data) -> Iterator[None]:
    """Append the refusal lines of an error about a data source, raised within the context, to `lines`."""
    try:
        yield
    except ConfigError as error:
        lines += error.violations
    except OSError as error:
        lines.append(f"{place_of(data)}: cannot be read: {error.strerror}")


def held_out(sizes: Sequence[int], fraction: float) -> set[int]:
    """Choose the documents held out for validation, by number: in a fixed random order, each that still fits into
    `fraction` of the corpus. `sizes`: characters of each document.

    The result is empty if whole documents cannot fill half of that fraction, as with a single document: then the end of
    the token stream is held out instead.
    """
    room = budget = fraction * sum(sizes)
    held = set()
    for number in order(0, 0, len(sizes), np.arange(len(sizes))).tolist():
        if sizes[number] <= room:
            held.add(number)
            room -= sizes[number]
    return held if room <= budget / 2 else set()


def held_files(data: Data, endings: list[str] = ENDINGS) -> list[DataFile]:
    """Find the data files of `data.validation_path`, held out for validation; [] if it is "". Raises ConfigError."""
    return find_files("data.validation_path", data.validation_path, endings) if data.validation_path else []


def train_on(folder: Path, given: Texts, vocab: int, data: Data) -> Vocabulary:
    """Train a tokenizer of at most `vocab` entries on texts, of which long ones are sampled evenly, with the special
    tokens and the chat template that the keys of `data` name; save it in `folder`, and return it."""
    share = min(1.0, _TRAINING / given.characters)
    pieces = (t for i, t in enumerate(given.pieces) if int((i + 1) * share) > int(i * share))
    read = given.characters * share / 1e6
    with phase(f"training a tokenizer of {vocab} entries on {read:.1f} million characters"):
        bpe = tokenizer.train_tokenizer(pieces, vocab, added_tokens(data))
    bpe.save(str(folder / JSON))
    if template := template_of(data):
        (folder / TEMPLATE).write_text(template)
    made = open_vocabulary(folder)
    assert made
    return made


def training_options(data: Data) -> list[Any]:
    """Return the options in `data` for the training of a tokenizer (special tokens, template); [] if none is set."""
    found = [added_tokens(data), template_of(data)]
    return [found] if any(found) else []


def splits_at(trained: int, end: int) -> dict[str, list[int]]:
    """Describe the splits of a token stream for a cache entry: [0, `trained`) to train on, the rest held out."""
    return {"train": [0, trained], "validation": [trained, end]}


def type_of(vocab: int) -> np.dtype:
    """Return the smallest unsigned integer type that holds all token ids of a vocabulary, for files of tokens."""
    return np.dtype("<u2" if vocab <= 1 << 16 else "<u4")


def contents(files: Sequence[DataFile]) -> list[list[Any]]:
    """Return [format, SHA-256] of each data file, which decide the documents in it: False for text, True for .jsonl, or
    the suffix of a table."""
    formats = {end: end if end != ".jsonl" else True for end in ROWS}
    with phase("hashing files", sum(map(size_of, files)), "B") as shown:
        return [[formats.get(ending(file), False), content_hash(file)] for file in shown.each(files, size_of)]


def check_largest(largest: int, vocab: int) -> None:
    """Raise ConfigError if `largest`, the largest token id of some data, is beyond the model's vocabulary."""
    if largest >= vocab:
        raise ConfigError(f"has token {largest}, and the model {vocab}; nearest legal: model.vocab={largest + 1}")

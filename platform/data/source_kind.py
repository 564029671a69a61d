"""Kinds of sources: each one's description of itself, and what follows for all of them: the check of their files,
documents in two splits, a tokenizer trained on them, and an entry of the cache. A streamed source is read block by
block (`BlockReader`; see `platform.data.cache_entries`)."""

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
from platform.boundary.terminal import show_phase
from platform.config.fields import Data
from platform.data import data_files, tokenizer
from platform.data.data_files import ENDINGS, ROWS, DataFile, content_hash, file_size, find_data_files
from platform.data.mixture import permute_indices
from platform.data.tokenizer import Vocabulary, extra_special_tokens, open_vocabulary, read_chat_template
from platform.data.tokenizer_files import JSON, TEMPLATE
from platform.plan.layout import format_count

Documents = Iterator[tuple[int, Any]]  # (number of the document, it or its next piece)


def is_streamed(data: Data) -> bool:
    """Return True if a data source is tokenised during training, block by block; one that is held out never is."""
    return data.streaming and data.validation < 1


class PiecePlace(NamedTuple):
    """Place of a piece in a source: a file, and how many pieces of documents come before in it."""

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

    def read_block(self, start: PiecePlace) -> tuple[list[tuple[int, Any]], PiecePlace | None]:
        """Read the block of a streamed source that begins at `start`: return its documents in pieces, (number of the
        document, piece) each, and where the next block begins, None at the end of the source. Raises ConfigError,
        OSError."""
        if not self._next or self._next[0].file != start.file or self._next[0] > start:
            self._rest = self._iterate_pieces(start)
            self._read_next_piece()
        while self._next and self._next[0] < start:
            self._read_next_piece()
        block_documents: list[tuple[int, Any]] = []
        size, number = 0, 0
        while self._next:
            place, begins, piece = self._next
            if size >= (self._most if begins else 2 * self._most):
                return block_documents, place
            number += begins
            block_documents.append((number, piece))
            size += self._size(piece)
            self._read_next_piece()
        return block_documents, None

    def find_document_starts(self, start: PiecePlace, end: PiecePlace | None) -> list[PiecePlace]:
        """Return where the documents of the block from `start` to `end` begin; None: to the end of the source."""
        inside = takewhile(lambda piece: end is None or piece[0] < end, self._iterate_pieces(start))
        return [place for i, (place, begins, _) in enumerate(inside) if begins or not i]

    def _read_next_piece(self) -> None:
        """Read the next piece of a streamed source's documents, and hold it for the next block; None at the end."""
        self._next = None  # what raises is not read on from
        self._next = next(self._rest, None)

    def _iterate_pieces(self, start: PiecePlace) -> Iterator[tuple[PiecePlace, bool, Any]]:
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
SNIFFED = 32  # files whose beginnings `violations_of_source` reads


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
    stored too, in learned.bin; `blockwise`: it can be streamed; `rules`: version of the
    reader, 0 for an earlier one; `together`: documents in turn that are one of its own, 2 of pairs of answers."""

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
    rules: int = 0
    together: int = 1

    def group_files(self, files: Sequence[DataFile]) -> list[Sequence[DataFile]]:
        """Return the files of a data source in groups, each of which can be read without the others."""
        return [[file] for file in files]

    def find_held_out_files(self, data: Data) -> list[DataFile]:
        """Return the files of a data source that are held out for validation as a whole. Raises ConfigError."""
        return find_validation_files(data, self.endings)

    def violations_of_source(self, data: Data) -> list[str]:
        """Return a refusal line for each mistake in a data source that shows at the beginnings of its files."""
        lines: list[str] = []
        files: Sequence[DataFile] = ()
        held_out_files: Sequence[DataFile] = ()
        with _collect_violations(lines, data):
            located_files = self.find(data)
            if located_files and not any(map(file_size, located_files)):
                raise self._empty_source_error(data)
            files = located_files
        with _collect_violations(lines, data):
            held_out_files = self.find_held_out_files(data)
        file_groups = [("data.path", file_group) for file_group in self.group_files(files)[:SNIFFED]]
        held_out_groups = (("data.validation_path", [file]) for file in held_out_files[:SNIFFED])
        for key, file_group in [*file_groups, *held_out_groups]:
            with _collect_violations(lines, data):
                next(self.read(file_group, data, key), None)
        return lines

    def list_cache_key_values(self, data: Data, files: Sequence[DataFile]) -> list[Any]:
        """Return the values that decide which documents a data source has, and how a streamed one is divided into
        blocks; they name its cache entry. Of each file of a streamed source: format, size and samples of its
        content."""
        if not is_streamed(data):
            return self.content(data, files)
        digest = hashlib.sha256()
        for _, document in [] if files else self._read_first_block(files, data):
            digest.update(document.encode() if isinstance(document, str) else document.astype("<i8").tobytes())
        stamps = [[data_files.uncompressed_suffix(file), *data_files.sample_file_content(file)] for file in files] or [
            [digest.hexdigest()]
        ]
        held = [content_hash(file) for file in self.find_held_out_files(data)]
        return ["stream", FORMAT, data.kind, stamps, held, data.field, *extra_fields(data), data.block]

    def open_block_reader(self, files: Sequence[DataFile], data: Data) -> BlockReader:
        """Construct the reader that yields a streamed source's documents block by block, while training goes on."""
        return BlockReader(
            self.group_files(files), lambda part: self.read(part, data, "data.path"), self.size, data.block
        )

    def read_splits(self, files: Sequence[DataFile], data: Data) -> Splits:
        """Read all documents of a data source once, to find faults, and divide them into training and validation; of a
        streamed source only the held-out ones are read, and its first block trains a tokenizer. Raises ConfigError."""
        held_out_files = self.find_held_out_files(data)

        def held_documents() -> Documents:
            """Return the documents in the data files that are held out for validation; none without such files."""
            return self.read(held_out_files, data, "data.validation_path") if held_out_files else iter(())

        if is_streamed(data):
            return Splits(
                lambda held: held_documents() if held else iter(()), lambda: self._read_first_texts(files, data)
            )
        sizes: list[int] = []
        with show_phase("reading documents", unit="characters" if self.texts else "tokens") as shown:
            for number, document in self.read(files, data, "data.path"):
                if number == len(sizes):
                    sizes.append(0)
                sizes[number] += (size := self.size(document))
                shown.count_done(size)
            if not sizes:
                raise self._empty_source_error(data)
            for _ in held_documents():
                pass
        chosen = set() if held_out_files else choose_held_out_documents(sizes, data.validation)

        def read_split(held: bool) -> Documents:
            """Return the documents for validation if `held`, else the documents for training, of this data source."""
            if held_out_files and held:
                return held_documents()
            documents = self.read(files, data, "data.path")
            return (numbered_document for numbered_document in documents if (numbered_document[0] in chosen) == held)

        tail = 0.0 if held_out_files or chosen or self.together > 1 else data.validation
        size = sum(sizes)
        return Splits(read_split, lambda: self._gather_texts(read_split(False), size), len(sizes), size, tail)

    def read_training_texts(self, files: Sequence[DataFile], data: Data) -> Texts:
        """Return the texts of a data source, in pieces, for a tokenizer to be trained on. Raises ConfigError."""
        return self.read_splits(files, data).texts()

    def write_cache_entry(
        self, folder: Path, files: Sequence[DataFile], data: Data, vocab: int, existing_vocabulary: Vocabulary | None
    ) -> dict[str, Any]:
        """Build the cache entry of a data source: write into `folder` tokens.bin (the training documents, then the
        held-out ones), the arrays beside them (starts.bin, int64; learned.bin, a byte per token), and the tokenizer, of
        at most `vocab` entries, which is trained if none is `existing_vocabulary`. Return its description. The
        documents are read once for their sizes and their faults, once to train the tokenizer, and once per split to
        encode them."""
        splits = self.read_splits(files, data)
        if self.texts and splits.documents:
            documents = format_count(splits.documents, "document")
            logger.info("tokenising %s, %.1f million characters", documents, splits.characters / 1e6)
        vocabulary = self.save_or_train_vocabulary(folder, splits.texts, data, vocab, existing_vocabulary)
        parts = [(splits.read(False), splits.characters), (splits.read(True), 0)]
        description = self.write_tokens(folder, vocabulary, vocab, parts)
        if splits.tail:
            end = description["splits"]["validation"][1]
            trained = end - round(end * splits.tail)
            description["splits"] = describe_splits(trained, end)
        return description

    def save_or_train_vocabulary(
        self, folder: Path, texts: Callable[[], Texts], data: Data, vocab: int, existing_vocabulary: Vocabulary | None
    ) -> Vocabulary | None:
        """Return the tokenizer of a data source, saved in its cache entry `folder`: the one `existing_vocabulary` or,
        for a source of text, one trained on `texts`, as the keys of `data` say; None if the source holds token ids."""
        if existing_vocabulary:
            existing_vocabulary.save(folder)
        return existing_vocabulary or (train_vocabulary(folder, texts(), vocab, data) if self.texts else None)

    def write_tokens(
        self, folder: Path, vocabulary: Vocabulary | None, vocab: int, parts: Sequence[tuple[Documents, int]]
    ) -> dict[str, Any]:
        """Tokenize documents into the cache entry `folder`, tokens.bin and the arrays beside it; return their
        description. `parts`: the documents for training, then the held-out ones, each with their number of characters,
        0 if unknown."""
        ends, place, dtype = [], 0, token_dtype(vocab)
        with ExitStack() as opened:
            names = ["tokens", *(["starts"] if self.starts else []), *(["learned"] if self.learned else [])]
            open_ = {name: opened.enter_context((folder / f"{name}.bin").open("wb")) for name in names}
            for documents, characters in parts:
                for part in self.encode(vocabulary, documents, characters):
                    check_largest_id(int(part.ids.max(initial=0)), vocab)
                    open_["tokens"].write(part.ids.astype(dtype).tobytes())
                    if self.starts:
                        open_["starts"].write((np.array(part.bounds, "<i8") + place).astype("<i8").tobytes())
                    if self.learned:
                        learned = np.ones(len(part.ids), bool) if part.learned is None else part.learned
                        open_["learned"].write(learned.astype("|u1").tobytes())
                    place += len(part.ids)
                ends.append(place)
        rules = {"rules": self.rules} if self.rules else {}
        return {"dtype": dtype.str, "splits": describe_splits(*ends), **rules}

    def _gather_texts(self, documents: Iterable[tuple[int, Any]], characters: int) -> Texts:
        """Return the texts in documents, and their total number of `characters`, for a tokenizer to be trained on."""
        parts = self.texts or (lambda _: ())
        return Texts((text for _, document in documents for text in parts(document)), characters)

    def _read_first_block(self, files: Sequence[DataFile], data: Data) -> list[tuple[int, Any]]:
        """Return the documents of a streamed data source's first block, numbered. Raises ConfigError without one."""
        block_documents, _ = self.open_block_reader(files, data).read_block(BEGIN)
        if not block_documents:
            raise self._empty_source_error(data)
        return block_documents

    def _read_first_texts(self, files: Sequence[DataFile], data: Data) -> Texts:
        """Return the texts of a streamed data source's first block, for a tokenizer to be trained on."""
        documents = self._read_first_block(files, data)
        return self._gather_texts(documents, sum(self.size(document) for _, document in documents))

    def _empty_source_error(self, data: Data) -> ConfigError:
        """Return the ConfigError that refuses a data source without a document, naming its path or kind."""
        return ConfigError(f"{source_setting(data)}: no {'text' if self.texts else 'tokens'} in it")


KINDS: dict[str, SourceKind] = {}  # by data.kind; each is in a file here, or of the user's own


def find_source_kind(data: Data) -> SourceKind:
    """Return the SourceKind that reads a data source, by its data.kind (pairs, tokens, ...); text by default."""
    return KINDS.get(data.kind, KINDS["text"])


def source_setting(data: Data) -> str:
    """Return the setting that names a data source to the user, in a refusal: data.path=PATH, or data=KIND."""
    return f"data.path={data.path}" if data.path else f"data={data.kind}"


def extra_fields(data: Data) -> list[str]:
    """Return the field names of a data record, beside `data.field`, that decide the text read from it."""
    return [data.target_field, *([data.input_field] if data.input_field not in ("", UNREAD) else [])]


@contextmanager
def _collect_violations(lines: list[str], data: Data) -> Iterator[None]:
    """Append the refusal lines of an error about a data source, raised within the context, to `lines`."""
    try:
        yield
    except ConfigError as error:
        lines += error.violations
    except OSError as error:
        lines.append(f"{source_setting(data)}: cannot be read: {error.strerror}")


def choose_held_out_documents(sizes: Sequence[int], fraction: float) -> set[int]:
    """Choose the documents held out for validation, by number: in a fixed random order, each that still fits into
    `fraction` of the corpus. `sizes`: characters of each document.

    The result is empty if whole documents cannot fill half of that fraction, as with a single document: then the end of
    the token stream is held out instead.
    """
    room = budget = fraction * sum(sizes)
    held = set()
    for number in permute_indices(0, 0, len(sizes), np.arange(len(sizes))).tolist():
        if sizes[number] <= room:
            held.add(number)
            room -= sizes[number]
    return held if room <= budget / 2 else set()


def find_validation_files(data: Data, endings: list[str] = ENDINGS) -> list[DataFile]:
    """Find the data files of `data.validation_path`, held out for validation; [] if it is "". Raises ConfigError."""
    return find_data_files("data.validation_path", data.validation_path, endings) if data.validation_path else []


def train_vocabulary(folder: Path, texts: Texts, vocab: int, data: Data) -> Vocabulary:
    """Train a tokenizer of at most `vocab` entries on texts, of which long ones are sampled evenly, with the special
    tokens and the chat template that the keys of `data` name; save it in `folder`, and return it."""
    if not texts.characters:
        reason = "is trained on the texts of the data, and all of them are empty"
        raise ConfigError("data.tokenizer", data.tokenizer, reason, ["data.tokenizer=PATH"])
    share = min(1.0, _TRAINING / texts.characters)
    pieces = (t for i, t in enumerate(texts.pieces) if int((i + 1) * share) > int(i * share))
    million_characters = texts.characters * share / 1e6
    with show_phase(f"training a tokenizer of {vocab} entries on {million_characters:.1f} million characters"):
        bpe = tokenizer.train_tokenizer(pieces, vocab, extra_special_tokens(data))
    bpe.save(str(folder / JSON))
    if template := read_chat_template(data):
        (folder / TEMPLATE).write_text(template)
    vocabulary = open_vocabulary(folder)
    assert vocabulary
    return vocabulary


def training_options(data: Data) -> list[Any]:
    """Return the options in `data` for the training of a tokenizer (special tokens, template); [] if none is set."""
    options = [extra_special_tokens(data), read_chat_template(data)]
    return [options] if any(options) else []


def describe_splits(training_end: int, end: int) -> dict[str, list[int]]:
    """Describe the splits of a token stream for a cache entry: [0, `training_end`) to train on, the rest held out."""
    return {"train": [0, training_end], "validation": [training_end, end]}


def token_dtype(vocab: int) -> np.dtype:
    """Return the smallest unsigned integer type that holds all token ids of a vocabulary, for files of tokens."""
    return np.dtype("<u2" if vocab <= 1 << 16 else "<u4")


def hash_file_contents(files: Sequence[DataFile]) -> list[list[Any]]:
    """Return [format, SHA-256] of each data file, which decide the documents in it: False for text, True for .jsonl, or
    the suffix of a table."""
    formats = {end: end if end != ".jsonl" else True for end in ROWS}
    with show_phase("hashing files", sum(map(file_size, files)), "B") as shown:
        shown_files = shown.iterate_parts(files, file_size)
        return [[formats.get(data_files.uncompressed_suffix(file), False), content_hash(file)] for file in shown_files]


def check_largest_id(largest: int, vocab: int) -> None:
    """Raise ConfigError if `largest`, the largest token id of some data, is beyond the model's vocabulary."""
    if largest >= vocab:
        raise ConfigError(f"has token {largest}, and the model {vocab}; nearest legal: model.vocab={largest + 1}")

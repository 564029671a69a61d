"""Kinds of sources: which files each has, what decides their tokens, and how they are written as an entry of the cache.

`KINDS` is the table of them.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from platform.config.fields import ConfigError, Data
from platform.data import tokenizer
from platform.data.permutation import order
from platform.data.sources import pairs, texts
from platform.data.sources.data_files import DataFile, content_hash, ending
from platform.data.sources.record_files import ROWS
from platform.data.tokenizers.tokenizer_files import TEMPLATE
from platform.data.vocabulary import Vocabulary, added_tokens, open_vocabulary, template_of

TOKENIZER = "tokenizer.json"
_TRAINING = 16_000_000  # characters that the tokenizer is trained on: evenly spaced pieces of a longer corpus
_BATCH = 4096  # pairs that are encoded at once

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Texts:
    """Training documents of a source, in pieces, and the characters of them all, for a tokenizer to be trained on."""

    pieces: Iterable[str]
    characters: int


@dataclass(frozen=True)
class SourceKind:
    """Kind of source: how its files are found and checked, what decides their tokens, and how its entry is made."""

    find: Callable[[Data], Sequence[DataFile]]
    check: Callable[[Data], list[str]]  # refusal lines for what shows without reading everything
    decisive: Callable[[Data, Sequence[DataFile]], list[Any]]
    texts: Callable[[Sequence[DataFile], Data], Texts]
    write: Callable[[Path, Sequence[DataFile], Data, int, Vocabulary | None], dict[str, Any]]


def kind_of(data: Data) -> SourceKind:
    """Return the kind of a source; text, unless it is another."""
    return KINDS.get(data.kind, KINDS["text"])


def held_out(sizes: Sequence[int], fraction: float) -> set[int]:
    """Choose the documents of the validation split, by their numbers: in a fixed random order, each that still fits
    into `fraction` of the corpus. `sizes`: characters of each document.

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


def train_on(folder: Path, given: Texts, vocab: int, data: Data) -> Vocabulary:
    """Train a tokenizer of at most `vocab` entries on texts, evenly spaced pieces if these are many, with the special
    tokens and the chat template that the keys of `data` name; save it in `folder`, and return it."""
    share, start = min(1.0, _TRAINING / given.characters), monotonic()
    pieces = (t for i, t in enumerate(given.pieces) if int((i + 1) * share) > int(i * share))
    bpe = tokenizer.train_tokenizer(pieces, vocab, added_tokens(data))
    if (seconds := monotonic() - start) > 1:
        characters = given.characters * share / 1e6
        logger.info(
            "trained a tokenizer of %d entries on %.1f million characters in %.0f s", vocab, characters, seconds
        )
    bpe.save(str(folder / TOKENIZER))
    if template := template_of(data):
        (folder / TEMPLATE).write_text(template)
    return open_vocabulary(folder)


def training_options(data: Data) -> list[Any]:
    """Return which keys of `data`, other than those of the source, decide about a tokenizer that is trained."""
    found = [added_tokens(data), template_of(data)]
    return [found] if any(found) else []


def _dtype(vocab: int) -> np.dtype:
    """Return the integer type of the ids of a vocabulary in files."""
    return np.dtype("<u2" if vocab <= 1 << 16 else "<u4")


def _text_options(data: Data, files: Sequence[DataFile]) -> list[Any]:
    """Return what decides which documents files of text hold: their formats and contents, and the field."""
    return [[[_format(file), content_hash(file)] for file in files], data.field]


def _format(file: DataFile) -> bool | str:
    """Return the format of a file of text, to name its entry by: False for text, True for .jsonl."""
    end = ending(file)
    return end == ".jsonl" if end not in ROWS or end == ".jsonl" else end


def _held_documents(files: Sequence[DataFile], data: Data) -> tuple[list[int], set[int]]:
    """Read documents of text for their faults; return the characters of each, and the numbers of those held out."""
    sizes: list[int] = []
    for number, piece in texts.read_documents(files, data):
        if number == len(sizes):
            sizes.append(0)
        sizes[number] += len(piece)
    if not sizes:
        raise ConfigError(f"data.path={data.path}: no text in it")
    return sizes, held_out(sizes, data.validation)


def _documents_of(files: Sequence[DataFile], data: Data, held: set[int], validation: bool) -> Iterator[tuple[int, str]]:
    """Yield the pieces of the documents of a split, each with its document's number; `held`: the documents held out."""
    return ((n, piece) for n, piece in texts.read_documents(files, data) if (n in held) == validation)


def _training_texts(files: Sequence[DataFile], data: Data) -> Texts:
    """Return the training documents of a source of text."""
    sizes, held = _held_documents(files, data)
    return Texts((piece for _, piece in _documents_of(files, data, held, False)), sum(sizes))


def _write_texts(
    folder: Path, files: Sequence[DataFile], data: Data, vocab: int, given: Vocabulary | None
) -> dict[str, Any]:
    """Build the cache entry of a corpus of documents: write into `folder` tokens.bin (the training documents, then
    those held out) and the tokenizer, of at most `vocab` entries, which is trained if none is `given`. Return its
    description. The documents are read once for their sizes and their faults, once to train the tokenizer, and once per
    split to encode them."""
    sizes, held = _held_documents(files, data)
    logger.info("tokenising %d documents, %.1f million characters", len(sizes), sum(sizes) / 1e6)
    if given:
        given.save(folder)
    else:
        training = (piece for _, piece in _documents_of(files, data, held, False))
        given = train_on(folder, Texts(training, sum(sizes)), vocab, data)
    kept = sum(sizes[n] for n in held)
    ends, dtype = [], _dtype(vocab)
    with (folder / "tokens.bin").open("wb") as file:
        for validation in (False, True):
            characters = kept if validation else sum(sizes) - kept
            documents = _documents_of(files, data, held, validation)
            for ids in tokenizer.encode_documents(given, documents, characters):
                file.write(ids.astype(dtype).tobytes())
            ends.append(file.tell() // dtype.itemsize)
    trained, end = ends
    if not held:
        trained = end - round(end * data.validation)
    return {"dtype": dtype.str, "splits": {"train": [0, trained], "validation": [trained, end]}}


def _split_pairs(files: Sequence[DataFile], data: Data) -> tuple[dict[str, list[tuple[str, str]]], int]:
    """Read the pairs of texts of a source, by split; return them, and the characters of those to train on."""
    found = list(pairs.read_pairs(files, data))
    if not found:
        raise ConfigError(f"data.path={data.path}: no pair of texts in it")
    sizes = [len(a) + len(b) for a, b in found]
    held = held_out(sizes, data.validation)
    splits = {
        "train": [pair for n, pair in enumerate(found) if n not in held],
        "validation": [found[n] for n in sorted(held)],
    }
    return splits, sum(size for n, size in enumerate(sizes) if n not in held)


def _training_pairs(files: Sequence[DataFile], data: Data) -> Texts:
    """Return both texts of the training pairs of a source."""
    splits, characters = _split_pairs(files, data)
    return Texts((text for pair in splits["train"] for text in pair), characters)


def _write_pairs(
    folder: Path, files: Sequence[DataFile], data: Data, vocab: int, given: Vocabulary | None
) -> dict[str, Any]:
    """Build the cache entry of a corpus of pairs of texts: write into `folder` tokens.bin and ends.bin (the training
    pairs, then those held out) and the tokenizer, of at most `vocab` entries. Return its description."""
    splits, characters = _split_pairs(files, data)
    if given:
        given.save(folder)
    else:
        given = train_on(folder, Texts((text for pair in splits["train"] for text in pair), characters), vocab, data)
    dtype = _dtype(vocab)
    written = {split: _append_pairs(folder, given, iter(part), dtype) for split, part in splits.items()}
    return {"dtype": dtype.str, "splits": written}


def _append_pairs(folder: Path, vocabulary: Vocabulary, found: Iterator[tuple[str, str]], dtype: np.dtype) -> list[int]:
    """Append the tokens of pairs of texts, the next split of a cached corpus, to the files in `folder`: tokens.bin (of
    type `dtype`), and ends.bin (int64, the position in this split where each text ends). Return the numbers of tokens
    and pairs that were written."""
    place = pairs_written = 0
    with (folder / "tokens.bin").open("ab") as tokens, (folder / "ends.bin").open("ab") as ends:
        while batch := list(islice(found, _BATCH)):
            encoded = vocabulary.encode_all([text for pair in batch for text in pair])
            tokens.write(np.concatenate([np.array(ids, dtype) for ids in encoded]).tobytes())
            bounds = place + np.cumsum([len(ids) for ids in encoded], dtype="<i8")
            ends.write(bounds.astype("<i8").tobytes())
            place, pairs_written = int(bounds[-1]), pairs_written + len(batch)
    return [place, pairs_written]


def _pair_options(data: Data, files: Sequence[DataFile]) -> list[Any]:
    """Return what decides which pairs of texts files hold: options and contents."""
    return [[pairs.deciding_options(data), *map(content_hash, files)]]


KINDS: dict[str, SourceKind] = {
    "text": SourceKind(texts.files_of, texts.check_files, _text_options, _training_texts, _write_texts),
    "pairs": SourceKind(pairs.pair_files, pairs.check_pairs, _pair_options, _training_pairs, _write_pairs),
}

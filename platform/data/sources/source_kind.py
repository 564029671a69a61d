"""Kinds of sources: what each says of itself, and what they share: documents held out, a tokenizer trained."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data import tokenizer
from platform.data.permutation import order
from platform.data.reading.data_files import DataFile, content_hash, ending
from platform.data.reading.listing import find_files
from platform.data.reading.record_files import ROWS
from platform.data.tokenizers.tokenizer_files import JSON, TEMPLATE
from platform.data.vocabulary import Vocabulary, added_tokens, open_vocabulary, template_of

logger = logging.getLogger(__name__)

_TRAINING = 16_000_000  # characters that the tokenizer is trained on: evenly spaced pieces of a longer corpus


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
    write: Callable[[Path, Sequence[DataFile], Data, int, Vocabulary | None], dict[str, Any]]
    texts: Callable[[Sequence[DataFile], Data], Texts] | None = None  # None: it holds tokens, which have their own
    form: Any = None  # of its documents (`document_entry.Form`); None: they are read as a whole


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


def held_files(data: Data, endings: Sequence[str] | None = None) -> list[DataFile]:
    """Return the files that `data.validation_path` names, held out as a whole; [] if it is "". Raises ConfigError."""
    more = {} if endings is None else {"endings": list(endings)}
    return find_files("data.validation_path", data.validation_path, **more) if data.validation_path else []


def train_on(folder: Path, given: Texts, vocab: int, data: Data) -> Vocabulary:
    """Train a tokenizer of at most `vocab` entries on texts, evenly spaced pieces if these are many, with the special
    tokens and the chat template that the keys of `data` name; save it in `folder`, and return it."""
    share, start = min(1.0, _TRAINING / given.characters), monotonic()
    pieces = (t for i, t in enumerate(given.pieces) if int((i + 1) * share) > int(i * share))
    bpe = tokenizer.train_tokenizer(pieces, vocab, added_tokens(data))
    if (seconds := monotonic() - start) > 1:
        read = given.characters * share / 1e6
        logger.info("trained a tokenizer of %d entries on %.1f million characters in %.0f s", vocab, read, seconds)
    bpe.save(str(folder / JSON))
    if template := template_of(data):
        (folder / TEMPLATE).write_text(template)
    made = open_vocabulary(folder)
    assert made
    return made


def training_options(data: Data) -> list[Any]:
    """Return which keys of `data`, other than the source's, decide about a trained tokenizer."""
    found = [added_tokens(data), template_of(data)]
    return [found] if any(found) else []


def tokenizer_for(
    folder: Path, given: Vocabulary | None, texts: Callable[[], Texts], vocab: int, data: Data
) -> Vocabulary:
    """Return the tokenizer of an entry of the cache, which is saved in its `folder`: the one that is `given`, or, for
    None, one that is trained on `texts`, as the keys of `data` say."""
    if given is None:
        return train_on(folder, texts(), vocab, data)
    given.save(folder)
    return given


def type_of(vocab: int) -> np.dtype:
    """Return the integer type of the ids of a vocabulary in files."""
    return np.dtype("<u2" if vocab <= 1 << 16 else "<u4")


def contents(files: Sequence[DataFile]) -> list[list[Any]]:
    """Return the format and the hash of the content of each file, which decide which documents it holds."""
    return [[_format(file), content_hash(file)] for file in files]


def _format(file: DataFile) -> bool | str:
    """Return the format of a file of text, to name its entry by: False for text, True for .jsonl."""
    end = ending(file)
    return end == ".jsonl" if end not in ROWS or end == ".jsonl" else end


def violations_of_finding(find: Callable[[Data], Any], data: Data) -> list[str]:
    """Return the refusal lines of finding the files of a source, [] if they are found."""
    try:
        find(data)
    except ConfigError as error:
        return error.violations
    except OSError as error:
        return [f"data.path={data.path}: cannot be read: {error.strerror}"]
    return []


def check_largest(largest: int, vocab: int) -> None:
    """Raise ConfigError for a token that the vocabulary of a model does not have."""
    if largest >= vocab:
        raise ConfigError(f"has token {largest}, and the model {vocab}; nearest legal: model.vocab={largest + 1}")

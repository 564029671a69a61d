"""A byte-level BPE tokenizer that is trained on the corpus: every text round-trips, and none is unknown."""

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = 0  # the id of the token in front of every document; no text encodes to it, not even its own spelling
SMALLEST = 257  # entries: one per byte, and END_OF_TEXT
_LONGEST = 4096  # characters: longer words are cut for training
_RUN = re.compile("|".join(f"{kind}{{{_LONGEST}}}" for kind in (r"[^\W\d_]", r"\d", r"\s", r"(?:[^\w\s]|_)")))
_BATCH = 2_000_000  # characters encoded at once; the library needs some 100 bytes per token meanwhile


def train_tokenizer(texts: Iterable[str], vocab: int) -> "Tokenizer":
    """Train a byte-level BPE tokenizer of at most `vocab` entries on texts; the same texts give the same tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in _bounded(text)), trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def _bounded(text: str) -> list[str]:
    """Cut a training text in two after every _LONGEST letters in a row, and likewise digits, spaces or signs, because
    training takes time quadratic in the length of such a run, which the tokenizer sees as one word. A text without so
    long a run stays whole."""
    if len(text) <= _LONGEST or not (found := list(_RUN.finditer(text))):
        return [text]
    cuts = [0, *(run.end() for run in found), len(text)]
    return [text[start:end] for start, end in pairwise(cuts) if start < end]


def load_tokenizer(file: Path) -> "Tokenizer":
    """Load the tokenizer that was saved in `file`; it encodes the spelling of a special token like any text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.encode_special_tokens = True  # not saved in the file: special tokens in a text are text
    return tokenizer


def encode_documents(tokenizer: "Tokenizer", pieces: Iterable[tuple[int, str]]) -> Iterator[NDArray[np.uint32]]:
    """Encode pieces of text, (number of the document, text) each, into one stream of token ids with END_OF_TEXT in
    front of each document; yield it in parts."""
    current = -1
    for batch in _batches(pieces):
        ids = []
        for (document, _), encoding in zip(batch, tokenizer.encode_batch_fast([p for _, p in batch]), strict=True):
            if document != current:
                ids.append(END_OF_TEXT)
                current = document
            ids += encoding.ids
        yield np.array(ids, np.uint32)


def _batches(pieces: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Group pieces of text, (number of the document, text) each, into lists of at least _BATCH characters, each encoded
    at once."""
    batch: list[tuple[int, str]] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece[1])
        if characters >= _BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch

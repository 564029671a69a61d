"""A byte-level BPE tokenizer that is trained on the corpus, so that every text round-trips and none is unknown; and the
encoding of documents, by any tokenizer, in time linear in their text, on all cores, with word of how far it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from platform.boundary.terminal import phase
from platform.data.vocabulary import END, Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SMALLEST = 257  # entries: one per byte, and END, whose id is 0
_LONGEST = 4096  # characters: longer words are cut for training
_RUN = re.compile("|".join(f"{kind}{{{_LONGEST}}}" for kind in (r"[^\W\d_]", r"\d", r"\s", r"(?:[^\w\s]|_)")))
_WHOLE = 1 << 20  # characters of a document that a given tokenizer encodes as a whole
_BATCH = 500_000  # characters encoded at once; the library needs some 100 bytes per token meanwhile


def train_tokenizer(texts: Iterable[str], vocab: int, special: Sequence[str] = ()) -> Tokenizer:
    """Train a byte-level BPE tokenizer of at most `vocab` entries, the `special` tokens among them, on texts; the same
    texts give the same tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(dict.fromkeys([END, *special])),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in _bounded(text)), trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def _bounded(text: str) -> list[str]:
    """Cut a training text for the tokenizer after every _LONGEST letters (or digits, spaces, signs) in a row, because
    training takes time quadratic in the length of such a run, which is one word. Return its parts."""
    if len(text) <= _LONGEST or not (found := list(_RUN.finditer(text))):
        return [text]
    cuts = [0, *(run.end() for run in found), len(text)]
    return [text[start:end] for start, end in pairwise(cuts) if start < end]


def encode_documents(
    vocabulary: Vocabulary, pieces: Iterable[tuple[int, str]], characters: int = 0
) -> Iterator[NDArray[np.uint32]]:
    """Tokenize documents given in pieces, (number of the document, text) each: yield, in parts, one stream of token ids
    with the special tokens `SpecialIds.front` in front of each document. `characters`: total length of the documents,
    to report progress, 0 if unknown."""
    current = -1
    whole = _joined(pieces) if vocabulary.given else pieces
    with phase("tokenising", characters, "characters") as shown:
        for batch in _batches(whole):
            ids: list[int] = []
            for (document, _), found in zip(batch, vocabulary.encode_all([p for _, p in batch]), strict=True):
                if document != current:
                    ids += vocabulary.special.front
                    current = document
                ids += found
            yield np.array(ids, np.uint32)
            shown.add(sum(len(piece) for _, piece in batch))


def _joined(pieces: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Join the pieces of each document for the tokenizer, because tokens may cross them; yield (number, text). A
    document of more than _WHOLE characters is cut behind the last line end, or before the last space, within as
    many."""
    for document, group in groupby(pieces, itemgetter(0)):
        rest = ""
        for _, piece in group:
            rest += piece
            if len(rest) > _WHOLE:
                *cut, rest = _cut(rest)
                yield from ((document, text) for text in cut)
        if rest:
            yield document, rest


def _cut(text: str) -> Iterator[str]:
    """Yield a document's text in stretches of at most _WHOLE characters for the tokenizer, each up to a line end or at
    least a space if one is near; the last one may be empty."""
    place = 0
    while len(text) - place > _WHOLE:
        end = place + _WHOLE
        line, space = (text.rfind(mark, place + _WHOLE // 2, end) for mark in ("\n", " "))
        end = line + 1 if line >= 0 else space if space >= 0 else end
        yield text[place:end]
        place = end
    yield text[place:]


def _batches(pieces: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Group pieces of documents, (number of the document, text) each, into batches of at least _BATCH characters, which
    the tokenizer encodes at once."""
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

"""Tokens of pairs of texts."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from platform.config.fields import ConfigError, Data
from platform.data.kinds.source_kind import SourceKind, Texts, held_out, tokenizer_for, type_of
from platform.data.sources import pairs
from platform.data.sources.data_files import DataFile, content_hash
from platform.data.vocabulary import Vocabulary

_BATCH = 4096  # pairs that are encoded at once
Pairs = list[tuple[str, str]]


def _splits(files: Sequence[DataFile], data: Data) -> tuple[dict[str, Pairs], Texts]:
    """Read the pairs of texts of a source, by split; return them, and the texts of those to train on."""
    found = list(pairs.read_pairs(files, data))
    if not found:
        raise ConfigError(f"data.path={data.path}: no pair of texts in it")
    sizes = [len(a) + len(b) for a, b in found]
    held = held_out(sizes, data.validation)
    splits = {
        "train": [pair for n, pair in enumerate(found) if n not in held],
        "validation": [found[n] for n in sorted(held)],
    }
    characters = sum(size for n, size in enumerate(sizes) if n not in held)
    return splits, Texts((text for pair in splits["train"] for text in pair), characters)


def _write(folder: Path, files: Sequence[DataFile], data: Data, vocab: int, given: Vocabulary | None) -> dict[str, Any]:
    """Build the cache entry of a corpus of pairs of texts: write into `folder` tokens.bin and ends.bin (the training
    pairs, then those held out) and the tokenizer, of at most `vocab` entries. Return its description."""
    splits, texts = _splits(files, data)
    vocabulary, dtype = tokenizer_for(folder, given, lambda: texts, vocab, data), type_of(vocab)
    written = {split: _append(folder, vocabulary, iter(part), dtype) for split, part in splits.items()}
    return {"dtype": dtype.str, "splits": written}


def _append(folder: Path, vocabulary: Vocabulary, found: Iterator[tuple[str, str]], dtype: np.dtype) -> list[int]:
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


def _options(data: Data, files: Sequence[DataFile]) -> list[Any]:
    """Return what decides which pairs of texts files hold: options and contents."""
    return [[pairs.deciding_options(data), *map(content_hash, files)]]


PAIRS = SourceKind(
    find=pairs.pair_files,
    check=pairs.check_pairs,
    decisive=_options,
    write=_write,
    texts=lambda files, data: _splits(files, data)[1],
)

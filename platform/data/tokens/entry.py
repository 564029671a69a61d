"""Entries of the cache: the tokens of one source, its training documents and then those held out, and a tokenizer."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from platform.boundary import schema
from platform.boundary.schema import Malformed, Many, OneOf, OpenMap, Span, Text
from platform.config.fields import Data
from platform.data.mixture import DataSource, naming
from platform.data.sources.data_files import DataFile
from platform.data.tokens import cache
from platform.data.tokens.kinds import TOKENIZER, SourceKind, Texts, kind_of, train_on, training_options
from platform.data.tokens.streams import PairStream
from platform.data.vocabulary import Vocabulary, open_vocabulary

FORMAT = 1  # of a cache entry: raise it when the same documents would give other tokens or other files
_WINDOW = 1 << 22  # tokens that are checked at once
_PLACE = Annotated[int, Span(0, 1 << 50)]


@dataclass(frozen=True)
class TokenFiles:
    """Description of a corpus in the cache: the type of tokens.bin, and where its splits are: (start, end) in tokens;
    for pairs of texts (number of tokens, number of pairs)."""

    dtype: Annotated[str, OneOf(("<u2", "<u4"), "type")]
    splits: dict[Annotated[str, OneOf(("train", "validation"), "split")], tuple[_PLACE, _PLACE]]
    files: Annotated[dict[str, Any], OpenMap((), ("tokens.bin", TOKENIZER))]


def open_entry(data: Data, vocab: int, shared: Path | None, given: Vocabulary | None = None) -> tuple[Path, TokenFiles]:
    """Return the folder in the cache of the source `data`, and its description; it is built by the first process that
    asks, in `shared` too if that is given. `vocab`: the most entries of the tokenizer; `given`: the tokenizer; None:
    one is trained on the source.

    The entry is named by a hash of the files and of every option that decides about their tokens.
    """
    kind = kind_of(data)
    files = kind.find(data)
    entry = cache.root(data.cache) / _name(data, kind, files, vocab, given)
    read = partial(read_entry, vocab=vocab)

    def make(folder: Path) -> dict[str, Any]:
        return kind.write(folder, files, data, vocab, given)

    if shared:
        return cache.fetch_shared(entry, shared, make, read)
    return entry, cache.fetch(entry, make, read)


def _name(data: Data, kind: SourceKind, files: Sequence[DataFile], vocab: int, given: Vocabulary | None) -> str:
    """Return the name of a source's entry in the cache."""
    decisive = [*kind.decisive(data, files), data.validation, vocab]
    return hash_of([FORMAT, *decisive, *([given.digest] if given else training_options(data))])


def hash_of(values: list[Any]) -> str:
    """Return a hash of plain data as 64 hexadecimal digits, which names an entry of the cache."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def streams_of(folder: Path, entry: TokenFiles) -> dict[str, Any]:
    """Return the streams of tokens of an entry of the cache in `folder`, by split."""
    tokens = np.memmap(folder / "tokens.bin", entry.dtype, mode="r").view(np.ndarray)
    if not (folder / "ends.bin").exists():
        return {split: tokens[start:end] for split, (start, end) in entry.splits.items()}
    ends = np.fromfile(folder / "ends.bin", "<i8").reshape(-1, 2)
    streams, place, pair = {}, 0, 0
    for split, (length, count) in entry.splits.items():
        streams[split] = PairStream(tokens[place : place + length], ends[pair : pair + count])
        place, pair = place + length, pair + count
    return streams


def read_entry(folder: Path, meta: dict[str, Any], vocab: int, deep: bool = True) -> TokenFiles:
    """Read the description of a corpus in the cache, `meta`, and check the files in `folder` against it; `vocab`: most
    entries of the tokenizer; `deep`: read every token. Raises Malformed for an entry that no kind of source can have
    made, even if its hashes hold."""
    entry: TokenFiles = schema.read(TokenFiles, meta)
    try:
        entries = open_vocabulary(folder).size
        tokens = np.memmap(folder / "tokens.bin", entry.dtype, mode="r")
    except Exception as error:  # the library raises its own for a file that it cannot parse
        raise Malformed(str(error)) from None
    train, held = (entry.splits.get(split, (-1, -1)) for split in ("train", "validation"))
    if (folder / "ends.bin").exists():
        fits = _pairs_fit(np.fromfile(folder / "ends.bin", "<i8"), train, held, len(tokens))
    else:
        fits = 0 == train[0] <= train[1] == held[0] <= held[1] == len(tokens)
    if not fits:
        raise Malformed("its splits are not its tokens")
    windows = range(0, len(tokens) if deep else 0, _WINDOW)
    if entries > vocab or any(int(tokens[i : i + _WINDOW].max()) >= entries for i in windows):
        raise Malformed("a token is not in the vocabulary")
    return entry


def _pairs_fit(ends: NDArray[np.int64], train: Sequence[int], held: Sequence[int], tokens: int) -> bool:
    """Return True if `ends`, the token positions in ends.bin where source and target of each pair end, rise in each
    split to its number of tokens. `train` and `held` are the splits' (number of tokens, number of pairs); `tokens`
    counts those of tokens.bin."""
    if min(*train, *held) < 0 or train[0] + held[0] != tokens or 2 * (train[1] + held[1]) != len(ends):
        return False
    parts = (ends[: 2 * train[1]], train[0]), (ends[2 * train[1] :], held[0])
    return all((np.diff(part, prepend=0) >= 0).all() and int(part.max(initial=0)) == size for part, size in parts)


@dataclass(frozen=True)
class _Common:
    """Description of what several sources have in common in the cache: a tokenizer, and the names of their entries."""

    entries: Annotated[list[Annotated[str, Text("[0-9a-f]{64}", "the name of an entry")]], Many(1, 1000)]
    files: Annotated[dict[str, Any], OpenMap((), (TOKENIZER,))]


def open_common(
    sources: Sequence[DataSource], vocab: int, shared: Path | None, given: Vocabulary | None = None
) -> tuple[Path, list[str]]:
    """Return the folder in the cache of the tokenizer that several sources share, of at most `vocab` entries, and the
    names of their own entries. Unless one is `given` it is trained on all of them by the first process that asks."""
    every = []
    for source in sources:
        with naming(source):
            kind = kind_of(source.data)
            every.append((source, kind, kind.find(source.data)))
    decisive = [[*kind.decisive(source.data, files), source.data.validation] for source, kind, files in every]
    options = [given.digest] if given else training_options(sources[0].data)
    place = cache.root(sources[0].data.cache) / hash_of([FORMAT, "common", decisive, vocab, *options])

    def make(folder: Path) -> dict[str, Any]:
        if given:
            given.save(folder)
            return {"entries": [_name(source.data, kind, files, vocab, given) for source, kind, files in every]}
        found = [_naming_texts(source, kind, files) for source, kind, files in every]
        texts = Texts(chain.from_iterable(t.pieces for t in found), sum(t.characters for t in found))
        made = train_on(folder, texts, vocab, sources[0].data)
        return {"entries": [_name(source.data, kind, files, vocab, made) for source, kind, files in every]}

    if shared:
        folder, found = cache.fetch_shared(place, shared, make, read_common)
        return folder, found.entries
    return place, cache.fetch(place, make, read_common).entries


def _naming_texts(source: DataSource, kind: SourceKind, files: Sequence[DataFile]) -> Texts:
    """Return the texts of a source to train a tokenizer on; what is refused in them names the source."""

    def pieces(given: Texts) -> Iterator[str]:
        with naming(source):
            yield from given.pieces

    with naming(source):
        found = kind.texts(files, source.data)
    return Texts(pieces(found), found.characters)


def read_common(folder: Path, meta: dict[str, Any]) -> _Common:
    """Read the description `meta` of what several sources have in common. Raises Malformed."""
    found: _Common = schema.read(_Common, meta)
    return found

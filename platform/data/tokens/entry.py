"""Entries of the cache: the tokens of one source, its training documents and then those held out, and a tokenizer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from platform.boundary import schema
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed, Many, OneOf, Span, Text
from platform.config.fields import Data, short_hash
from platform.data.mixture import DataSource, naming
from platform.data.reading.data_files import DataFile
from platform.data.sources.source_kind import SourceKind, Texts, kind_of, train_on, training_options
from platform.data.sources.token_files import CheckedTokens
from platform.data.tokens import cache
from platform.data.tokens.streams import DocumentStream, JoinedTokens, PairStream, mapped
from platform.data.vocabulary import Vocabulary, open_vocabulary

FORMAT = 1  # of a cache entry: raise it when the same documents would give other tokens or other files
_WINDOW = 1 << 22  # tokens that are checked at once
_PLACE = Annotated[int, Span(0, 1 << 50)]


@dataclass(frozen=True)
class _ArrayPlace:
    """Place of tokens in a file of the user's, which is not copied: `count` of a type, from byte `offset` on; `bytes`:
    the size of the file."""

    path: Annotated[str, Text("/.*", "an absolute path")]
    dtype: Annotated[str, OneOf(("|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<i8"), "type")]
    offset: _PLACE
    count: _PLACE
    bytes: _PLACE


@dataclass(frozen=True)
class TokenFiles:
    """Description of a source in the cache: where its splits are, (start, end) in tokens; for pairs of texts (number of
    tokens, number of pairs). The tokens are in tokens.bin, of type `dtype`, or, end to end, in `arrays` elsewhere."""

    splits: dict[Annotated[str, OneOf(("train", "validation"), "split")], tuple[_PLACE, _PLACE]]
    files: dict[str, Any]
    dtype: Annotated[str, OneOf(("", "<u2", "<u4"), "type")] = ""
    arrays: list[_ArrayPlace] = field(default_factory=list)

    def digest(self, folder: Path) -> str:
        """Return a hash of a data source's tokens, which are in its cache entry `folder` and described here."""
        return short_hash([folder.name, self.files.get("tokens.bin")])

    def tokens(self, folder: Path, vocab: int) -> list[Any]:
        """Return the arrays of a data source's token ids, mapped into memory from its cache entry `folder`, or from
        files of the user's, then checked against a vocabulary of `vocab` entries as they are read. Raises Malformed or
        OSError if they are not there."""
        if not self.arrays:
            if not self.dtype or "tokens.bin" not in self.files:
                raise Malformed("lacks tokens")
            return [mapped(folder / "tokens.bin", self.dtype)]
        found = []
        for place in self.arrays:
            if Path(place.path).stat().st_size != place.bytes:
                raise Malformed(f"{place.path} has another size than before")
            if place.count:
                array = np.memmap(place.path, place.dtype, "r", place.offset, (place.count,))
                found.append(CheckedTokens(array.view(np.ndarray), Path(place.path), vocab))
        return found


def open_entry(data: Data, vocab: int, shared: Path | None, given: Vocabulary | None = None) -> tuple[Path, TokenFiles]:
    """Open the token cache's entry of the data source `data`: return its folder and its description. The first process
    that asks builds it, in `shared` too if that is given. `vocab`: the most entries of the tokenizer; `given`: the
    tokenizer; None: one is trained on the source, if it is one of text.

    The entry is named by a hash of the files and of every option that decides about their tokens.
    """
    kind = kind_of(data)
    files = kind.find(data)
    entry = cache.root(data.cache) / _name(data, kind, files, vocab, given)
    read = partial(read_entry, vocab=vocab)

    def make(folder: Path) -> dict[str, Any]:
        """Write the data source's tokens into the empty `folder` of a new cache entry; return its description."""
        return kind.write_entry(folder, files, data, vocab, given)

    if shared:
        return cache.fetch_shared(entry, shared, make, read)
    return entry, cache.fetch(entry, make, read)


def _name(data: Data, kind: SourceKind, files: Sequence[DataFile], vocab: int, given: Vocabulary | None) -> str:
    """Return the name of a data source's entry in the token cache: a hash of all options that decide its tokens."""
    decisive = [*kind.decisive(data, files), data.validation, vocab]
    return cache.hash_of([FORMAT, *decisive, *([given.digest] if given else training_options(data))])


def streams_of(folder: Path, entry: TokenFiles, vocab: int) -> dict[str, Any]:
    """Return the token streams in a data source's cache entry, split -> stream; `vocab`: legal ids are below it."""
    arrays = entry.tokens(folder, vocab)
    if "ends.bin" in entry.files:
        return _pair_streams(arrays[0], np.fromfile(folder / "ends.bin", "<i8").reshape(-1, 2), entry.splits)
    streams: dict[str, Any] = {}
    known = np.fromfile(folder / "starts.bin", "<i8") if "starts.bin" in entry.files else None
    learned = _learned(folder) if "learned.bin" in entry.files else None
    for split, (start, end) in entry.splits.items():
        tokens = JoinedTokens(arrays, start, end) if entry.arrays else arrays[0][start:end]
        streams[split] = tokens
        if known is not None and len(known):
            wanted = None if learned is None else learned[start:end]
            streams[split] = DocumentStream(tokens, known[(known >= start) & (known < end)] - start, wanted)
    return streams


def _learned(folder: Path) -> NDArray[np.bool_]:
    """Return a mask of the tokens in a cache entry that count in the loss, mapped into memory."""
    return mapped(folder / "learned.bin", "|b1")


def _pair_streams(tokens: NDArray[Any], ends: NDArray[np.int64], splits: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Divide the tokens of pairs of texts, whose texts end at `ends` [pairs, 2], into streams by split."""
    streams, place, pair = {}, 0, 0
    for split, (length, count) in splits.items():
        streams[split] = PairStream(tokens[place : place + length], ends[pair : pair + count])
        place, pair = place + length, pair + count
    return streams


def read_entry(folder: Path, meta: dict[str, Any], vocab: int, deep: bool = True) -> TokenFiles:
    """Read the description of a data source's entry in the token cache, `meta`, and check the files in `folder` against
    it. `vocab`: most entries of the tokenizer; `deep`: True reads every token. Raises Malformed for an entry that no
    kind of source can have made, even if its hashes hold."""
    entry = schema.read(TokenFiles, meta)
    try:
        vocabulary = open_vocabulary(folder)
        entries = vocabulary.size if vocabulary else vocab
        arrays = entry.tokens(folder, vocab)
    except Exception as error:  # the library raises its own for a file that it cannot parse
        raise Malformed(str(error)) from None
    total = sum(map(len, arrays))
    train, held = (entry.splits.get(split, (-1, -1)) for split in ("train", "validation"))
    if "ends.bin" in entry.files:
        fits = not entry.arrays and _pairs_fit(np.fromfile(folder / "ends.bin", "<i8"), train, held, total)
    else:
        fits = 0 == train[0] <= train[1] == held[0] <= held[1] == total
    if not fits or not _ascend(folder, entry, total):
        raise Malformed("its splits are not its tokens")
    if "learned.bin" in entry.files:
        wanted = _learned(folder)
        if (
            len(wanted) != total
            or "starts.bin" not in entry.files
            or (deep and int(wanted.view("|u1").max(initial=0)) > 1)
        ):
            raise Malformed("what is to be learned is not said of its tokens")
    if entries > vocab or (deep and not entry.arrays and _beyond(arrays[0], entries)):
        raise Malformed("a token is not in the vocabulary")
    return entry


def _beyond(tokens: NDArray[Any], entries: int) -> bool:
    """Return True if some token id in a cache entry is outside a vocabulary of `entries` tokens."""
    return any(int(tokens[i : i + _WINDOW].max()) >= entries for i in range(0, len(tokens), _WINDOW))


def _ascend(folder: Path, entry: TokenFiles, total: int) -> bool:
    """Return True if a cache entry's document starts in starts.bin, if there are any, ascend within `total` tokens."""
    if "starts.bin" not in entry.files:
        return True
    starts = np.fromfile(folder / "starts.bin", "<i8")
    return not len(starts) or bool(starts[0] >= 0 and starts[-1] < total and (np.diff(starts) > 0).all())


def _pairs_fit(ends: NDArray[np.int64], train: Sequence[int], held: Sequence[int], tokens: int) -> bool:
    """Return True if `ends`, the token positions in ends.bin where source and target of each pair end, rise in each
    split to its number of tokens. `train` and `held` are the splits' (number of tokens, number of pairs); `tokens`:
    their number in tokens.bin."""
    if min(*train, *held) < 0 or train[0] + held[0] != tokens or 2 * (train[1] + held[1]) != len(ends):
        return False
    parts = (ends[: 2 * train[1]], train[0]), (ends[2 * train[1] :], held[0])
    return all((np.diff(part, prepend=0) >= 0).all() and int(part.max(initial=0)) == size for part, size in parts)


@dataclass(frozen=True)
class _Common:
    """Description of what several sources have in common in the cache: a tokenizer, and the names of their entries."""

    entries: Annotated[list[Annotated[str, Text("[0-9a-f]{64}", "the name of an entry")]], Many(1, 1000)]
    files: dict[str, Any]


def open_common(
    sources: Sequence[DataSource], vocab: int, shared: Path | None, given: Vocabulary | None = None
) -> tuple[Path, list[str]]:
    """Return the cache folder of the tokenizer that several data sources share, of at most `vocab` entries, and the
    names of their own entries. Unless one is `given`, it is trained on all of them by the first process that asks.
    `shared`: a folder that other machines see, to which the entry is copied."""
    every = []
    for source in sources:
        with naming(source):
            kind = kind_of(source.data)
            every.append((source, kind, kind.find(source.data)))
    textual = [(source, kind, files) for source, kind, files in every if kind.texts and source.trained]
    if textual and not given and (other := next((source for source, kind, _ in every if not kind.texts), None)):
        made = "a tokenizer that is trained on text would not be that of these tokens"
        raise ConfigError(f"{other.key}.kind={other.data.kind}: beside {textual[0][0].key}: {made}")
    decisive = [[*kind.decisive(source.data, files), source.data.validation] for source, kind, files in every]
    options = [given.digest] if given else training_options(sources[0].data)
    place = cache.root(sources[0].data.cache) / cache.hash_of([FORMAT, "common", decisive, vocab, *options])

    def make(folder: Path) -> dict[str, Any]:
        """Save the data sources' common tokenizer in `folder`, trained on texts if none is given; return their entries'
        names."""
        made = given
        if given:
            given.save(folder)
        elif textual:
            found = [_naming_texts(*part) for part in textual]
            texts = Texts(chain.from_iterable(t.pieces for t in found), sum(t.characters for t in found))
            made = train_on(folder, texts, vocab, sources[0].data)
        return {"entries": [_name(source.data, kind, files, vocab, made) for source, kind, files in every]}

    if shared:
        folder, found = cache.fetch_shared(place, shared, make, read_common)
        return folder, found.entries
    return place, cache.fetch(place, make, read_common).entries


def _naming_texts(source: DataSource, kind: SourceKind, files: Sequence[DataFile]) -> Texts:
    """Return the texts of a mixture's data source for a tokenizer to be trained on; errors in them name the source."""

    def pieces(given: Texts) -> Iterator[str]:
        """Yield the pieces of texts for a tokenizer's training; errors in them name the mixture's data source."""
        with naming(source):
            yield from given.pieces

    with naming(source):
        found = kind.training_texts(files, source.data)
    return Texts(pieces(found), found.characters)


def read_common(folder: Path, meta: dict[str, Any]) -> _Common:
    """Read `meta`, the description of a tokenizer that several data sources share in the cache. Raises Malformed."""
    return schema.read(_Common, meta)

"""The corpus: sources -> tokens -> samples of one length in one global order. Its only state is a sample's index."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from platform.boundary.refusals import ConfigError, refuse_all, violation
from platform.boundary.schema import Malformed
from platform.config.fields import Config, Data, objective_of, short_hash
from platform.data import cache, cache_entries, packing
from platform.data import streams as synthetic
from platform.data import text_sources as text_sources  # its import registers the kinds of sources
from platform.data.cache_entries import FORMAT, StreamedTokens, TokenFiles
from platform.data.data_checks import teaches_nothing, too_small, violations_of_sources
from platform.data.mixture import DataSource, mix, naming, order, shares_of, sources_of, turns
from platform.data.objectives import Objective, SampleShape, make_objective, word_of_objective
from platform.data.source_kind import is_streamed, kind_of
from platform.data.special_tokens import SpecialIds
from platform.data.streams import Ints, starts_of
from platform.data.tokenizer import Vocabulary, given_vocabulary, open_vocabulary
from platform.data.tokenizer_files import TokenizerFiles

TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True)
class SourceTokens:
    """Part of a corpus: the tokens of one of its sources, by split."""

    name: str  # "" if it is the only one
    streams: Mapping[str, Any]  # by split (train, validation): ids at an array of positions, or a class of `streams`
    digest: str  # of documents, tokenizer and splits: equal digests, equal samples

    def beginning(self, split: str) -> Any:
        """Return the tokens of this data source's split, "train" or "validation"; if streamed, its first block's."""
        stream = self.streams[split]
        return stream.first() if isinstance(stream, StreamedTokens) else stream


class SamplePlaces(NamedTuple):
    """Places of samples that lie in one token stream: of the source `part`, with their positions among the samples that
    were asked for, and their indices in the stream."""

    part: SourceTokens
    stream: Any
    rows: Ints
    indices: Ints


@dataclass(frozen=True)
class Corpus:
    """Tokenised corpus, cut into samples.

    A split of a source is one stream of tokens, with special tokens in front of each document; a sample may span
    documents. The objective makes samples of the stream. Training samples are dealt to the sources by their shares
    (`platform.data.mixture.turns`); each source has a validation split of its own.
    """

    vocab: int  # ids are in [0, vocab); at most model.vocab
    objective: Objective
    seed: int
    parts: tuple[SourceTokens, ...]
    shares: tuple[int, ...]  # of the parts, in training
    special: SpecialIds = field(default_factory=SpecialIds)  # that begin and end documents
    vocabulary: Vocabulary | None = None  # its tokenizer; None if it has no text
    entry: Path | None = None  # the folder of its tokens; None if it has none

    @property
    def files(self) -> TokenizerFiles:
        """Return the files of the corpus's tokenizer, name -> bytes; {} if it has no text."""
        return self.vocabulary.files if self.vocabulary else {}

    def encode(self, text: str) -> list[int]:
        """Tokenize a text with the corpus's tokenizer (synthetic data: its bytes); return the token ids."""
        return self.vocabulary.encode(text) if self.vocabulary else synthetic.encode_bytes(text, self.vocab)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text that the corpus's tokenizer decodes from token ids; ids outside [0, vocab) are left out."""
        return self.vocabulary.decode(ids) if self.vocabulary else synthetic.show_ids(ids)

    @property
    def digest(self) -> str:
        """Return a hash of the corpus's documents, tokenizer, splits and shares: equal hashes mean equal samples."""
        if len(self.parts) == 1:
            return self.parts[0].digest
        return short_hash([[part.digest, share] for part, share in zip(self.parts, self.shares, strict=True)])

    @property
    def validations(self) -> dict[str, tuple[str, int]]:
        """Return the corpus's validation splits that have samples: source name -> (split to evaluate, share)."""
        held = {p.name: share for p, share in zip(self.parts, self.shares, strict=True) if self._samples(p, VALIDATION)}
        alike = not any(held.values())  # of sources that are held out as a whole, none has a share
        return {name: (f"{VALIDATION}/{name}".rstrip("/"), share or int(alike)) for name, share in held.items()}

    @property
    def samples(self) -> dict[str, int]:
        """Return the number of samples in each split ("train", "validation") of the corpus, all sources together."""
        return {s: sum(self._samples(part, s) for part in self.parts) for s in (TRAIN, VALIDATION)}

    def samples_of(self, split: str) -> int:
        """Return how many samples a split of the corpus ("train", "validation/web") has in one epoch."""
        kind, _, name = split.partition("/")
        return sum(self._samples(p, kind) for p in self.parts if kind == TRAIN or p.name == name)

    def batch(self, split: str, start: int, end: int) -> dict[str, NDArray[np.int64]]:
        """Return samples [start, end) of the split's endless global order, as data tensors such as "tokens": name ->
        int64 [end - start, length].

        Every epoch of a source in `train` has a permutation of its own; validation is never shuffled.
        """
        numbers = np.arange(start, end)
        keys = mix(self.seed, split == TRAIN, numbers)
        found: dict[str, NDArray[np.int64]] = {}
        for _, stream, rows, index in self.places(split, numbers):
            made = self.objective.batch(stream, index, keys[rows])
            if len(rows) == len(numbers):
                return made
            for name, values in made.items():
                found.setdefault(name, np.empty((len(numbers), *values.shape[1:]), values.dtype))[rows] = values
        return found

    def predicted(self, split: str, start: int, end: int) -> int:
        """Count the labels that the loss averages over (not padding) in samples [start, end) of a split."""
        places = self.places(split, np.arange(start, end))
        return sum(self.objective.predicted(stream, index) for _, stream, _, index in places)

    def name_of(self, split: str, number: int) -> str:
        """Name sample `number` of a split's endless global order for the user: "sample 3 of data.sources.web"."""
        ((part, stream, _, index),) = self.places(split, np.array([number]))
        if part.streams[split.partition("/")[0]] is not stream:  # a block of a stream
            return f"sample {number} of the stream"
        return f"sample {index[0]}{f' of data.sources.{part.name}' if part.name else ''}"

    def places(self, split: str, numbers: Ints) -> Iterator[SamplePlaces]:
        """Find samples `numbers` of the split's endless global order in the corpus: yield the places of some of them
        for each stream that has any."""
        split, _, name = split.partition("/")
        if split == TRAIN:
            source, count = turns(self.shares, numbers)
        else:
            source = np.full(len(numbers), [part.name for part in self.parts].index(name))
            count = numbers
        for number in np.unique(source):
            rows = np.nonzero(source == number)[0]
            part = self.parts[number]
            if isinstance(stream := part.streams[split], StreamedTokens):
                for block, some, index in stream.places(count[rows]):
                    yield SamplePlaces(part, block, rows[some], index)
                continue
            epoch, index = np.divmod(count[rows], samples := self._samples(part, split))
            found = order(self.seed, epoch, samples, index) if split == TRAIN else index
            yield SamplePlaces(part, stream, rows, found)

    def _samples(self, part: SourceTokens, split: str) -> int:
        """Count the samples that a data source has in one epoch of a split; if streamed, in its first block."""
        return max(0, self.objective.samples(part.beginning(split)))


def corpus_of(config: Config, *, shared: Path | None = None, entry: str = "") -> Corpus:
    """Open the tokenised corpus that a run's configuration names, cut into samples for its training objective.
    `shared`: a folder for its tokens that other machines see; `entry`: the cache entry with its tokens, if known."""
    m = config.model
    return open_corpus(
        config.data,
        length=m.length,
        source_length=m.source_length,
        vocab=m.vocab,
        segments=m.segments,
        seed=config.seed,
        objective=objective_of(config),
        shared=shared,
        entry=Path(entry) if entry else None,
    )


def open_corpus(
    data: Data,
    *,
    length: int,
    vocab: int,
    seed: int,
    source_length: int = 0,
    segments: int = 0,
    objective: str = "causal",
    shared: Path | None = None,
    entry: Path | None = None,
) -> Corpus:
    """Open the tokenised corpus of `data` in samples of `length` tokens, from a vocabulary of at most `vocab`.

    `source_length`: tokens per sequence of the encoder in an encoder-decoder; 0 = length. `segments`: number of
    segments of a sample that an encoder distinguishes; 0 = none. `shared`: a folder in which other machines are to find
    its tokens too. `entry`: its cache entry, found by another process of this run; then no text is read, tokenised or
    hashed, unless it is streamed.

    Text is tokenised by the first process that asks, and cached. Raises ConfigError for a user's mistakes: the lines of
    `violations_of_sources`, a fault deep inside a file, a split without one whole sample.
    """
    sources, known = sources_of(data), None
    if entry:
        with _as_found(entry):
            known = open_vocabulary(entry)
    elif data.kind != "synthetic":
        known = given_vocabulary(data)
    special = special_of(known, sources[0].data)
    shape = SampleShape(length, source_length or length, vocab, segments, special, data.document_mask)
    goal = make_objective(objective, shape, data.objective_settings)
    if not entry:
        refuse_all(violations_of_sources(data, vocab=vocab, reserved=goal.reserved))
    opening = _Opening(sources, goal, vocab - goal.reserved, seed, length)
    if data.kind == "synthetic":
        corpus = opening.synthetic()
    else:
        corpus = opening.trusted(entry) if entry else opening.tokenised(shared, known)
    if not entry:
        _check_sizes(corpus, sources, length)
    streamed = any(isinstance(part.streams[TRAIN], StreamedTokens) for part in corpus.parts)  # then weights are given
    samples = [1 if streamed else max(1, goal.samples(part.streams[TRAIN])) for part in corpus.parts]
    return replace(corpus, shares=tuple(shares_of(sources, samples)))


@contextmanager
def _as_found(folder: Path) -> Iterator[None]:
    """Raise OSError in place of Malformed: a cache entry of tokens has changed since the driver read it."""
    try:
        yield
    except Malformed as error:
        raise OSError(f"{folder} is not what the driver has found there: {error}") from None


def _check_sizes(corpus: Corpus, sources: Sequence[DataSource], length: int) -> None:
    """Raise ConfigError if a split of some data source has no sample of `length` tokens, or none with a label."""
    violations = []
    for source, part in zip(sources, corpus.parts, strict=True):
        streams = {split: part.beginning(split) for split in part.streams}
        small = too_small(source, streams, corpus.objective, length)
        violations += small or teaches_nothing(source, streams, corpus.objective)
    refuse_all(violations)


def special_of(vocabulary: Vocabulary | None, data: Data) -> SpecialIds:
    """Return the ids of the special tokens that begin and end documents: the tokenizer's, else `data.separator`."""
    if vocabulary or data.kind != "tokens":
        return vocabulary.special if vocabulary else SpecialIds()
    return SpecialIds((data.separator,), data.separator)


@dataclass(frozen=True)
class _Opening:
    """Opening of a corpus, whose ids are in [0, vocab). The caller sets its shares."""

    sources: Sequence[DataSource]
    objective: Objective
    vocab: int
    seed: int
    length: int

    def synthetic(self) -> Corpus:
        """Open a corpus of random token ids, uniform in [0, vocab), for benchmarks (data=synthetic)."""
        vocab, seed = self.vocab, self.seed
        streams = {split: synthetic.RandomTokens(seed, i, vocab) for i, split in enumerate((TRAIN, VALIDATION))}
        part = SourceTokens("", streams, short_hash(["synthetic", FORMAT, vocab, seed]))
        return Corpus(vocab, self.objective, seed, (part,), (1,))

    def tokenised(self, shared: Path | None, given: Vocabulary | None) -> Corpus:
        """Open a corpus: tokenise the text of each data source, or take its tokens from the cache if a process has done
        so. `shared`: a folder that other machines see, in which the cache entries are put too; `given`: the tokenizer;
        None trains one, on all sources together."""
        folder, entries = None, []
        if len(self.sources) > 1:
            folder, names = cache_entries.open_common(self.sources, self.vocab, shared, given)
            given = given or open_vocabulary(folder)
        for source in self.sources:
            with naming(source):
                entries.append(cache_entries.open_entry(source.data, self.vocab, shared, given))
        assert not folder or names == [place.name for place, _ in entries]
        return self._of_entries(folder or entries[0][0], entries)

    def trusted(self, folder: Path) -> Corpus:
        """Open the corpus from cache entries of tokens that another process of this run has verified, without hashing
        them again. `folder`: the entry that has the tokenizer. Raises OSError if an entry has changed since."""
        read = partial(cache_entries.read_entry, vocab=self.vocab, deep=False)
        with _as_found(folder):
            several = len(self.sources) > 1
            names = cache.open_trusted(folder, cache_entries.read_common).entries if several else [folder.name]
            if len(names) != len(self.sources):
                raise Malformed(f"has {len(names)} sources, not {len(self.sources)}")
            places = [folder.parent / name for name in names]
            entries = [(place, cache.open_trusted(place, read)) for place in places]
            return self._of_entries(folder, entries, trusted=True)

    def _of_entries(self, folder: Path, entries: Sequence[tuple[Path, TokenFiles]], trusted: bool = False) -> Corpus:
        """Make the corpus out of the cache entries with its sources' tokens, (folder, description) each. `folder`: the
        entry that holds their common tokenizer, if there is one; `trusted`: True if another process of this run has
        verified them."""
        vocabulary, parts = open_vocabulary(folder), []
        for source, (place, found) in zip(self.sources, entries, strict=True):
            with naming(source):
                streams = cache_entries.streams_of(place, found, self.vocab)
                streams = dict(self._rows_of(source.data, streams, place, vocabulary, trusted))
                if is_streamed(source.data):
                    streams[TRAIN] = self._streamed(source.data, place, vocabulary)
            parts.append(SourceTokens(source.name, streams, found.digest(place)))
        return Corpus(
            vocab=vocabulary.size if vocabulary else self.vocab,
            objective=self.objective,
            seed=self.seed,
            parts=tuple(parts),
            shares=(1,) * len(parts),
            special=special_of(vocabulary, self.sources[0].data),
            vocabulary=vocabulary,
            entry=folder,
        )

    def _streamed(self, data: Data, head: Path, vocabulary: Vocabulary | None) -> StreamedTokens:
        """Return the training tokens of a streamed data source, which is tokenised block by block during training.
        `head`: the folder of its cache entry, with the tokenizer and the held-out documents. Raises ConfigError if its
        files are missing."""
        kind, objective = kind_of(data), self.objective

        def write(folder: Path, documents: list[tuple[int, Any]]) -> dict[str, Any]:
            """Write the tokens of a block's documents into `folder`; return the description of these files."""
            return kind.write_tokens(folder, vocabulary, self.vocab, [(iter(documents), 0), (iter(()), 0)])

        def cut(place: Path, found: TokenFiles) -> Any:
            """Open the tokens of a streamed source's block in the folder `place`, packed into rows for training."""
            train = {TRAIN: cache_entries.streams_of(place, found, self.vocab)[TRAIN]}
            return self._rows_of(data, train, place, vocabulary, trusted=False)[TRAIN]

        rows = [data.packing, data.overlong] if data.overlong != "split" else data.packing
        begin = special_of(vocabulary, data).begin
        decisive = [head.name, rows, self.length, word_of_objective(objective), objective.needs, begin]
        return StreamedTokens(
            folder=head.parent / cache.hash_of(["blocks", *decisive]),
            reader=kind.blocks(kind.find(data), data),
            write=write,
            read=partial(cache_entries.read_entry, vocab=self.vocab),
            cut=cut,
            count=lambda stream: max(0, objective.samples(stream)),
            seed=self.seed,
        )

    def _rows_of(
        self, data: Data, streams: Mapping[str, Any], place: Path, vocabulary: Vocabulary | None, trusted: bool
    ) -> Mapping[str, Any]:
        """Return the token streams of a source by split, packed into rows of `length` tokens unless data.packing=cut;
        `place`: the folder of the source's cache entry. Raises ConfigError if documents are to be kept apart and
        neither a token nor an index marks where they begin."""
        begin = special_of(vocabulary, data).begin  # -1: no token
        apart = {"data.packing": data.packing != "cut", "data.document_mask": data.document_mask}
        if begin < 0 and any(starts_of(stream) is None and len(stream) for stream in streams.values()):
            for key in (key for key, wanted in apart.items() if wanted):
                reason = f"{key} needs documents: a token must tell where documents begin, as no index does"
                raise ConfigError(violation("data.separator", begin, reason, ["a token"]))
        if data.packing == "cut":
            return streams
        more = {"apart": data.document_mask, "trusted": trusted}
        return packing.packed_streams(streams, place, self.length, begin, data.overlong, **more)

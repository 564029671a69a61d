"""The corpus: sources -> tokens -> samples of one length in one global order. Its only state is a sample's index."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from platform.boundary.refusals import ConfigError, refuse_all
from platform.boundary.schema import Malformed
from platform.config.fields import Config, Data, distill_settings, hash_values, training_objective_name
from platform.data import cache, cache_entries, mixture, packing
from platform.data import streams as synthetic
from platform.data import text_sources as text_sources  # its import registers the kinds of sources
from platform.data.cache_entries import FORMAT, StreamedTokens, TokenFiles
from platform.data.data_checks import violations_of_small_splits, violations_of_sources, violations_of_unlabelled_splits
from platform.data.mixture import DataSource, compute_shares, hash_integers, list_sources, name_source_in_errors
from platform.data.objectives import (
    Causal,
    Objective,
    SampleShape,
    UserObjective,
    build_objective,
    objective_cache_word,
)
from platform.data.source_kind import find_source_kind, is_streamed
from platform.data.special_tokens import SpecialIds
from platform.data.streams import Ints, known_document_starts, token_loss_mask
from platform.data.teacher_classes import TeacherClasses
from platform.data.tokenizer import Vocabulary, load_named_vocabulary, open_vocabulary
from platform.data.tokenizer_files import TokenizerFiles
from platform.plan.model_types import TEACHER

logger = logging.getLogger(__name__)
TRAIN, VALIDATION = "train", "validation"
_AT_ONCE = 1 << 16  # samples that are looked for together


@dataclass(frozen=True)
class SourceTokens:
    """Part of a corpus: the tokens of one of its sources, by split."""

    name: str  # "" if it is the only one
    streams: Mapping[str, Any]  # by split (train, validation): ids at an array of positions, or a class of `streams`
    digest: str  # of documents, tokenizer and splits: equal digests, equal samples
    labelled: Mapping[str, Ints] = field(default_factory=dict)  # by split: its samples that teach, where not all do

    def stream_or_first_block(self, split: str) -> Any:
        """Return the tokens of this data source's split, "train" or "validation"; if streamed, its first block's."""
        stream = self.streams[split]
        return stream.open_first_block() if isinstance(stream, StreamedTokens) else stream


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
    (`platform.data.mixture.deal_samples_to_sources`); each source has a validation split of its own.
    """

    vocab: int  # ids are in [0, vocab); at most model.vocab
    objective: Objective
    seed: int
    parts: tuple[SourceTokens, ...]
    shares: tuple[int, ...]  # of the parts, in training
    special: SpecialIds = field(default_factory=SpecialIds)  # that begin and end documents
    vocabulary: Vocabulary | None = None  # its tokenizer; None if it has no text
    entry: Path | None = None  # the folder of its tokens; None if it has none
    teacher: TeacherClasses | None = None  # records of its labels, if a model learns from a teacher

    @property
    def tokenizer_files(self) -> TokenizerFiles:
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
        return hash_values([[part.digest, share] for part, share in zip(self.parts, self.shares, strict=True)])

    @property
    def validation_splits(self) -> dict[str, tuple[str, int]]:
        """Return the corpus's validation splits that have samples: source name -> (split to evaluate, share)."""
        shares = zip(self.parts, self.shares, strict=True)
        held = {p.name: share for p, share in shares if self.count_source_samples(p, VALIDATION)}
        alike = not any(held.values())  # of sources that are held out as a whole, none has a share
        return {name: (f"{VALIDATION}/{name}".rstrip("/"), share or int(alike)) for name, share in held.items()}

    @property
    def sample_counts(self) -> dict[str, int]:
        """Return the number of samples in each split ("train", "validation") of the corpus, all sources together."""
        return {s: sum(self.count_source_samples(part, s) for part in self.parts) for s in (TRAIN, VALIDATION)}

    def count_samples(self, split: str) -> int:
        """Return how many samples a split of the corpus ("train", "validation/web") has in one epoch."""
        kind, _, name = split.partition("/")
        return sum(self.count_source_samples(p, kind) for p in self.parts if kind == TRAIN or p.name == name)

    def count_epochs(self, samples: int) -> dict[str, float]:
        """Return how often the first `samples` training samples read each source, by name, without streamed ones."""
        parts = [(p, n) for p, n in zip(self.parts, self.shares, strict=True)
                 if not isinstance(p.streams[TRAIN], StreamedTokens)]  # fmt: skip
        read = samples / sum(self.shares)
        return {p.name: read * share / max(1, self.count_source_samples(p, TRAIN)) for p, share in parts}

    def batch(self, split: str, start: int, end: int) -> dict[str, NDArray[np.int64]]:
        """Return samples [start, end) of the split's endless global order, as data tensors such as "tokens": name ->
        int64 [end - start, length].

        Every epoch of a source in `train` has a permutation of its own; validation is never shuffled.
        """
        numbers = np.arange(start, end)
        keys = hash_integers(self.seed, split == TRAIN, numbers)
        tensors: dict[str, NDArray[np.int64]] = {}
        for part, stream, rows, index in self.locate_samples(split, numbers):
            source_tensors = self.objective.batch(stream, index, keys[rows])
            if self.teacher:
                first = self.first_samples[split.partition("/")[0], part.name]
                source_tensors[TEACHER] = self.teacher.number_labels(first + index, source_tensors["labels"])
            if len(rows) == len(numbers):
                return source_tensors
            for name, values in source_tensors.items():
                tensors.setdefault(name, np.empty((len(numbers), *values.shape[1:]), values.dtype))[rows] = values
        return tensors

    def predicted(self, split: str, start: int, end: int) -> int:
        """Count the labels that the loss averages over (not padding) in samples [start, end) of a split."""
        located_samples = self.locate_samples(split, np.arange(start, end))
        return sum(self.objective.predicted(stream, index) for _, stream, _, index in located_samples)

    @cached_property
    def counts_by_reading(self) -> bool:
        """Return True if counting labels may read samples, as an index or a closed form does not have the number."""
        if not isinstance(causal := self.objective, Causal):
            return isinstance(causal, UserObjective)
        every = [stream for part in self.parts for stream in part.streams.values()]
        return any(isinstance(stream, StreamedTokens) or causal.counts_by_reading(stream) for stream in every)

    def describe_sample(self, split: str, number: int) -> str:
        """Name sample `number` of a split's endless global order for the user: "sample 3 of data.sources.web"."""
        ((part, stream, _, index),) = self.locate_samples(split, np.array([number]))
        if part.streams[split.partition("/")[0]] is not stream:  # a block of a stream
            return f"sample {number} of the stream"
        return f"sample {index[0]}{f' of data.sources.{part.name}' if part.name else ''}"

    def locate_samples(self, split: str, numbers: Ints) -> Iterator[SamplePlaces]:
        """Find samples `numbers` of the split's endless global order in the corpus: yield the places of some of them
        for each stream that has any."""
        split, _, name = split.partition("/")
        if split == TRAIN:
            source, count = mixture.deal_samples_to_sources(self.shares, numbers)
        else:
            source = np.full(len(numbers), [part.name for part in self.parts].index(name))
            count = numbers
        for number in np.unique(source):
            rows = np.nonzero(source == number)[0]
            part = self.parts[number]
            if isinstance(stream := part.streams[split], StreamedTokens):
                for block, block_rows, index in stream.locate_samples(count[rows]):
                    yield SamplePlaces(part, block, rows[block_rows], index)
                continue
            epoch, index = np.divmod(count[rows], samples := self.count_source_samples(part, split))
            stream_index = mixture.permute_indices(self.seed, epoch, samples, index) if split == TRAIN else index
            if split in part.labelled:
                stream_index = part.labelled[split][stream_index]
            yield SamplePlaces(part, stream, rows, stream_index)

    @cached_property
    def first_samples(self) -> dict[tuple[str, str], int]:
        """Return by split and source how many samples earlier streams have: a sample's number counts on from there."""
        first_samples, count = dict[tuple[str, str], int](), 0
        for part in self.parts:
            for split, stream in part.streams.items():
                first_samples[split, part.name] = count
                count += max(0, self.objective.samples(stream))
        return first_samples

    def list_read_samples(self, ranges: Sequence[tuple[str, int, int]]) -> Ints:
        """Return the numbers (`first_samples`) of the samples that `ranges` (split, first, end) of the global orders
        read, each once, in the order in which they are first read."""
        read, total = dict[int, None](), sum(self.count_samples(split) for split in {split for split, *_ in ranges})
        for split, start, end in ranges:
            for first in range(start, end, _AT_ONCE) if len(read) < total else ():
                numbers = np.arange(first, min(first + _AT_ONCE, end))
                for part, _, rows, index in self.locate_samples(split, numbers.copy()):
                    numbers[rows] = self.first_samples[split.partition("/")[0], part.name] + index
                read |= dict.fromkeys(numbers.tolist())
        return np.fromiter(read, np.int64, len(read))

    def count_source_samples(self, part: SourceTokens, split: str) -> int:
        """Count the samples that a data source has in one epoch of a split; if streamed, in its first block."""
        if split in part.labelled:
            return len(part.labelled[split])
        return max(0, self.objective.samples(part.stream_or_first_block(split)))


def open_run_corpus(config: Config, *, shared: Path | None = None, entry: str = "") -> Corpus:
    """Open the tokenised corpus that a run's configuration names, cut into samples for its training objective.
    `shared`: a folder for its tokens that other machines see; `entry`: the cache entry with its tokens, if known."""
    model = config.model
    corpus = open_corpus(
        config.data,
        length=model.length,
        source_length=model.source_length,
        vocab=model.vocab,
        segments=model.segments,
        seed=config.seed,
        objective=training_objective_name(config),
        shared=shared,
        entry=Path(entry) if entry else None,
    )
    return replace(corpus, teacher=TeacherClasses(model.length)) if distill_settings(config) else corpus


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
    sources, vocabulary = list_sources(data), None
    if entry:
        with _report_changed_entry(entry):
            vocabulary = open_vocabulary(entry)
    elif data.kind != "synthetic":
        vocabulary = load_named_vocabulary(data)
    special = choose_special_ids(vocabulary, sources[0].data)
    shape = SampleShape(length, source_length or length, vocab, segments, special, data.document_mask)
    goal = build_objective(objective, shape, data.objective_settings)
    if not entry:
        refuse_all(violations_of_sources(data, vocab=vocab, reserved=goal.reserved))
    opening = _CorpusOpener(sources, goal, vocab - goal.reserved, seed, length)
    if data.kind == "synthetic":
        corpus = opening.open_synthetic_corpus()
    else:
        corpus = opening.open_trusted_corpus(entry) if entry else opening.open_tokenised_corpus(shared, vocabulary)
    if not entry:
        _check_split_sizes(corpus, sources, length)
    streamed = any(isinstance(part.streams[TRAIN], StreamedTokens) for part in corpus.parts)  # then weights are given
    samples = [1 if streamed else max(1, corpus.count_source_samples(part, TRAIN)) for part in corpus.parts]
    return replace(corpus, shares=tuple(compute_shares(sources, samples)))


@contextmanager
def _report_changed_entry(folder: Path) -> Iterator[None]:
    """Raise OSError in place of Malformed: a cache entry of tokens has changed since the driver read it."""
    try:
        yield
    except Malformed as error:
        raise OSError(f"{folder} is not what the driver has found there: {error}") from None


def _check_split_sizes(corpus: Corpus, sources: Sequence[DataSource], length: int) -> None:
    """Raise ConfigError if a split of some data source has no sample of `length` tokens, or none with a label."""
    violations = []
    for source, part in zip(sources, corpus.parts, strict=True):
        streams = {split: part.stream_or_first_block(split) for split in part.streams}
        small = violations_of_small_splits(source, streams, corpus.objective, length)
        violations += small or violations_of_unlabelled_splits(source, streams, corpus.objective)
    refuse_all(violations)


def choose_special_ids(vocabulary: Vocabulary | None, data: Data) -> SpecialIds:
    """Return the ids of the special tokens that begin and end documents: the tokenizer's, else `data.separator`."""
    if vocabulary or data.kind != "tokens":
        return vocabulary.special if vocabulary else SpecialIds()
    return SpecialIds((data.separator,), data.separator)


@dataclass(frozen=True)
class _CorpusOpener:
    """Opening of a corpus, whose ids are in [0, vocab). The caller sets its shares."""

    sources: Sequence[DataSource]
    objective: Objective
    vocab: int
    seed: int
    length: int

    def open_synthetic_corpus(self) -> Corpus:
        """Open a corpus of random token ids, uniform in [0, vocab), for benchmarks (data=synthetic)."""
        vocab, seed = self.vocab, self.seed
        streams = {split: synthetic.RandomTokens(seed, i, vocab) for i, split in enumerate((TRAIN, VALIDATION))}
        part = SourceTokens("", streams, hash_values(["synthetic", FORMAT, vocab, seed]))
        return Corpus(vocab, self.objective, seed, (part,), (1,))

    def open_tokenised_corpus(self, shared: Path | None, existing_vocabulary: Vocabulary | None) -> Corpus:
        """Open a corpus: tokenise the text of each data source, or take its tokens from the cache if a process has done
        so. `shared`: a folder that other machines see, in which the cache entries are put too; `existing_vocabulary`:
        the tokenizer; None trains one, on all sources together."""
        folder, entries = None, []
        if len(self.sources) > 1:
            folder, names = cache_entries.open_common_entry(self.sources, self.vocab, shared, existing_vocabulary)
            existing_vocabulary = existing_vocabulary or open_vocabulary(folder)
        for source in self.sources:
            with name_source_in_errors(source):
                entries.append(cache_entries.open_entry(source.data, self.vocab, shared, existing_vocabulary))
        assert not folder or names == [entry.name for entry, _ in entries]
        return self._assemble_corpus(folder or entries[0][0], entries)

    def open_trusted_corpus(self, folder: Path) -> Corpus:
        """Open the corpus from cache entries of tokens that another process of this run has verified, without hashing
        them again. `folder`: the entry that has the tokenizer. Raises OSError if an entry has changed since."""
        read = partial(cache_entries.read_entry, vocab=self.vocab, checks_tokens=False)
        with _report_changed_entry(folder):
            several = len(self.sources) > 1
            names = [folder.name]
            if several:
                names = cache.open_trusted_entry(folder, cache_entries.read_common_entry).entries
            if len(names) != len(self.sources):
                raise Malformed(f"has {len(names)} sources, not {len(self.sources)}")
            places = [folder.parent / name for name in names]
            entries = [(place, cache.open_trusted_entry(place, read)) for place in places]
            return self._assemble_corpus(folder, entries, trusted=True)

    def _assemble_corpus(
        self, folder: Path, entries: Sequence[tuple[Path, TokenFiles]], trusted: bool = False
    ) -> Corpus:
        """Make the corpus out of the cache entries with its sources' tokens, (folder, description) each. `folder`: the
        entry that holds their common tokenizer, if there is one; `trusted`: True if another process of this run has
        verified them."""
        vocabulary, parts = open_vocabulary(folder), []
        for source, (entry_folder, token_files) in zip(self.sources, entries, strict=True):
            with name_source_in_errors(source):
                streams = cache_entries.open_token_streams(entry_folder, token_files, self.vocab)
                streams = dict(self._pack_rows(source.data, streams, entry_folder, vocabulary, trusted))
                if is_streamed(source.data):
                    streams[TRAIN] = self._open_streamed_tokens(source.data, entry_folder, vocabulary)
            digest = token_files.hash_tokens(entry_folder)
            labelled = {} if source.data.packing != "cut" else self._find_labelled_samples(streams, trusted)
            if labelled or any(getattr(stream, "left_out", 0) for stream in streams.values()):
                digest = hash_values([digest, "labelled rows"])  # older versions made other samples of the same tokens
            parts.append(SourceTokens(source.name, streams, digest, labelled))
        return Corpus(
            vocab=vocabulary.size if vocabulary else self.vocab,
            objective=self.objective,
            seed=self.seed,
            parts=tuple(parts),
            shares=(1,) * len(parts),
            special=choose_special_ids(vocabulary, self.sources[0].data),
            vocabulary=vocabulary,
            entry=folder,
        )

    def _find_labelled_samples(self, streams: Mapping[str, Any], trusted: bool) -> dict[str, Ints]:
        """Return which samples have a token to learn, by split, of those cut from the token streams of a data
        source, where not all have; the others are not made."""
        labelled_by_split: dict[str, Ints] = {}
        for split, stream in streams.items():
            if isinstance(self.objective, Causal) and token_loss_mask(stream) is not None:
                count, end = max(0, self.objective.samples(stream)), self.objective.special.end
                labelled = packing.find_labelled_samples(stream, self.length, count, end, self.objective.within)
                if len(labelled) < count:
                    labelled_by_split[split], left_out = labelled, count - len(labelled)
                    level = logging.DEBUG if trusted else logging.INFO
                    logger.log(level, "%s: %d of %d rows teach nothing and are left out", split, left_out, count)
        return labelled_by_split

    def _open_streamed_tokens(self, data: Data, head: Path, vocabulary: Vocabulary | None) -> StreamedTokens:
        """Return the training tokens of a streamed data source, which is tokenised block by block during training.
        `head`: the folder of its cache entry, with the tokenizer and the held-out documents. Raises ConfigError if its
        files are missing."""
        kind, objective = find_source_kind(data), self.objective

        def write_block(folder: Path, documents: list[tuple[int, Any]]) -> dict[str, Any]:
            """Write the tokens of a block's documents into `folder`; return the description of these files."""
            return kind.write_tokens(folder, vocabulary, self.vocab, [(iter(documents), 0), (iter(()), 0)])

        def open_block_rows(entry_folder: Path, token_files: TokenFiles) -> Any:
            """Open the tokens of a streamed source's block in the folder `entry_folder`, packed into rows for
            training."""
            train = {TRAIN: cache_entries.open_token_streams(entry_folder, token_files, self.vocab)[TRAIN]}
            return self._pack_rows(data, train, entry_folder, vocabulary, trusted=False)[TRAIN]

        rows = [data.packing, data.overlong] if data.overlong != "split" else data.packing
        begin = choose_special_ids(vocabulary, data).begin
        decisive = [head.name, rows, self.length, objective_cache_word(objective), objective.needs, begin]
        decisive += ["labelled"] if kind.learned and data.packing != "cut" else []
        return StreamedTokens(
            folder=head.parent / cache.hash_cache_key(["blocks", *decisive]),
            reader=kind.open_block_reader(kind.find(data), data),
            write=write_block,
            read=partial(cache_entries.read_entry, vocab=self.vocab),
            cut=open_block_rows,
            count=lambda stream: max(0, objective.samples(stream)),
            seed=self.seed,
        )

    def _pack_rows(
        self, data: Data, streams: Mapping[str, Any], place: Path, vocabulary: Vocabulary | None, trusted: bool
    ) -> Mapping[str, Any]:
        """Return the token streams of a source by split, packed into rows of `length` tokens unless data.packing=cut;
        `place`: the folder of the source's cache entry. Raises ConfigError if documents are to be kept apart and
        neither a token nor an index marks where they begin."""
        begin = (special := choose_special_ids(vocabulary, data)).begin  # -1: no token
        apart = {"data.packing": data.packing != "cut", "data.document_mask": data.document_mask}
        if begin < 0 and any(known_document_starts(stream) is None and len(stream) for stream in streams.values()):
            for key in (key for key, is_wanted in apart.items() if is_wanted):
                reason = f"{key} needs documents: a token must tell where documents begin, as no index does"
                raise ConfigError("data.separator", begin, reason, ["a token"])
        if data.packing == "cut":
            return streams
        packing_options: dict[str, Any] = {
            "end": special.end,
            "keeps_documents_apart": data.document_mask,
            "together": find_source_kind(data).together,
            "trusted": trusted,
        }
        return packing.pack_streams(streams, place, self.length, begin, data.overlong, **packing_options)

"""The corpus: documents -> tokens -> samples of one length in one global order. Its only state is a sample's index."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from platform.boundary import schema
from platform.boundary.schema import Malformed, OneOf, OpenMap, Span
from platform.config.fields import Config, ConfigError, Data, objective_of, short_hash
from platform.data import cache, pairs, sources, synthetic, tokenizer
from platform.data.objectives import OBJECTIVES, Objective
from platform.data.permutation import mix, order

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FORMAT = 1  # of a cache entry: raise it when the same documents would give other tokens or other files
_WINDOW = 1 << 22  # tokens that are checked at once
_PLACE = Annotated[int, Span(0, 1 << 50)]
_TRAINING = 16_000_000  # characters that the tokenizer is trained on: evenly spaced pieces of a longer corpus

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """Tokenised corpus, cut into samples.

    A split is one stream of tokens, with END_OF_TEXT in front of each document; a sample may span documents. The
    objective makes samples of the stream.
    """

    vocab: int  # ids are in [0, vocab); at most model.vocab
    digest: str  # of documents, tokenizer and splits: equal digests, equal samples
    objective: Objective
    seed: int
    streams: Mapping[str, Any]  # by split (train, validation): ids at an array of positions, or a `PairStream`
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]  # ids outside [0, vocab) are left out
    entry: Path | None = None  # the folder of its tokens; None if it has none

    @property
    def samples(self) -> dict[str, int]:
        """Return the number of samples per epoch of each split of the corpus, train and validation."""
        return {split: max(0, self.objective.samples(stream)) for split, stream in self.streams.items()}

    def batch(self, split: str, start: int, end: int) -> dict[str, NDArray[np.int64]]:
        """Return samples [start, end) of the split's endless global order, as data tensors such as "tokens": name ->
        int64 [end - start, length].

        Every epoch of `train` has a permutation of its own; `validation` is never shuffled.
        """
        keys = mix(self.seed, split == "train", np.arange(start, end))
        return self.objective.batch(self.streams[split], self._order(split, start, end), keys)

    def predicted(self, split: str, start: int, end: int) -> int:
        """Count the labels in samples [start, end) of the split's global order that are not padding: the mean loss is
        over these."""
        return self.objective.predicted(self.streams[split], self._order(split, start, end))

    def _order(self, split: str, start: int, end: int) -> NDArray[np.int64]:
        """Return the index in its split of each of samples [start, end) of the split's endless global order."""
        samples = self.samples[split]
        epoch, index = np.divmod(np.arange(start, end), samples)
        if split == "train":
            index = order(self.seed, epoch, samples, index)
        return index


def check_data(data: Data, *, vocab: int = tokenizer.SMALLEST) -> list[str]:
    """Return one refusal line per mistake in the keys of `data` that shows without tokenising, in well under a second:
    kind, fraction, paths, beginnings of files. `vocab`: most entries of the tokenizer, which needs at least one per
    byte value."""
    violations = []
    if data.kind not in (kinds := [*sources.SOURCES, "pairs", "synthetic"]):
        return [f"data={data.kind}: unknown; there are {', '.join(kinds)}"]
    if not 0 <= data.validation < 1:
        violations.append(f"data.validation={data.validation}: a fraction from 0 to below 1 is needed, such as 0.05")
    if data.path and data.kind in ("stdlib", "synthetic"):
        violations.append(
            f"data.path={data.path}: data={data.kind} reads no path; use data=text, or leave data.path empty"
        )
    if data.kind == "synthetic":
        return violations
    if vocab < tokenizer.SMALLEST:
        violations.append(f"model.vocab={vocab}: a byte-level tokenizer needs at least {tokenizer.SMALLEST}")
    return violations + (pairs.check_pairs(data) if data.kind == "pairs" else sources.check_files(data))


def corpus_of(config: Config, *, shared: Path | None = None, entry: str = "") -> Corpus:
    """Open the tokenised corpus that a run's configuration names, cut into samples of its training objective; see
    `open_corpus`."""
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

    `source_length`: tokens per sequence of the encoder in an encoder-decoder; 0 = length. `segments`: of a sample that
    an encoder tells apart; 0 = none. `shared`: a folder in which other machines are to find its tokens too. `entry`:
    where another process of this run has found it; then no text is read, tokenised or hashed.

    Text is tokenised by the first process that asks, and cached. Raises ConfigError for a user's mistakes: those that
    `check_data` finds, a fault deep inside a file, a split without one whole sample.
    """
    goal = OBJECTIVES[objective](length, source_length or length, vocab, segments)
    if entry:
        return _trusted(entry, data, goal, vocab - goal.reserved, seed)
    if violations := check_data(data, vocab=vocab - goal.reserved):
        raise ConfigError(violations)
    small = vocab - goal.reserved
    synthesised = data.kind == "synthetic"
    corpus = _synthetic(data, goal, small, seed) if synthesised else _tokenised(data, goal, small, seed, shared)
    if violations := _too_small(corpus, data, length):
        raise ConfigError(violations)
    return corpus


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


def _synthetic(data: Data, objective: Objective, vocab: int, seed: int) -> Corpus:
    """Open a corpus of random tokens, uniform in [0, vocab), for data=synthetic."""
    return Corpus(
        vocab=vocab,
        digest=short_hash(["synthetic", _FORMAT, vocab, seed]),
        objective=objective,
        seed=seed,
        streams={split: synthetic.RandomTokens(seed, i, vocab) for i, split in enumerate(("train", "validation"))},
        encode=partial(synthetic.encode_bytes, vocab=vocab),
        decode=synthetic.show_ids,
    )


def _tokenised(data: Data, objective: Objective, vocab: int, seed: int, shared: Path | None) -> Corpus:
    """Open a corpus of text: its entry in the cache, built by the first process that asks, or in `shared` if that is
    given. The entry is named by a hash of the files and of every option that decides about their tokens, such as
    `vocab`, the most entries of the tokenizer."""
    if data.kind == "pairs":
        files, build = pairs.pair_files(data), _build_pairs
        decisive = [[pairs.deciding_options(data), *map(cache.sha256, files)], data.validation, vocab]
    else:
        files, build = sources.files_of(data), _build
        contents = [[sources.is_jsonl(file), cache.sha256(file)] for file in files]
        decisive = [contents, data.field, data.validation, vocab]
    key = hashlib.sha256(json.dumps([_FORMAT, *decisive]).encode()).hexdigest()
    entry, found = cache.root(data.cache) / key, None
    read, make = partial(_read_entry, vocab=vocab), lambda folder: build(folder, files, data, vocab)
    if shared:
        entry, found = cache.fetch_shared(entry, shared, make, read)
    return _of_entry(entry, found or cache.fetch(entry, make, read), data, objective, seed)


def _trusted(entry: Path, data: Data, objective: Objective, vocab: int, seed: int) -> Corpus:
    """Open the corpus of a cache entry that another process of this run has verified. Raises OSError if it is not there
    as that has found it."""
    try:
        found = cache.open_trusted(entry, partial(_read_entry, vocab=vocab, deep=False))
    except Malformed as error:
        raise OSError(f"{entry} is not what the driver has found there: {error}") from None
    return _of_entry(entry, found, data, objective, seed)


def _of_entry(entry: Path, found: "_Entry", data: Data, objective: Objective, seed: int) -> Corpus:
    """Return the corpus of the cache entry at `entry`, whose description is `found`."""
    tokens = np.memmap(entry / "tokens.bin", found.dtype, mode="r").view(np.ndarray)
    ends = np.fromfile(entry / "ends.bin", "<i8").reshape(-1, 2) if data.kind == "pairs" else None
    bpe = tokenizer.load_tokenizer(entry / "tokenizer.json")
    return Corpus(
        vocab=bpe.get_vocab_size(),
        digest=short_hash([entry.name, found.files["tokens.bin"]]),
        objective=objective,
        seed=seed,
        streams=_streams(found.splits, tokens, ends),
        encode=lambda text: bpe.encode(text).ids,
        decode=lambda ids: bpe.decode(ids, skip_special_tokens=False),
        entry=entry,
    )


def tokenizer_of(digest: str, folder: str = "") -> Path | None:
    """Return the file tokenizer.json of the corpus with this digest in the cache `folder` ("": the default one); None
    if it is not there."""
    root = cache.root(folder)
    if digest and root.is_dir():
        for entry in root.iterdir():
            with suppress(OSError, Malformed):
                files = cache.described(entry).get("files")
                if isinstance(files, dict) and short_hash([entry.name, files.get("tokens.bin")]) == digest:
                    return entry / "tokenizer.json"
    return None


def _streams(splits: Mapping[str, Sequence[int]], tokens: NDArray[Any], ends: NDArray[Any] | None) -> dict[str, Any]:
    """Cut the tokens of a cached corpus into its splits. `splits` gives (start, end) of each in tokens; for pairs of
    texts, which have `ends` [pairs, 2], it gives (number of tokens, number of pairs) of each."""
    if ends is None:
        return {split: tokens[start:end] for split, (start, end) in splits.items()}
    streams, place, pair = {}, 0, 0
    for split, (length, count) in splits.items():
        streams[split] = pairs.PairStream(tokens[place : place + length], ends[pair : pair + count])
        place, pair = place + length, pair + count
    return streams


@dataclass(frozen=True)
class _Entry:
    """Description of a corpus in the cache: the type of tokens.bin, and the splits as `_streams` takes them."""

    dtype: Annotated[str, OneOf(("<u2", "<u4"), "type")]
    splits: dict[Annotated[str, OneOf(("train", "validation"), "split")], tuple[_PLACE, _PLACE]]
    files: Annotated[dict[str, Any], OpenMap((), ("tokens.bin", "tokenizer.json"))]


def _read_entry(folder: Path, meta: dict[str, Any], vocab: int, deep: bool = True) -> _Entry:
    """Read the description of a corpus in the cache, `meta`, and check the files in `folder` against it; `vocab`: most
    entries of the tokenizer; `deep`: read every token. Raises Malformed for an entry that `_build` or `_build_pairs`
    cannot have made, even if its hashes hold."""
    entry: _Entry = schema.read(_Entry, meta)
    try:
        entries: int = tokenizer.load_tokenizer(folder / "tokenizer.json").get_vocab_size()
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


def _build_pairs(folder: Path, files: list[Path], data: Data, vocab: int) -> dict[str, Any]:
    """Build the cache entry of a corpus of pairs of texts: write into `folder` tokens.bin and ends.bin (the training
    pairs, then those held out) and tokenizer.json, of at most `vocab` entries. Return its description."""
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
    bpe, dtype = _train(folder, (text for pair in splits["train"] for text in pair), characters, vocab)
    written = {split: pairs.write_pairs(folder, bpe, iter(part), dtype) for split, part in splits.items()}
    return {"dtype": dtype.str, "splits": written}


def _build(folder: Path, files: list[Path], data: Data, vocab: int) -> dict[str, Any]:
    """Build the cache entry of a corpus of documents: write into `folder` tokens.bin (the training documents, then
    those held out) and tokenizer.json, of at most `vocab` entries. Return its description. The documents are read once
    for their sizes and their faults, once to train the tokenizer, and once per split to encode them."""
    sizes: list[int] = []
    for number, piece in sources.read_documents(files, data):
        if number == len(sizes):
            sizes.append(0)
        sizes[number] += len(piece)
    if not sizes:
        raise ConfigError(f"data.path={data.path}: no text in it")
    held = held_out(sizes, data.validation)
    logger.info("tokenising %d documents, %.1f million characters", len(sizes), sum(sizes) / 1e6)

    def split(validation: bool) -> Iterator[tuple[int, str]]:
        return ((n, piece) for n, piece in sources.read_documents(files, data) if (n in held) == validation)

    bpe, dtype = _train(folder, (piece for _, piece in split(False)), sum(sizes), vocab)
    ends = []
    with (folder / "tokens.bin").open("wb") as file:
        for validation in (False, True):
            for ids in tokenizer.encode_documents(bpe, split(validation)):
                file.write(ids.astype(dtype).tobytes())
            ends.append(file.tell() // dtype.itemsize)
    train, end = ends
    if not held:
        train = end - round(end * data.validation)
    return {"dtype": dtype.str, "splits": {"train": [0, train], "validation": [train, end]}}


def _train(folder: Path, texts: Iterable[str], characters: int, vocab: int) -> tuple["Tokenizer", np.dtype]:
    """Train a tokenizer of at most `vocab` entries on texts of `characters` in all, evenly spaced ones if these are
    many; save it as tokenizer.json in `folder`, and return it with the integer type of its tokens in files."""
    share = min(1.0, _TRAINING / characters)
    bpe = tokenizer.train_tokenizer((t for i, t in enumerate(texts) if int((i + 1) * share) > int(i * share)), vocab)
    bpe.save(str(folder / "tokenizer.json"))
    return bpe, np.dtype("<u2" if vocab <= 1 << 16 else "<u4")


def _too_small(corpus: Corpus, data: Data, length: int) -> list[str]:
    """Return a refusal line for each split of a corpus that does not hold one whole sample, with the nearest legal
    settings."""
    tokens = {split: len(stream) for split, stream in corpus.streams.items()}
    needed, total = corpus.objective.needs, sum(tokens.values())
    violations = []
    held_out_none = ["validation"] if data.validation == 0 else []
    for split in (split for split, count in tokens.items() if count < needed and split not in held_out_none):
        remedies = [f"model.length={tokens[split] - 1}"] if tokens[split] > 1 and needed > length else []
        if split == "validation" and total >= 3 * needed:
            remedies.append(f"data.validation={ceil(200 * needed / total) / 100:g}")
        violations.append(
            f"model.length={length}: a sample is {needed} tokens, and the {split} split has {tokens[split]}; "
            f"nearest legal: {' or '.join([*remedies, 'more text'])}"
        )
    return violations

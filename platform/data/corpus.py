"""The corpus: documents -> tokens -> samples of one length in one global order. Its only state is a sample's index."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from platform.boundary import schema
from platform.boundary.schema import Malformed, OneOf, OpenMap, Span
from platform.config.fields import Config, ConfigError, Data, objective_of, short_hash
from platform.data import cache, pairs, sources, synthetic, tokenizer
from platform.data.objectives import OBJECTIVES, Objective
from platform.data.permutation import mix, order

_FORMAT = 1  # of a cache entry: raise it when the same documents would give other tokens or other files
_CHUNK = 1 << 22  # tokens that are checked at once
_DTYPE = Annotated[str, OneOf(("<u2", "<u4"), "type")]
_SPLIT = Annotated[str, OneOf(("train", "validation"), "split")]
_PLACE = Annotated[int, Span(0, 1 << 50)]
_TRAINING = 16_000_000  # characters that the tokenizer is trained on: evenly spaced pieces of a longer corpus

logger = logging.getLogger(__name__)


class Tokens(Protocol):
    """Stream of tokens: the ids at an array of positions (or, for the objective `pairs`, a `pairs.Stream`)."""

    def __len__(self) -> int: ...


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
    streams: Mapping[str, Any]  # by split (train, validation): `Tokens`
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]  # ids outside [0, vocab) are left out

    @property
    def samples(self) -> dict[str, int]:
        """Return the number of samples per epoch of each split."""
        return {split: max(0, self.objective.samples(stream)) for split, stream in self.streams.items()}

    def batch(self, split: str, start: int, end: int) -> dict[str, NDArray[np.int64]]:
        """Return samples [start, end) of the split's endless global order: data tensor -> int64 [end - start, length].

        Every epoch of `train` has a permutation of its own; `validation` is never shuffled.
        """
        keys = mix(self.seed, split == "train", np.arange(start, end))
        return self.objective.batch(self.streams[split], self._order(split, start, end), keys)

    def predicted(self, split: str, start: int, end: int) -> int:
        """Count the labels of samples [start, end) that are not padding: the mean loss is over these."""
        return self.objective.predicted(self.streams[split], self._order(split, start, end))

    def _order(self, split: str, start: int, end: int) -> NDArray[np.int64]:
        samples = self.samples[split]
        epoch, index = np.divmod(np.arange(start, end), samples)
        if split == "train":
            index = order(self.seed, epoch, samples, index)
        return index


def check(data: Data, *, vocab: int = tokenizer.SMALLEST) -> list[str]:
    """Return the mistakes in `data` that show without tokenising, in well under a second: one line per violation."""
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
    return violations + (pairs.check(data) if data.kind == "pairs" else sources.check(data))


def of(config: Config) -> Corpus:
    """Open the corpus of a run; see `prepare`."""
    m = config.model
    shape = {"length": m.length, "source_length": m.source_length, "vocab": m.vocab}
    return prepare(config.data, **shape, seed=config.seed, objective=objective_of(config))


def prepare(
    data: Data, *, length: int, vocab: int, seed: int, source_length: int = 0, objective: str = "causal"
) -> Corpus:
    """Open the corpus of `data` in samples of `length` tokens, from a vocabulary of at most `vocab`.

    `source_length`: tokens per sequence of the encoder in an encoder-decoder; 0 = length.

    Text is tokenised by the first process that asks, and cached. Raises ConfigError for a user's mistakes: those that
    `check` finds, a fault deep inside a file, a split without one whole sample.
    """
    goal = OBJECTIVES[objective](length, source_length or length, vocab)
    if violations := check(data, vocab=vocab - goal.reserved):
        raise ConfigError(violations)
    make = {"synthetic": _synthetic, "pairs": _pairs}.get(data.kind, _text)
    corpus = make(data, goal, vocab - goal.reserved, seed)
    if violations := _too_small(corpus, data, length):
        raise ConfigError(violations)
    return corpus


def held_out(sizes: Sequence[int], fraction: float) -> set[int]:
    """Choose the documents of the validation split: in a fixed random order, each that still fits into its fraction.

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
    return Corpus(
        vocab=vocab,
        digest=short_hash(["synthetic", _FORMAT, vocab, seed]),
        objective=objective,
        seed=seed,
        streams={split: synthetic.Stream(seed, i, vocab) for i, split in enumerate(("train", "validation"))},
        encode=partial(synthetic.encode, vocab=vocab),
        decode=synthetic.decode,
    )


def _text(data: Data, objective: Objective, vocab: int, seed: int) -> Corpus:
    files = sources.files_of(data)
    contents = [[sources.is_jsonl(file), cache.sha256(file)] for file in files]
    what = json.dumps([_FORMAT, contents, data.field, data.validation, vocab])
    key = hashlib.sha256(what.encode()).hexdigest()
    entry = cache.root(data.cache) / key
    meta = cache.fetch(entry, lambda folder: _build(folder, files, data, vocab), partial(_check, vocab=vocab))
    tokens = np.memmap(entry / "tokens.bin", meta["dtype"], mode="r").view(np.ndarray)
    bpe = tokenizer.load(entry / "tokenizer.json")
    return Corpus(
        vocab=bpe.get_vocab_size(),
        digest=short_hash([key, meta["files"]["tokens.bin"]]),
        objective=objective,
        seed=seed,
        streams={split: tokens[start:end] for split, (start, end) in meta["splits"].items()},
        encode=lambda text: bpe.encode(text).ids,
        decode=lambda ids: bpe.decode(ids, skip_special_tokens=False),
    )


def _pairs(data: Data, objective: Objective, vocab: int, seed: int) -> Corpus:
    contents = [pairs.contents(data), *(cache.sha256(file) for file in pairs.files(data))]
    key = hashlib.sha256(json.dumps([_FORMAT, contents, data.validation, vocab]).encode()).hexdigest()
    entry = cache.root(data.cache) / key
    meta = cache.fetch(entry, lambda folder: _build_pairs(folder, data, vocab), partial(_check, vocab=vocab))
    tokens = np.memmap(entry / "tokens.bin", meta["dtype"], mode="r").view(np.ndarray)
    ends = np.fromfile(entry / "ends.bin", "<i8").reshape(-1, 2)
    bpe = tokenizer.load(entry / "tokenizer.json")
    streams, place, pair = {}, 0, 0
    for split, (length, count) in meta["splits"].items():
        streams[split] = pairs.Stream(tokens[place : place + length], ends[pair : pair + count])
        place, pair = place + length, pair + count
    return Corpus(
        vocab=bpe.get_vocab_size(),
        digest=short_hash([key, meta["files"]["tokens.bin"]]),
        objective=objective,
        seed=seed,
        streams=streams,
        encode=lambda text: bpe.encode(text).ids,
        decode=lambda ids: bpe.decode(ids, skip_special_tokens=False),
    )


def _check(folder: Path, meta: dict[str, Any], vocab: int) -> None:
    """Raise Malformed for an entry that `_build` or `_build_pairs` cannot have made, even if its hashes hold."""
    known = OpenMap((("dtype", _DTYPE), ("splits", dict[_SPLIT, tuple[_PLACE, _PLACE]])), ("dtype", "splits"))
    schema.read(Annotated[dict[str, Any], known], meta)
    schema.read(Annotated[dict[str, Any], OpenMap((), ("tokens.bin", "tokenizer.json"))], meta["files"])
    dtype = np.dtype(meta["dtype"])
    try:
        entries: int = tokenizer.load(folder / "tokenizer.json").get_vocab_size()
        tokens = np.memmap(folder / "tokens.bin", dtype, mode="r")
    except Exception as error:  # the library raises its own for a file that it cannot parse
        raise Malformed(str(error)) from None
    train, held = (meta["splits"].get(split, (-1, -1)) for split in ("train", "validation"))
    if (folder / "ends.bin").exists():
        fits = _pairs_fit(np.fromfile(folder / "ends.bin", "<i8"), train, held, len(tokens))
    else:
        fits = 0 == train[0] <= train[1] == held[0] <= held[1] == len(tokens)
    if not fits:
        raise Malformed("its splits are not its tokens")
    if entries > vocab or any(int(tokens[i : i + _CHUNK].max()) >= entries for i in range(0, len(tokens), _CHUNK)):
        raise Malformed("a token is not in the vocabulary")


def _pairs_fit(ends: NDArray[np.int64], train: Sequence[int], held: Sequence[int], tokens: int) -> bool:
    """Return True if the ends of each split's pairs rise to its number of tokens; a split is (tokens, pairs)."""
    if min(*train, *held) < 0 or train[0] + held[0] != tokens or 2 * (train[1] + held[1]) != len(ends):
        return False
    parts = (ends[: 2 * train[1]], train[0]), (ends[2 * train[1] :], held[0])
    return all((np.diff(part, prepend=0) >= 0).all() and int(part.max(initial=0)) == size for part, size in parts)


def _build_pairs(folder: Path, data: Data, vocab: int) -> dict[str, Any]:
    """Write tokens.bin and ends.bin (the training pairs, then those held out) and tokenizer.json."""
    found = list(pairs.read(data))
    if not found:
        raise ConfigError(f"data.path={data.path}: no pair of texts in it")
    held = held_out([len(a) + len(b) for a, b in found], data.validation)
    splits = {
        "train": [pair for n, pair in enumerate(found) if n not in held],
        "validation": [found[n] for n in sorted(held)],
    }
    texts = (text for pair in splits["train"] for text in pair)
    characters = sum(len(a) + len(b) for a, b in splits["train"])
    share = min(1.0, _TRAINING / characters)
    bpe = tokenizer.train((t for i, t in enumerate(texts) if int((i + 1) * share) > int(i * share)), vocab)
    bpe.save(str(folder / "tokenizer.json"))
    dtype = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
    sizes = {split: pairs.write(folder, bpe, iter(part), dtype) for split, part in splits.items()}
    return {"dtype": dtype.str, "splits": sizes}


def _build(folder: Path, files: list[Path], data: Data, vocab: int) -> dict[str, Any]:
    """Write tokens.bin (the training documents, then those held out) and tokenizer.json. The documents are read once
    for their sizes and their faults, once to train the tokenizer, and once per split to encode them."""
    sizes: list[int] = []
    for number, piece in sources.documents(files, data):
        if number == len(sizes):
            sizes.append(0)
        sizes[number] += len(piece)
    if not sizes:
        raise ConfigError(f"data.path={data.path}: no text in it")
    held = held_out(sizes, data.validation)
    logger.info("tokenising %d documents, %.1f million characters", len(sizes), sum(sizes) / 1e6)

    def split(validation: bool) -> Iterator[tuple[int, str]]:
        return ((n, piece) for n, piece in sources.documents(files, data) if (n in held) == validation)

    share = min(1.0, _TRAINING / sum(sizes))
    pieces = (piece for i, (_, piece) in enumerate(split(False)) if int((i + 1) * share) > int(i * share))
    bpe = tokenizer.train(pieces, vocab)
    bpe.save(str(folder / "tokenizer.json"))
    dtype = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
    ends = []
    with (folder / "tokens.bin").open("wb") as file:
        for validation in (False, True):
            for ids in tokenizer.encode(bpe, split(validation)):
                file.write(ids.astype(dtype).tobytes())
            ends.append(file.tell() // dtype.itemsize)
    train, end = ends
    if not held:
        train = end - round(end * data.validation)
    return {"dtype": dtype.str, "splits": {"train": [0, train], "validation": [train, end]}}


def _too_small(corpus: Corpus, data: Data, length: int) -> list[str]:
    """Return a line for each split that does not hold one sample, with the nearest legal settings."""
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

"""Streams of tokens, from which objectives make samples: an array of ids, or one of the classes here.

`RandomTokens` are for benchmarks: token t of a stream is a hash of (seed, stream, t). `cut_samples` cuts samples into
pieces, for steps whose sequences are shorter than model.length.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from platform.data.mixture import hash_integers
from platform.plan.model_types import label_tensor, token_tensor

PADDING = -1
_WINDOW = 1 << 22  # tokens that are looked at once
Ints = NDArray[np.int64]


def map_array(file: Path, dtype: str) -> NDArray[Any]:
    """Return an array of numbers from a token cache entry's file, mapped into memory. Raises OSError, ValueError."""
    return np.memmap(file, dtype, "r").view(np.ndarray) if file.stat().st_size else np.empty(0, dtype)


def find_document_starts(stream: Any, end: int) -> Ints:
    """Return the positions at which the documents of a stream of tokens begin, ascending: the stream's own, or else the
    positions of the token `end` (-1: none); the stream's first position is always among them."""
    if (starts := known_document_starts(stream)) is None:
        windows = range(0, len(stream) if end >= 0 else 0, _WINDOW)
        where = (np.arange(i, min(i + _WINDOW, len(stream))) for i in windows)
        starts = np.concatenate([np.empty(0, np.int64), *(place[np.asarray(stream[place]) == end] for place in where)])
    return starts if len(starts) and starts[0] == 0 else np.concatenate([np.zeros(1, np.int64), starts])


@dataclass(frozen=True)
class PackedStream:
    """Stream of tokens of which each row holds whole documents, laid end to end in pieces: row i is made of the pieces
    [rows[i], rows[i + 1]), each (first token, tokens) of the stream. A longer document than a row is cut. `left_out`:
    how many rows more there were, without a token to learn."""

    tokens: Any
    pieces: Ints
    rows: Ints
    left_out: int = 0
    # of pairs of answers: the log-probability that a reference model gives each document, NaN until it is known
    references: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        """Return the number of tokens in the stream beneath the packed rows, also of tokens that are in no row."""
        return len(self.tokens)

    def __getitem__(self, index: Ints) -> NDArray[Any]:
        """Return the tokens at positions `index` of the stream beneath the packed rows."""
        return np.asarray(self.tokens[index])

    def token_positions(self, index: Ints, length: int) -> Ints:
        """Return the stream positions of packed rows' tokens, [len(index), length]; -1 where a row has no more."""
        starts, sizes = self.stretches(index)
        filled = np.diff(np.append(0, sizes.cumsum())[np.append(0, (self.rows[index + 1] - self.rows[index]).cumsum())])
        positions = np.full((len(index), length), PADDING, np.int64)
        positions[np.arange(length) < filled[:, None]] = _join_ranges(starts, sizes)
        return positions

    def stretches(self, index: Ints) -> tuple[Ints, Ints]:
        """Return the first position in the stream, and the tokens, of each piece of packed rows `index`, in order."""
        first = self.rows[index]
        starts, sizes = self.pieces[_join_ranges(first, self.rows[index + 1] - first)].T
        return starts, sizes


def _join_ranges(first: Ints, sizes: Ints) -> Ints:
    """Return the numbers of ranges one after another: from each `first`, so many as `sizes` says."""
    return np.repeat(first - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())


def _unpack_stream(stream: Any) -> Any:
    """Return the token stream that a packed stream lays into rows; any other stream as it is."""
    return stream.tokens if isinstance(stream, PackedStream) else stream


def bare_tokens(stream: Any) -> Any:
    """Return the tokens of a stream without rows and without facts about its documents."""
    laid = _unpack_stream(stream)
    return laid.tokens if isinstance(laid, DocumentStream) else laid


def known_document_starts(stream: Any) -> Ints | None:
    """Return the positions in a token stream at which documents begin; None if only a special token marks them."""
    laid = _unpack_stream(stream)
    return laid.starts if isinstance(laid, DocumentStream) else None


def token_loss_mask(stream: Any) -> NDArray[np.bool_] | None:
    """Return a mask of the tokens in a stream that count in the loss; None if all of them count."""
    laid = _unpack_stream(stream)
    return laid.learned if isinstance(laid, DocumentStream) else None


def read_padded_ids(stream: Any, place: Ints) -> Ints:
    """Return the token ids of a stream at positions `place`, int64; PADDING (-1) for positions outside of it."""
    is_inside = (place >= 0) & (place < len(stream))
    return np.where(is_inside, np.asarray(stream[np.where(is_inside, place, 0)]).astype(np.int64), PADDING)


def membership_mask(ascending: Ints, values: Ints) -> NDArray[np.bool_]:
    """Return a mask of the token positions `values` that occur in `ascending`, such as the starts of documents."""
    where = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    return np.asarray(ascending)[where] == values if len(ascending) else np.zeros(values.shape, bool)


def members_of_stretches(ascending: Ints, first: Ints, end: Ints) -> Ints:
    """Return the different numbers in `ascending`, as starts of documents, in each stretch [first, end), in order."""
    low, high = np.searchsorted(ascending, first), np.searchsorted(ascending, end)
    at = _join_ranges(low, high - low)
    is_first = np.repeat(low, high - low) == at
    return ascending[at[is_first | (ascending[at] != ascending[at - 1])]]


def document_start_mask(stream: Any, place: Ints, tokens: Ints, end: int) -> NDArray[np.bool_]:
    """Return a mask of the tokens [rows, length] that begin a document, or a piece of one, at positions `place` of a
    token stream; padding behind a row's last piece counts as another document."""
    starts = known_document_starts(stream)
    start_mask = (tokens == end) & (end >= 0) if starts is None else membership_mask(starts, place)
    if isinstance(stream, PackedStream):
        before = np.pad(place[:, :-1], ((0, 0), (1, 0)), constant_values=PADDING - 1)
        start_mask = (start_mask & (place >= 0)) | ((place != before + 1) & (place != before))
    return start_mask


def split_documents(stream: Any, end: int) -> Iterator[NDArray[Any]]:
    """Yield the token ids of each document in a stream; `end`: the token that begins one, if no index does."""
    starts = [*find_document_starts(stream, end).tolist(), len(stream)]
    for start, until in pairwise(starts):
        yield np.asarray(stream[np.arange(start, until)])


@dataclass(frozen=True)
class PairStream:
    """Tokenised pairs of texts: `tokens` holds source and target of each pair in turn, `ends` [pairs, 2] where they
    end."""

    tokens: NDArray[Any]
    ends: Ints

    def __len__(self) -> int:
        """Return the number of tokens in all pairs of texts, sources and targets together."""
        return len(self.tokens)

    def rows(self, side: int, index: Ints, length: int, last: int) -> Ints:
        """Return token ids [len(index), length] of the pairs `index`: their sources (side 0) or targets (side 1), each
        followed by the id `last`, cut or padded with -1 to `length`."""
        ends, number = self.ends.reshape(-1), 2 * index + side
        start, end = np.where(number > 0, ends[number - 1], 0), ends[number]
        offset = np.arange(length)
        place, size = start[:, None] + offset, (end - start)[:, None]
        ids = self.tokens[np.minimum(place, max(len(self.tokens) - 1, 0))].astype(np.int64)
        return np.where(offset < size, ids, np.where(offset == size, last, PADDING))


@dataclass(frozen=True)
class JoinedTokens:
    """Arrays of tokens that lie in files, as one: tokens [start, end) of them all, end to end."""

    arrays: Sequence[Any]
    start: int
    end: int

    def __len__(self) -> int:
        """Return the number of tokens of this data split, which may lie in several files."""
        return self.end - self.start

    def file_of_token(self, place: int) -> Path | None:
        """Return the file in which the token at position `place` of this data split lies; None if it is not known."""
        bounds = np.cumsum([len(array) for array in self.arrays])
        return getattr(self.arrays[int(np.searchsorted(bounds, place + self.start, "right"))], "file", None)

    def __getitem__(self, index: Ints) -> NDArray[Any]:
        """Return the token ids at positions `index` of this data split, each from the file that holds it."""
        place = np.asarray(index) + self.start
        if len(self.arrays) == 1:
            return np.asarray(self.arrays[0][place])
        bounds = np.cumsum([0, *map(len, self.arrays)])
        array_numbers = np.searchsorted(bounds, place, "right") - 1
        ids = np.empty(place.shape, np.int64)
        for number in np.unique(array_numbers):
            in_array = array_numbers == number
            ids[in_array] = self.arrays[number][place[in_array] - bounds[number]]
        return ids


@dataclass(frozen=True)
class DocumentStream:
    """Stream of tokens, with facts about its documents beside them. `starts`: the positions at which documents begin,
    ascending; `learned`: mask of the tokens to predict, None for all."""

    tokens: Any
    starts: Ints
    learned: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        """Return the number of tokens in this stream of documents."""
        return len(self.tokens)

    def __getitem__(self, index: Ints) -> NDArray[Any]:
        """Return the token ids at positions `index` of this stream of documents."""
        return np.asarray(self.tokens[index])


@dataclass(frozen=True)
class RandomTokens:
    """Endless stream of uniform random tokens in [0, vocab), chosen by `seed` and `number`; indexed like an array."""

    seed: int
    number: int
    vocab: int

    def __len__(self) -> int:
        """Return the number of tokens in this stream of random tokens, practically endless: 2^40."""
        return 1 << 40

    def __getitem__(self, index: NDArray[np.int64]) -> NDArray[Any]:
        """Return the random token ids at positions `index`, each a hash of seed, split and position."""
        return hash_integers(self.seed, self.number, index) % np.uint64(self.vocab)


def encode_bytes(text: str, vocab: int) -> list[int]:
    """Encode a prompt for a model of synthetic tokens: the text's UTF-8 bytes as ids, modulo the vocabulary."""
    return [byte % vocab for byte in text.encode()]


def show_ids(ids: Sequence[int]) -> str:
    """Return synthetic token ids, which stand for no text, as printable placeholders: "<5> <17>"."""
    return " ".join(f"<{i}>" for i in ids)


def cut_samples(samples: Mapping[str, Ints], pieces: int) -> dict[str, Ints]:
    """Cut each sample's data tensors [samples, length] into `pieces` sequences: return [samples * pieces, length /
    pieces]. A token keeps its label, even if this begins the next piece. A document that began before a piece begins
    with the piece."""
    sequences = {name: rows.reshape(len(rows) * pieces, -1) for name, rows in samples.items()}
    length = sequences["tokens"].shape[1]
    if "begins" in sequences:
        offset = np.tile(np.arange(pieces) * length, len(samples["tokens"]))[:, None]
        sequences["begins"] = np.maximum(sequences["begins"] - offset, 0)
    if "positions" in sequences:
        sequences["positions"] = np.minimum(sequences["positions"], np.arange(length))
    if "segments" in sequences:
        sequences["segments"] = sequences["segments"] - sequences["segments"][:, :1]
    return sequences


def read_ahead(sequences: Mapping[str, Ints], depth: int, within_documents: bool) -> dict[str, Ints]:
    """Return tokens and labels of sequences 1 to `depth` further on, by name, -1 where there are none in the sequence
    or, `within_documents`, in a token's own document."""
    shifted, length = dict[str, Ints](), sequences["tokens"].shape[1]
    begins = sequences["begins"] if within_documents else np.zeros_like(sequences["tokens"])
    for k in range(1, depth + 1):
        in_document = begins[:, k:] <= np.arange(length - k)
        for name, of_depth in (("tokens", token_tensor(k)), ("labels", label_tensor(k))):
            ids = np.where(in_document, sequences[name][:, k:], PADDING)
            shifted[of_depth] = np.pad(ids, ((0, 0), (0, min(k, length))), constant_values=PADDING)
    return shifted


def read_sequence_batch(corpus: Any, split: str, start: int, end: int, pieces: int) -> dict[str, Any]:
    """Return sequences [start, end) as `Corpus.batch` does samples, with each of these cut into `pieces` sequences."""
    if pieces == 1:
        return corpus.batch(split, start, end)
    first = start // pieces
    samples = corpus.batch(split, first, -(-end // pieces))
    wanted = slice(start - first * pieces, end - first * pieces)
    return {name: rows[wanted] for name, rows in cut_samples(samples, pieces).items()}

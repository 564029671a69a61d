"""Training objectives, which turn a stream of tokens into samples of named data tensors and choose the predicted
tokens.

An objective returns sample `index` of a stream as int64 rows of fixed lengths, where -1 is padding: nothing to read in
`tokens` and `source`, nothing to predict in `labels`; `label_weights` are fp64 rows. Its randomness is a function of
the sample's key alone. Where a sample may span documents, `begins` or `segments` distinguish them. `register_objective`
adds one of the user's own, every sample of which is checked (`UserObjective`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from platform.boundary.refusals import ConfigError, OwnCodeError, guard_user_code
from platform.config.extensions import bind_settings_object, register_own_function
from platform.config.fields import LOSS_OF, WEIGHTED, allow_objective
from platform.data import streams
from platform.data.mixture import hash_integers
from platform.data.special_tokens import SpecialIds
from platform.data.streams import PADDING, Ints, PackedStream, known_document_starts, read_padded_ids, token_loss_mask
from platform.plan.layout import format_count
from platform.plan.model_types import CROSS_ENTROPY

NOISE = 0.15  # fraction of the tokens that are predicted (BERT; T5)
SPAN = 3  # tokens per corrupted span, on average (T5)

Keys = NDArray[np.uint64]
OWN = SpecialIds()


class Objective(Protocol):
    """Interface of a training objective: makes samples of a stream of tokens, and chooses the tokens to predict."""

    @property
    def needs(self) -> int:
        """Return how many tokens of a stream this training objective takes for one sample."""
        ...  # tokens of a stream for one sample

    @property
    def reserved(self) -> int:
        """Return how many ids at the top of the vocabulary this training objective uses itself, barred for text."""
        ...  # ids at the top of the vocabulary that text does not use

    def samples(self, stream: Any) -> int:
        """Return how many training samples this objective makes of a stream of tokens."""
        ...

    def batch(self, stream: Any, index: Ints, keys: Keys) -> dict[str, Ints]:
        """Return samples `index` of a token stream as data tensors by name; `keys`: the random key of each sample."""
        ...

    def predicted(self, stream: Any, index: Ints) -> int:
        """Count the labels that are not padding in samples `index` of a token stream, over which the loss is a mean."""
        ...  # labels that are not padding


@dataclass(frozen=True)
class SampleShape:
    """Shape of the samples that an objective makes: lengths in tokens, and ids in [0, vocab)."""

    length: int
    source_length: int  # of the encoder's sequence
    vocab: int
    segments: int = 0  # of a sample that an encoder tells apart; 0: none
    special: SpecialIds = OWN
    document_mask: bool = False  # the model sees no document before the token's own


@dataclass(frozen=True)
class Causal:
    """Causal objective: predicts every token from those before it. Sample i is the length + 1 tokens from i * length
    on, so that every token but the first is predicted once; of a packed stream it is row i.

    Tokens that the stream marks as not to be learned are not predicted, nor, `within` documents or in packed rows, is a
    document's first token, unless it also ends the document before.
    """

    length: int
    special: SpecialIds = OWN
    within: bool = False
    reserved = 0

    @property
    def needs(self) -> int:
        """Return how many tokens of a stream one sample of next-token prediction takes: its length, and one more."""
        return self.length + 1

    def samples(self, stream: Any) -> int:
        """Return how many samples of next-token prediction a token stream has: its rows, if it is packed."""
        return len(stream.rows) - 1 if isinstance(stream, PackedStream) else (len(stream) - 1) // self.length

    def token_positions(self, stream: Any, index: Ints) -> Ints:
        """Return the stream positions of the tokens that samples `index` read, [len(index), length]; -1 for none."""
        if isinstance(stream, PackedStream):
            return stream.token_positions(index, self.length)
        return index[:, None] * self.length + np.arange(self.length)

    def batch(self, stream: Any, index: Ints, keys: Keys) -> dict[str, Ints]:
        """Return samples `index` of a token stream for next-token prediction: `tokens`; `labels`, the tokens that
        follow, -1 where none is predicted; `begins`, the place in the sample at which each token's document begins; and
        `positions`, how far from there the token is. Each is int64 [len(index), length]."""
        place = self.token_positions(stream, index)
        if isinstance(stream, PackedStream):
            tokens = read_padded_ids(stream, place)
            labels = read_padded_ids(stream, np.where(place < 0, PADDING, place + 1))
        else:
            rows = _gather_token_ids(stream, np.concatenate([place, place[:, -1:] + 1], 1))
            tokens, labels = rows[:, :-1], rows[:, 1:]
        column = np.arange(self.length)
        first = streams.document_start_mask(stream, place, tokens, self.special.begin)
        begins = np.maximum.accumulate(np.where(first, column, 0), 1)
        if self._can_ignore_labels(stream):
            labels = np.where(self._mask_learned_labels(stream, place, labels), labels, PADDING)
        return {"tokens": tokens, "labels": labels, "begins": begins, "positions": column - begins}

    def predicted(self, stream: Any, index: Ints) -> int:
        """Count the labels of samples `index` of a token stream, for next-token prediction, that are not padding."""
        packed, learned = isinstance(stream, PackedStream), token_loss_mask(stream)
        if not packed and not self._can_ignore_labels(stream):
            return len(index) * self.length
        if self.counts_by_reading(stream):
            return int((self.batch(stream, index, np.empty(0, np.uint64))["labels"] >= 0).sum())
        # labels lie in stretches of the stream: of a whole batch they are counted in milliseconds, without any ids
        starts = cast(Ints, known_document_starts(stream))
        first, sizes = stream.stretches(index) if packed else (index * self.length, np.full(len(index), self.length))
        first, end = first + 1, np.minimum(first + sizes + 1, len(stream))
        stretches = zip(first.tolist(), end.tolist(), strict=True)
        count = (end - first).sum() if learned is None else sum(np.count_nonzero(learned[i:j]) for i, j in stretches)
        if self.within or packed:
            ignored = streams.members_of_stretches(starts, first, end)
            ignored = ignored[np.asarray(stream[ignored]) != self.special.end]
            count -= len(ignored) if learned is None else np.count_nonzero(learned[ignored])
        return int(count)

    def counts_by_reading(self, stream: Any) -> bool:
        """Return True if labels of a token stream are counted by reading them: ids alone say where documents begin."""
        counted = isinstance(stream, PackedStream) or self._can_ignore_labels(stream)
        return counted and known_document_starts(stream) is None

    def _can_ignore_labels(self, stream: Any) -> bool:
        """Return True if some tokens of the stream may be left out of the loss, so that labels must be counted."""
        known = known_document_starts(stream) is not None or self.special.begin != self.special.end
        return token_loss_mask(stream) is not None or (known and (self.within or isinstance(stream, PackedStream)))

    def _mask_learned_labels(self, stream: Any, place: Ints, labels: Ints) -> NDArray[np.bool_]:
        """Return a mask of the labels that count in the loss of next-token prediction, shaped as `labels` [samples,
        length]. `place`: position in the token stream of the token before each label."""
        after, learned = np.where(place < 0, PADDING, place + 1), token_loss_mask(stream)
        mask = labels >= 0
        if learned is not None:
            mask &= learned[np.clip(after, 0, len(learned) - 1)]
        if self.within or isinstance(stream, PackedStream):
            starts, begin = known_document_starts(stream), self.special.begin
            begins = labels == begin if starts is None else streams.membership_mask(starts, after)
            mask &= ~begins | (labels == self.special.end)
        return mask


@dataclass(frozen=True)
class PreferencePairs:
    """Objective of pairs of answers, of which a model learns to prefer the chosen ones. A sample is a packed row of
    whole pairs: for each the prompt with the chosen answer, and again with the rejected one, as documents that do not
    see each other. Its loss is a mean over pairs."""

    length: int
    special: SpecialIds = OWN
    within = True
    reserved = 0

    @property
    def _causal(self) -> Causal:
        """Return the objective that reads the same rows for next-token prediction."""
        return Causal(self.length, self.special, True)

    @property
    def needs(self) -> int:
        """Return how many tokens of a stream one sample of pairs of answers takes: its length, and one more."""
        return self._causal.needs

    def samples(self, stream: Any) -> int:
        """Return how many rows of pairs of answers a packed token stream has."""
        return self._causal.samples(stream)

    def token_positions(self, stream: Any, index: Ints) -> Ints:
        """Return the stream positions of the tokens of packed rows of pairs of answers, [len(index), length]."""
        return self._causal.token_positions(stream, index)

    def batch(self, stream: Any, index: Ints, keys: Keys) -> dict[str, Ints]:
        """Return rows `index` of a packed token stream as of `Causal`, and of each label: in `paired` the number of its
        answer in the row, 2 n of pair n's chosen one and 2 n + 1 of its rejected one, else -1; in `label_weights` its
        share of its pair; in `references` the answer's reference log-probability at its first label, else 0."""
        tensors, starts = self._causal.batch(stream, index, keys), known_document_starts(stream)
        assert starts is not None and stream.references is not None
        place, counts = stream.token_positions(index, self.length), tensors["labels"] >= 0
        document = np.searchsorted(starts, place, "right") - 1
        begins_pair = (document % 2 == 0) & (place >= 0) & (tensors["positions"] == 0)
        pair = np.cumsum(begins_pair, 1) - 1
        answer = np.where(counts, 2 * pair + document % 2, PADDING)
        key = np.arange(len(index))[:, None] * self.length + pair
        labels_of_pair = np.bincount(key[counts], minlength=key.max() + 1)
        weights = np.divide(1.0, labels_of_pair[key], out=np.zeros(key.shape), where=counts)
        first = counts & (np.cumsum(counts, 1) - 1 == self._count_labels_before(counts, tensors["begins"]))
        references = np.where(first, stream.references[np.maximum(document, 0)], 0.0)
        return {**tensors, "paired": answer, "label_weights": weights, "references": references}

    @staticmethod
    def _count_labels_before(counts: NDArray[np.bool_], begins: Ints) -> Ints:
        """Return how many labels of a row lie before the document of each token of pairs of answers."""
        before: Ints = np.cumsum(counts, 1) - counts
        return np.take_along_axis(before, begins, 1)

    def predicted(self, stream: Any, index: Ints) -> int:
        """Count the pairs of answers in rows `index` of a packed token stream, over which the loss is a mean."""
        return int((stream.rows[index + 1] - stream.rows[index]).sum())


@dataclass(frozen=True)
class Masked:
    """Masked objective (BERT, 3.1): predicts some tokens from all others. Of the predicted ones, 80 % are replaced by
    the mask, 10 % by a random token, and 10 % stay. `segments`: number of segments of a sample that the model
    distinguishes (its documents, the last ones together), 0 for none."""

    length: int
    vocab: int
    segments: int = 0
    special: SpecialIds = OWN

    @property
    def reserved(self) -> int:
        """Return 1 if the vocabulary's last id must serve as the mask token, 0 if the tokenizer has one of its own."""
        return int(self.special.mask is None)

    @property
    def needs(self) -> int:
        """Return how many tokens of a stream one sample of masked-token prediction takes: its length."""
        return self.length

    @property
    def names(self) -> dict[int, str]:
        """Return what people call the ids that this objective puts in the place of text: the mask."""
        return {self._mask_id: "[MASK]"}

    @property
    def _mask_id(self) -> int:
        """Return the id that hides a token: the tokenizer's own, or the last one of the vocabulary."""
        return self.vocab - 1 if self.special.mask is None else self.special.mask

    @property
    def _num_masked_tokens(self) -> int:
        """Return how many tokens of a sample are masked and predicted: 15 % of its length, at least one."""
        return max(1, round(NOISE * self.length))

    def samples(self, stream: Any) -> int:
        """Return how many samples of masked-token prediction, of `length` tokens each, a token stream has."""
        return len(stream) // self.length

    def token_positions(self, stream: Any, index: Ints) -> Ints:
        """Return the positions in a token stream of the tokens of samples `index`, [len(index), length]."""
        return index[:, None] * self.length + np.arange(self.length)

    def batch(self, stream: Any, index: Ints, keys: Keys) -> dict[str, Ints]:
        """Return samples `index` of a token stream for masked-token prediction: `tokens`, in part replaced by the mask;
        `labels`, the original tokens at the predicted places, else -1; and, if the model has any, `segments`, the
        number of each token's segment. Each is int64 [len(index), length]. `keys` [len(index)]: random keys that decide
        which tokens are masked."""
        rows = _gather_token_ids(stream, self.token_positions(stream, index))
        place, key = np.arange(self.length), keys[:, None]
        chosen = _draw_prediction_mask(key, self.length, self._num_masked_tokens)
        lot = hash_integers(key, 1, place) % np.uint64(10)
        mask, ids = self._mask_id, self.vocab if self.special.mask is None else self.special.size
        random = (hash_integers(key, 2, place) % np.uint64(ids - 1)).astype(np.int64)
        random += random >= mask
        seen = np.where(lot < 8, mask, np.where(lot == 8, random, rows))
        tensors = {"tokens": np.where(chosen, seen, rows), "labels": np.where(chosen, rows, PADDING)}
        if self.segments:
            begun = np.cumsum(rows[:, 1:] == self.special.begin, 1)
            tensors["segments"] = np.pad(begun, ((0, 0), (1, 0))).clip(max=self.segments - 1)
        return tensors

    def predicted(self, stream: Any, index: Ints) -> int:
        """Count the labels of samples `index`, for masked-token prediction, that are not padding."""
        return len(index) * self._num_masked_tokens


@dataclass(frozen=True)
class SpanDenoising:
    """Span denoising (T5, 3.1.4): predicts the missing spans of a text. The encoder reads the text with a sentinel in
    place of each span, the decoder writes each span behind its sentinel, and what ends documents at the end. Sentinels
    are the tokenizer's, or the vocabulary's last ids, downwards.

    A sample takes as many tokens as fit into both lengths; `_count_noise_and_spans` gives how many are missing, and in
    how many spans.
    """

    source_length: int
    length: int
    vocab: int
    special: SpecialIds = OWN

    @property
    def needs(self) -> int:
        """Return how many tokens of a stream one sample of span denoising takes: the most that both lengths allow."""
        fitting = [n for n in range(2, self.source_length + self.length) if self._can_fit_sample(n)]
        if not fitting:
            raise ConfigError(f"model.length={self.length}: span denoising needs at least 3, and a source of 2")
        return fitting[-1]

    def _can_fit_sample(self, n: int) -> bool:
        """Return True if a span-denoising sample of n tokens fits: the text the encoder, removed spans the decoder."""
        noise, spans = _count_noise_and_spans(n)
        return n - noise + spans <= self.source_length and noise + spans + 1 <= self.length

    @property
    def reserved(self) -> int:
        """Return the number of vocabulary ids that stand for missing spans: 0 if the tokenizer has sentinels for them.
        Raises ConfigError if it has some, but fewer than a sample has spans."""
        spans, sentinels = _count_noise_and_spans(self.needs)[1], self.special.sentinels
        if sentinels and spans > sentinels:
            raise ConfigError(f"model.length={self.length}: {spans} spans, and the tokenizer has {sentinels} sentinels")
        return 0 if sentinels else spans

    def samples(self, stream: Any) -> int:
        """Return how many samples of span denoising, of `needs` tokens each, a token stream has."""
        return len(stream) // self.needs

    @property
    def names(self) -> dict[int, str]:
        """Return what people call the ids that stand for missing spans: [span 1], [span 2] and so on."""
        return {self._first_sentinel - i: f"[span {i + 1}]" for i in range(_count_noise_and_spans(self.needs)[1])}

    @property
    def _first_sentinel(self) -> int:
        """Return the id of the first sentinel; the others are below it."""
        return self.vocab - 1 if self.special.sentinel is None else self.special.sentinel

    def token_positions(self, stream: Any, index: Ints) -> Ints:
        """Return the positions in a token stream of the text of samples `index`, [len(index), needs]."""
        return index[:, None] * self.needs + np.arange(self.needs)

    def batch(self, stream: Any, index: Ints, keys: Keys) -> dict[str, Ints]:
        """Return samples `index` of a token stream for span denoising: `source` [len(index), source_length], the text
        with a sentinel in place of each missing span; `labels` [len(index), length], the spans, each behind its
        sentinel; and `tokens`, the labels shifted right as the decoder reads them; int64. `keys` [len(index)]: random
        keys that decide which spans are missing."""
        n = self.needs
        noise, spans = _count_noise_and_spans(n)
        rows = _gather_token_ids(stream, self.token_positions(stream, index))
        # lengths of kept and missing stretches in turn, a kept one first
        lengths = [_draw_span_lengths(keys, number, total, spans) for number, total in enumerate((n - noise, noise))]
        stretches = np.stack(lengths, -1)
        starts = np.cumsum(stretches.reshape(len(rows), -1), 1)[:, :-1]
        first = np.zeros_like(rows)
        np.put_along_axis(first, starts, 1, 1)
        stretch = np.cumsum(first, 1)
        missing, sentinel = stretch % 2 == 1, self._first_sentinel - stretch // 2
        begins = missing & (first == 1)
        source = np.where(begins, sentinel, rows)[~missing | begins].reshape(len(rows), -1)
        both = np.stack([sentinel, rows], -1)[np.stack([begins, missing], -1)].reshape(len(rows), -1)
        labels = np.pad(both, ((0, 0), (0, 1)), constant_values=self.special.end)
        decoder = build_decoder_tensors(_pad_rows(labels, self.length), self.special.start)
        return {"source": _pad_rows(source, self.source_length), **decoder}

    def predicted(self, stream: Any, index: Ints) -> int:
        """Count the labels of samples `index`, for span denoising, that are not padding."""
        return len(index) * (sum(_count_noise_and_spans(self.needs)) + 1)


@dataclass(frozen=True)
class Pairs:
    """Sequence-to-sequence objective: predicts the target of every pair of texts from its source; both end with what
    ends documents and are cut at their length. The stream is a `platform.data.streams.PairStream`."""

    source_length: int
    length: int
    special: SpecialIds = OWN
    needs, reserved = 1, 0

    def samples(self, stream: Any) -> int:
        """Return how many training samples a stream of text pairs (source, target) has: one for each pair."""
        return len(stream.ends)

    def batch(self, stream: Any, index: Ints, keys: Keys) -> dict[str, Ints]:
        """Return text pairs `index` as int64 data tensors: `source`, `labels` (target), `tokens` (shifted labels)."""
        end, start = self.special.end, self.special.start
        source, answer = (stream.rows(side, index, n, end) for side, n in enumerate((self.source_length, self.length)))
        return {"source": source, **build_decoder_tensors(answer, start)}

    def predicted(self, stream: Any, index: Ints) -> int:
        """Count the labels in the targets of text pairs `index`: their tokens and the end token, cut to `length`."""
        first, last = stream.ends[index].T
        return int(np.minimum(last - first + 1, self.length).sum())


OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "causal": lambda s: Causal(s.length, s.special, s.document_mask),
    "preference": lambda s: PreferencePairs(s.length, s.special),
    "masked": lambda s: Masked(s.length, s.vocab, s.segments, s.special),
    "span_denoising": lambda s: SpanDenoising(s.source_length, s.length, s.vocab, s.special),
    "pairs": lambda s: Pairs(s.source_length, s.length, s.special),
}
GIVEN = frozenset(OBJECTIVES)  # not a user's own


def register_objective(
    name: str,
    make: Callable[..., Objective],
    models: Sequence[str] = ("decoder",),
    *,
    weighted: bool = False,
    loss: str = "",
    settings: type | None = None,
) -> None:
    """Register a user's training objective as `data.objective=NAME`, for the kinds of models `models`: `make(shape)`
    returns an objective that makes samples of this shape. A kind that `register_model` adds names it in its own
    `objectives`.

    `weighted`: its samples have the data tensor `label_weights` too, fp64, the weight of each label in training; the
    mean is over the sum of their magnitudes. `loss`: its loss function unless `train.loss` names another; "" is
    cross-entropy. `settings`: a dataclass of data.objective_settings, which `make` gets as `settings`.
    """
    register_own_function("data.objective", name, settings, make)
    if isinstance(models, str) or not all(isinstance(kind, str) for kind in models):
        reason = f"is registered for models={models!r}, which is no list of kinds of models"
        raise ConfigError("data.objective", name, reason, ['("decoder",)'])
    OBJECTIVES[name] = make
    (WEIGHTED.add if weighted else WEIGHTED.discard)(name)
    LOSS_OF[name] = loss or CROSS_ENTROPY
    for kind in models:
        allow_objective(kind, name)


def build_decoder_tensors(labels: Ints, start: int) -> dict[str, Ints]:
    """Return a decoder's data tensors for `labels` [samples, length]: these, and `tokens`, shifted right by one."""
    shifted = np.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=start)
    return {"tokens": np.where(labels < 0, PADDING, shifted), "labels": labels}


def _count_noise_and_spans(n: int) -> tuple[int, int]:
    """Return how many tokens span denoising removes from a sample of n tokens, and how many spans these form."""
    noise = max(1, round(NOISE * n))
    return noise, max(1, round(noise / SPAN))


def _gather_token_ids(stream: Any, place: Ints) -> Ints:
    """Return the token ids of a stream at positions `place`, all of which are in it, int64."""
    return np.asarray(stream[place]).astype(np.int64)


def _pad_rows(rows: Ints, length: int) -> Ints:
    """Pad rows of token ids [samples, any] with -1 at the end to [samples, length]."""
    return np.pad(rows, ((0, 0), (0, length - rows.shape[1])), constant_values=PADDING)


def _draw_prediction_mask(key: NDArray[np.uint64], n: int, count: int) -> NDArray[np.bool_]:
    """Draw a mask [rows, n] of the tokens to predict, `count` True in each row, by random keys `key` [rows, 1]."""
    chosen = np.zeros((len(key), n), bool)
    ranked = np.argsort(hash_integers(key, 0, np.arange(n)), 1, kind="stable")
    np.put_along_axis(chosen, ranked[:, :count], True, 1)
    return chosen


def _draw_span_lengths(keys: Keys, salt: int, total: int, spans: int) -> Ints:
    """Divide each sample's `total` tokens at random into `spans` spans, uniformly among all ways: return their positive
    lengths, int64 [rows, parts]. `keys` [rows] and `salt`, the number of the draw, decide it."""
    cuts = _draw_prediction_mask(hash_integers(keys, 3, salt)[:, None], total - 1, spans - 1)
    ends = np.nonzero(cuts)[1].reshape(len(keys), spans - 1) + 1
    return np.diff(ends, axis=1, prepend=0, append=total)


# Words in the keys of cache entries: another name of a class changes none.
_WORDS: dict[type, str] = {
    Causal: "Causal",
    PreferencePairs: "PreferencePairs",
    Masked: "Masked",
    SpanDenoising: "SpanDenoising",
    Pairs: "Pairs",
}


def build_objective(name: str, shape: SampleShape, settings: Mapping[str, Any]) -> Objective:
    """Construct the training objective that `data.objective` names, for samples of `shape`. A user's own gets
    `settings`, the data.objective_settings, and its samples are checked; ConfigError names any error in it."""
    if name in GIVEN:
        return OBJECTIVES[name](shape)
    with name_objective_in_errors(name):
        make = bind_settings_object(OBJECTIVES[name], "data.objective", name, settings)
        return UserObjective(name, make(shape), shape)


@dataclass(frozen=True)
class UserObjective:
    """Training `objective` of a user's own, for samples of a shape. Raises ConfigError, naming it and the sample, for
    any error of it, for a sample with ids outside of the vocabulary or places outside of its row, with a label where
    its tokens are padding, and for one with more or fewer labels than it says: the mean loss is over as many."""

    name: str
    objective: Objective
    shape: SampleShape

    @property
    def needs(self) -> int:
        """Return how many tokens of a stream one sample of the user's training objective takes, at least 1."""
        return self._ask_integer("needs", 1)

    @property
    def reserved(self) -> int:
        """Return how many ids at the top of the vocabulary the user's training objective reserves for itself."""
        return self._ask_integer("reserved", 0)

    def samples(self, stream: Any) -> int:
        """Return how many training samples the user's objective makes of a stream of tokens."""
        return self._ask_integer("samples", -1, stream)

    def predicted(self, stream: Any, index: Ints) -> int:
        """Return how many labels that are not padding the user's objective counts in samples `index`."""
        return self._ask_integer("predicted", 0, stream, index)

    def batch(self, stream: Any, index: Ints, keys: Keys) -> dict[str, Ints]:
        """Return samples `index` of a token stream as data tensors by name, made by the user's training objective and
        checked. Raises ConfigError for illegal samples. `keys`: the random key of each sample."""
        with name_objective_in_errors(self.name):
            tensors = dict(self.objective.batch(stream, index, keys))
            for name, most in self._tensor_bounds.items():
                if name in tensors:
                    self._check_tensor(name, np.asarray(tensors[name]), most, index)
            tokens, labels = (np.asarray(tensors.get(name, ())) for name in ("tokens", "labels"))
            if labels.shape == tokens.shape and (unread := (labels >= 0) & (tokens < 0)).any():
                row, column = np.argwhere(unread)[0]
                reason = f"sample {index[row]} has a label at place {column}, where its tokens are padding"
                raise ConfigError(f"data.objective={self.name}: {reason}; -1 is a label that is not predicted")
            if labels.shape == (len(index), self.shape.length):
                self._check_label_count(stream, index, (labels >= 0).sum(1))
        return tensors

    @property
    def _tensor_bounds(self) -> dict[str, int]:
        """Return data tensor -> bound of its integers in samples: legal are [0, bound), and -1 for padding."""
        ids, places = ("tokens", "labels", "source"), ("begins", "positions")
        segments = {"segments": self.shape.segments} if self.shape.segments else {}
        return dict.fromkeys(ids, self.shape.vocab) | dict.fromkeys(places, self.shape.length) | segments

    def _check_tensor(self, name: str, rows: Any, most: int, index: Ints) -> None:
        """Raise ConfigError if data tensor `name` of the user's objective is illegal: `rows` must be one row of
        integers for each sample in `index`, each integer padding (-1) or in [0, most)."""
        config_key = f"data.objective={self.name}: "
        if rows.dtype.kind not in "iu" or rows.ndim != 2 or len(rows) != len(index):
            description = f"makes {name!r} as {rows.dtype} of shape {list(rows.shape)}"
            samples = format_count(len(index), "sample")
            raise ConfigError(f"{config_key}{description} for {samples}: rows of integers are needed, one for each")
        if rows.size and (rows.min() < PADDING or rows.max() >= most):
            row, column = np.argwhere((rows < PADDING) | (rows >= most))[0]
            where = f"sample {index[row]} has {rows[row, column]} in {name!r}, at place {column}"
            raise ConfigError(f"{config_key}{where}: legal are 0 to {most - 1}, and -1 for padding")

    def _check_label_count(self, stream: Any, index: Ints, labels: Ints) -> None:
        """Raise ConfigError if `predicted` of the user's objective is not the number of labels that samples `index` of
        the token stream have, `labels` [len(index)]."""
        if self.predicted(stream, index) == labels.sum():
            return
        said_counts = [self.predicted(stream, index[i : i + 1]) for i in range(len(index))]
        mismatches = [i for i, said_count in enumerate(said_counts) if said_count != labels[i]]
        sample_range = f"samples {index[0]} to {index[-1]}"
        actual_count, said_count = labels.sum(), self.predicted(stream, index)
        if mismatches:
            first = mismatches[0]
            sample_range, actual_count, said_count = f"sample {index[first]}", labels[first], said_counts[first]
        reason = f"{sample_range}: {format_count(actual_count, 'label')}, and predicted says {said_count}"
        raise ConfigError(f"data.objective={self.name}: {reason}; -1 is a label that is not predicted")

    def _ask_integer(self, attribute: str, least: int, *call_arguments: Any) -> int:
        """Return the integer `attribute` of the user's training objective, given `call_arguments`; ConfigError if not
        >= `least`."""
        with name_objective_in_errors(self.name):
            value = getattr(self.objective, attribute)
            value = value(*call_arguments) if call_arguments else value
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
                reason = f"says {attribute}={value!r}; an integer >= {least} is needed"
                raise ConfigError(f"data.objective={self.name}: {reason}")
            return int(value)


@contextmanager
def name_objective_in_errors(name: str) -> Iterator[None]:
    """Raise ConfigError, naming data.objective, in place of any error of a user's own objective within the context."""
    if name in GIVEN:
        yield
        return
    try:
        with guard_user_code(f"data.objective={name}", (ConfigError, OSError)):
            yield
    except OwnCodeError as error:
        raise ConfigError(f"data.objective={name}: {error}") from error


def objective_cache_word(objective: Objective) -> str:
    """Return the word for a training objective in the keys of cache entries; of a user's own, the name of its class."""
    goal = type(objective.objective if isinstance(objective, UserObjective) else objective)
    return _WORDS.get(goal, goal.__name__)

"""Model that is asked: texts as token ids, in batches of like length, and the workers' answers on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from platform.config.fields import Model
from platform.data.vocabulary import Vocabulary
from platform.train.protocol.asked import AskedTexts, Choice, Scored, Written

Ids = Sequence[int]
Ask = Callable[..., list[Any]]  # `Crew.call` of a crew of answerers, or what stands before it


class AskedModel:
    """Model, with its `vocabulary` if it has one, whose workers answer the calls of `ask`
    (`platform.train.generation.answerer`). `batch`: texts at a time."""

    def __init__(self, ask: Ask, model: Model, vocabulary: Vocabulary | None, batch: int = 16):
        self._ask, self._batch, self.model, self.vocabulary = ask, batch, model, vocabulary
        self.pairs = self.model.kind == "encoder_decoder"
        special = vocabulary.special if vocabulary else None
        self.start, self.begin, self.end = (special.start, special.begin, special.end) if special else (0, 0, 0)

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the numbers of texts of these lengths in batches, the longest first."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        for first in range(0, len(order), self._batch):
            yield order[first : first + self._batch]

    def write(self, prompts: Sequence[Ids], tokens: int, how: Choice, ends: Ids) -> Iterator[tuple[int, Written]]:
        """Yield the number of each prompt with its continuation, `tokens` at most, in batches in the given order."""
        for first in range(0, len(prompts), self._batch):
            numbers = list(range(first, min(first + self._batch, len(prompts))))
            rows = [list(prompts[n]) for n in numbers]
            texts = (
                AskedTexts([[self.start]] * len(rows), rows, numbers) if self.pairs else AskedTexts(rows, [], numbers)
            )
            yield from zip(numbers, self._ask("continue_texts", texts, tokens, how, list(ends))[0], strict=True)

    def score(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[Scored]:
        """Score each continuation after its context, of which the last tokens are read that fit; without a context, or
        by a decoder that follows an encoder, after the token that begins a text."""
        found: list[Scored | None] = [None] * len(pairs)
        rows = [self._row(*pair) for pair in pairs]
        for numbers in self._batches([len(ids) for ids, _, _ in rows]):
            ids, starts, sources = (list(column) for column in zip(*(rows[n] for n in numbers), strict=True))
            texts = AskedTexts(ids, sources if self.pairs else [])
            for number, scored in zip(numbers, self._ask("score_texts", texts, starts)[0], strict=True):
                found[number] = scored
        return [scored for scored in found if scored]

    def _row(self, context: Ids, text: Ids) -> tuple[list[int], int, list[int]]:
        """Return the decoder's ids for a context and a text, the index at which the text begins there, and the
        encoder's ids."""
        most = self.model.length + 1  # the last token is only predicted
        if self.pairs:
            read = self.model.source_length or self.model.length
            return [self.start, *text][:most], 1, [*context[-(read - 1) :], self.end]
        ids = [*(context or [self.begin]), *text]
        ids = ids[-most:]
        return ids, max(1, len(ids) - len(text)), []

    def score_whole(self, texts: Sequence[Ids]) -> list[float]:
        """Return the log-probability of each of several texts of any length, in nats: each token once, after the token
        that begins a text or the tokens before it in its window, as long as the model."""
        most = self.model.length
        windows, owners = [], []
        for number, ids in enumerate(texts):
            whole = [self.begin, *ids]
            for first in range(0, len(ids), most):
                stop = min(first + most, len(ids))
                begin = max(0, stop - most)  # the last window is full
                windows.append((whole[begin : first + 1], whole[first + 1 : stop + 1]))
                owners.append(number)
        totals = [0.0] * len(texts)
        for number, scored in zip(owners, self.score(windows), strict=True):
            totals[number] += scored.log_probability
        return totals

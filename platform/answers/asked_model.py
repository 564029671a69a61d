"""Model that is asked: texts as token ids, in batches of like length, to what a crew's workers say of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from platform.answers.trained import Planned
from platform.cluster.crew.base.crew import Crew
from platform.train.protocol.asked import AskedTexts, Choice, Scored, Written

Ids = Sequence[int]


class AskedModel:
    """Trained model, with its vocabulary, for which `crew` answers; see `platform.answers.session.open_session`.
    `batch`: texts at a time."""

    def __init__(self, crew: Crew, planned: Planned, batch: int = 16):
        self._crew, self._batch, self.model, self.vocabulary = crew, batch, planned.config.model, planned.vocabulary
        self.pairs = self.model.kind == "encoder_decoder"
        special = planned.vocabulary.special if planned.vocabulary else None
        self.start, self.begin, self.end = (special.start, special.begin, special.end) if special else (0, 0, 0)

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the numbers of texts of these lengths in batches, the longest first."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        for first in range(0, len(order), self._batch):
            yield order[first : first + self._batch]

    def write(self, prompts: Sequence[Ids], tokens: int, how: Choice, ends: Ids) -> Iterator[tuple[int, Written]]:
        """Yield the number of each prompt with what follows it, `tokens` at most, in batches in the given order."""
        for first in range(0, len(prompts), self._batch):
            numbers = list(range(first, min(first + self._batch, len(prompts))))
            rows = [list(prompts[n]) for n in numbers]
            texts = (
                AskedTexts([[self.start]] * len(rows), rows, numbers) if self.pairs else AskedTexts(rows, [], numbers)
            )
            yield from zip(numbers, self._crew.call("continue_texts", texts, tokens, how, list(ends))[0], strict=True)

    def score(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[Scored]:
        """Score each continuation after its context, of which the last tokens are read that fit; without a context, or
        by a decoder that follows an encoder, after what begins a text."""
        found: list[Scored | None] = [None] * len(pairs)
        rows = [self._row(*pair) for pair in pairs]
        for numbers in self._batches([len(ids) for ids, _, _ in rows]):
            ids, starts, sources = (list(column) for column in zip(*(rows[n] for n in numbers), strict=True))
            texts = AskedTexts(ids, sources if self.pairs else [])
            for number, scored in zip(numbers, self._crew.call("score_texts", texts, starts)[0], strict=True):
                found[number] = scored
        return [scored for scored in found if scored]

    def _row(self, context: Ids, text: Ids) -> tuple[list[int], int, list[int]]:
        """Return what a decoder reads of a context and a text, the index at which the text begins there, and what an
        encoder reads."""
        most = self.model.length + 1  # the last token is only predicted
        if self.pairs:
            read = self.model.source_length or self.model.length
            return [self.start, *text][:most], 1, [*context[-(read - 1) :], self.end]
        ids = [*(context or [self.begin]), *text]
        ids = ids[-most:]
        return ids, max(1, len(ids) - len(text)), []

    def score_whole(self, ids: Ids) -> float:
        """Return the log-probability of a text of any length, in nats: each token once, after what begins a text or the
        tokens before it in its window, as long as the model."""
        most, whole = self.model.length, [self.begin, *ids]
        windows = []
        for first in range(0, len(ids), most):
            stop = min(first + most, len(ids))
            begin = max(0, stop - most)  # the last window is full
            windows.append((whole[begin : first + 1], whole[first + 1 : stop + 1]))
        return sum(scored.log_probability for scored in self.score(windows))

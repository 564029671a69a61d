"""Beam search: which continuations of each text are kept, step by step, and which is the best in the end."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from platform.parallel.kernels.statistics import widened
from platform.train.protocol.asked import Choice, Written


def candidates(logits: Tensor, how: Choice) -> Tensor:
    """Return the likeliest next tokens of every beam, for a beam search over generated texts: fp64 [rows, count, 2],
    log-probability and token id, from `logits` [rows, vocab]. The count is twice the number of beams, so that enough
    remain where some of these tokens end a text."""
    p = torch.log_softmax(widened(logits), -1)[:, : how.vocab].double()
    found = p.topk(min(2 * how.beams, how.vocab), -1)
    return torch.stack((found.values, found.indices.double()), -1)


class Beams:
    """Beams of one text: `ids` and `totals`, the continuations that are kept and their log-probabilities in nats, and
    the ones that have `ended`, as (score, ids, log-probability)."""

    def __init__(self, how: Choice, ends: Sequence[int]):
        """Start the beam search for a text's continuation, with how.beams empty beams. `ends`: ids that end a text."""
        self._how, self._ends = how, frozenset(ends)
        self.ids: list[list[int]] = [[] for _ in range(how.beams)]
        self.totals = [0.0] + [-inf] * (how.beams - 1)  # all are the same text at first
        self.ended: list[tuple[float, list[int], float]] = []
        self.done = False

    def step(self, found: Tensor) -> list[int]:
        """Extend the beams of the text by one token: keep the likeliest continuations among each beam's next tokens,
        `found` [beams, count, 2] from `candidates`. Return, for every kept beam, the index of the beam that it
        continues."""
        count = found.shape[1]
        values = found[:, :, 0] + torch.tensor(self.totals, dtype=torch.float64).unsqueeze(-1)
        order = values.flatten().argsort(descending=True, stable=True)[: 2 * self._how.beams].tolist()
        kept: list[tuple[int, list[int], float]] = []
        for rank, place in enumerate(order):
            beam, column = divmod(place, count)
            total, token = float(values[beam, column]), int(found[beam, column, 1])
            if token in self._ends:
                if rank < self._how.beams and total > -inf:
                    self._end(self.ids[beam], total, 1)
            elif len(kept) < self._how.beams:
                kept.append((beam, [*self.ids[beam], token], total))
        while len(kept) < self._how.beams:  # a vocabulary smaller than the beams
            kept.append((0, [*self.ids[0], 0], -inf))
        self.ids, self.totals = [ids for _, ids, _ in kept], [total for *_, total in kept]
        best = self._score(self.totals[0], len(self.ids[0]))
        self.done = len(self.ended) >= self._how.beams and best <= self.ended[-1][0]
        return [beam for beam, *_ in kept]

    def _end(self, ids: list[int], total: float, more: int) -> None:
        """Add a text's continuation to the ended beams and keep the best; `more`: 1 if an end token is not in `ids`."""
        self.ended.append((self._score(total, len(ids) + more), ids, total))
        self.ended = sorted(self.ended, key=lambda found: -found[0])[: self._how.beams]

    def _score(self, total: float, length: int) -> float:
        """Return a beam's score: its log-probability `total` / length^length_penalty, `length` in generated tokens."""
        return float(total / length**self._how.length_penalty)

    def best(self) -> Written:
        """Return the beam search's best continuation of the text: ended or, if the search was cut off, unended."""
        ended = {id(ids) for _, ids, _ in self.ended}
        if not self.done:
            for ids, total in zip(self.ids, self.totals, strict=True):
                self._end(ids, total, 0)
        _, ids, total = self.ended[0]
        return Written(ids, id(ids) in ended, total)

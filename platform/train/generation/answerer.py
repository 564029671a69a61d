"""Answerer: a worker that also continues and scores texts for the driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from platform.plan.core.passes import pass_groups
from platform.train.generation.generator import Generator
from platform.train.generation.rank_pass import answering_model
from platform.train.protocol.asked import AskedTexts, Choice, Scored, Written
from platform.train.worker import Worker


class Answerer(Worker):
    """Worker whose model answers, after a training step or without any: `form` and `build` of `Worker` come first, and
    its weights, then these calls, each on all ranks. As in evaluations, the weights are the trained ones, or their
    averages, as eval.averaged says."""

    _generator: Generator | None = None

    def _groups(self) -> list[tuple[str, ...]]:
        found = {*super()._groups(), *pass_groups(self.plan, answering_model(self.config))}
        return sorted(found, key=lambda axes: (len(axes), axes))

    @contextmanager
    def _answering(self) -> Iterator[Generator]:
        """Yield the generator, which answers by the weights to be evaluated. The clock's notes of this time are
        dropped: they belong to no step, and an evaluation may have very many passes."""
        assert self.communicator
        if self._generator is None:
            self._generator = Generator(self.config, self.plan, self.communicator, self.trainer.weights)
        with self.trainer.evaluated():
            yield self._generator
        self.trainer.clock.read()

    def continue_texts(self, texts: AskedTexts, tokens: int, how: Choice, ends: list[int]) -> list[Written]:
        """Continue texts; see `Generator.write`."""
        with self._answering() as generator:
            return generator.write(texts, tokens, how, ends)

    def score_texts(self, texts: AskedTexts, starts: list[int]) -> list[Scored]:
        """Score texts; see `Generator.score`."""
        with self._answering() as generator:
            return generator.score(texts, starts)

    def measure_loss(self, split: str, samples: int) -> float:
        """Return the mean loss per token over the first samples of a split of the data; see `Trainer.mean_loss`."""
        loss: float = self.trainer.mean_loss(split, samples)
        return loss

    def leave(self) -> None:
        self._generator = None
        super().leave()

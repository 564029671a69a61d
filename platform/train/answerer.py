"""Answerer: a worker that does not train, but continues and scores texts for the driver."""

from __future__ import annotations

from platform.plan.core.passes import pass_groups
from platform.train.answers.generator import Generator
from platform.train.answers.rank_pass import answering_model
from platform.train.protocol.asked import AskedTexts, Choice, Scored, Written
from platform.train.worker import Worker


class Answerer(Worker):
    """Worker whose model answers: `form`, `build` and `begin` of `Worker` come first, then these calls, each on all
    ranks."""

    _generator: Generator | None = None

    def _groups(self) -> list[tuple[str, ...]]:
        found = {*super()._groups(), *pass_groups(self.plan, answering_model(self.config))}
        return sorted(found, key=lambda axes: (len(axes), axes))

    @property
    def _made(self) -> Generator:
        assert self.communicator
        if self._generator is None:
            self._generator = Generator(self.config, self.plan, self.communicator, self.trainer.weights)
        return self._generator

    def continue_texts(self, texts: AskedTexts, tokens: int, how: Choice, ends: list[int]) -> list[Written]:
        """Continue texts; see `Generator.write`."""
        return self._made.write(texts, tokens, how, ends)

    def score_texts(self, texts: AskedTexts, starts: list[int]) -> list[Scored]:
        """Score texts; see `Generator.score`."""
        return self._made.score(texts, starts)

    def measure_loss(self, split: str, samples: int) -> float:
        """Return the mean loss per token over the first samples of a split of the data; see `Trainer.mean_loss`."""
        loss: float = self.trainer.mean_loss(split, samples)
        return loss

    def leave(self) -> None:
        self._generator = None
        super().leave()

"""Evaluations of a run: losses on held-out data, texts that the model makes of prompts, scores by tasks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Any

from platform.cluster.control.forming.context import RunContext
from platform.cluster.crew.base.crew import Crew
from platform.cluster.generation.asked_model import Ask, AskedModel, as_prompt
from platform.cluster.generation.run_tasks import NotScored
from platform.monitor.records import events
from platform.plan.core.passes import rows_at_once
from platform.plan.core.plan import Plan
from platform.plan.language.layout import padded
from platform.plan.language.numbers import count_of
from platform.train.protocol.asked import Choice

PROMPT = "def "  # that the sample at the end of a run continues
TEMPERATURE = 0.8  # of the texts that a run shows, which `platform.generate` gives too, with the run's seed


class Evaluations:
    """Evaluates the model of a run between training steps, as the keys of eval say."""

    def __init__(self, run: RunContext):
        """Prepare the evaluations of a run between training steps: held-out losses, texts, and scores by tasks."""
        self._config, self._corpus = run.config, run.corpus
        self._journal, self._monitor, self._tasks, self._signals = run.journal, run.monitor, run.tasks, run.signals

    def take(
        self, crew: Crew, plan: Plan, step: int, within: float
    ) -> tuple[dict[str, float], dict[str, float] | None]:
        """Evaluate the model of a crew that is seated under `plan`, after a training step; return its losses by source
        of the data, "" being all, and its scores by TASK/METRIC, None if there are none. `within`: seconds without
        progress, as in `Crew.call`."""
        losses, asked = self._losses(crew, within), self._config.eval
        texts = self._texts(crew, plan, asked.prompts, asked.prompt_tokens, within)
        for prompt, text in zip(asked.prompts, texts, strict=True):
            self._journal.write(events.Sampled(step=step, prompt=prompt, text=text))
            self._monitor.say(f"after step {step}: {text!r}")
        return losses, self._scores(crew, plan, step, within)

    def _losses(self, crew: Crew, within: float) -> dict[str, float]:
        """Return the run's validation losses, source of data -> mean per token; "" is the mean of all, by share."""
        held, count = self._corpus.validations, self._config.eval.batches * self._config.train.global_batch
        by_split = crew.call("evaluate", {split: count for split, _ in held.values()}, within=within)[0]
        found = {name: by_split[split] for name, (split, _) in held.items()}
        mean = sum(found[name] * share for name, (_, share) in held.items()) / sum(share for _, share in held.values())
        return {**found, "": mean}

    def show_sample(self, crew: Crew, plan: Plan, step: int) -> None:
        """Print and record a text of monitor.sample tokens that the crew's model writes at a step; none if it is 0."""
        if tokens := self._config.monitor.sample:
            [text] = self._texts(crew, plan, [PROMPT], tokens)
            self._journal.write(events.Sampled(step=step, prompt=PROMPT, text=text))
            self._monitor.say(f"a sample of {count_of(tokens, 'token')}:\n{text}")

    def _texts(self, crew: Crew, plan: Plan, prompts: Sequence[str], tokens: int, within: float = inf) -> list[str]:
        """Return each prompt with the run's model's continuation of `tokens` tokens, or an encoder-decoder's alone."""
        config, corpus = self._config, self._corpus
        asked = self._asked(partial(crew.call, within=within), plan)
        ids = [corpus.encode(prompt) for prompt in prompts]
        read = [as_prompt(some, config.model, corpus.special) for some in ids]
        written = dict(asked.write(read, tokens, Choice(corpus.vocab, TEMPERATURE, seed=config.seed), []))
        return [corpus.decode([*([] if asked.pairs else some), *written[n].ids]) for n, some in enumerate(ids)]

    def _asked(self, ask: Ask, plan: Plan) -> AskedModel:
        """Wrap the run's model, asked by `ask`, a call of the crew, to write and score texts in batches."""
        batch = padded(plan.sizes["batch"], rows_at_once(plan.scheme, plan.mesh))
        return AskedModel(ask, self._config.model, self._corpus.vocabulary, batch, self._corpus.special)

    def _scores(self, crew: Crew, plan: Plan, step: int, within: float) -> dict[str, float] | None:
        """Return the scores of the model by eval.tasks after a training step, TASK/METRIC -> value; None without tasks,
        or if a task fails or the run is asked to stop meanwhile, as there may be no time for the rest: that is
        journalled. `within`: seconds without progress, as in `Crew.call`."""
        if not self._tasks:
            return None

        def ask(method: str, *args: Any) -> list[Any]:
            """Call all ranks for one batch of the evaluation's tasks; raises NotScored if the run is to stop."""
            if self._signals.requested:
                raise NotScored("the run is to stop")
            return crew.call(method, *args, within=within)

        try:
            return self._tasks.scores(self._asked(ask, plan))
        except NotScored as missing:
            self._journal.write(events.NotScored(step=step, reason=str(missing)))
            self._monitor.say(f"after step {step}: eval.tasks gives no scores: {missing}")
            return None

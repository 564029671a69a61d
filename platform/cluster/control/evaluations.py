"""Evaluations of a run: losses on held-out data, texts that the model makes of prompts, scores by tasks."""

from __future__ import annotations

from typing import Any

from platform.cluster.generation.run_tasks import NotScored
from platform.cluster.control.forming.context import RunContext
from platform.cluster.crew.base.crew import Crew
from platform.monitor.records import events
from platform.plan.core.plan import Plan


class Evaluations:
    """Evaluates the model of a run between training steps, as the keys of eval say."""

    def __init__(self, run: RunContext):
        self._config, self._journal, self._monitor = run.config.eval, run.journal, run.monitor
        self._tasks, self._signals = run.tasks, run.signals

    def take(
        self, crew: Crew, plan: Plan, step: int, within: float
    ) -> tuple[dict[str, float], dict[str, float] | None]:
        """Evaluate the model of a crew that is seated under `plan`, after a training step; return its losses by source
        of the data, "" being all, and its scores by TASK/METRIC, None if there are none. `within`: seconds without
        progress, as in `Crew.call`."""
        losses: dict[str, float] = crew.call("evaluate", within=within)[0]
        for prompt in self._config.prompts:
            text = crew.call("sample", self._config.prompt_tokens, prompt, within=within)[0]
            self._journal.write(events.Sampled(step=step, prompt=prompt, text=text))
            self._monitor.say(f"after step {step}: {text!r}")
        return losses, self._scores(crew, plan, step, within)

    def _scores(self, crew: Crew, plan: Plan, step: int, within: float) -> dict[str, float] | None:
        """Score the model by eval.tasks. A stop of the run ends this without scores, as there may be no time for the
        rest."""
        if not self._tasks:
            return None

        def ask(method: str, *args: Any) -> list[Any]:
            if self._signals.requested:
                raise NotScored("the run is to stop")
            return crew.call(method, *args, within=within)

        try:
            return self._tasks.scores(ask, plan)
        except NotScored as missing:
            self._journal.write(events.NotScored(step=step, reason=str(missing)))
            self._monitor.say(f"after step {step}: eval.tasks gives no scores: {missing}")
            return None

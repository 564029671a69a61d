"""Tasks of the Language Model Evaluation Harness (lm-eval), asked of a trained model under any plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from platform.answers.asked_model import AskedModel
from platform.config.fields import ConfigError, closest, violation
from platform.train.protocol.asked import Choice

WRITTEN = 256  # tokens of an answer, where a task does not say


class HarnessModel(TemplateLM):
    """Model as lm-eval asks it: requests are answered in batches by `asked`, which has a tokenizer."""

    def __init__(self, asked: AskedModel):
        super().__init__()
        assert asked.vocabulary
        self._asked, self._vocabulary = asked, asked.vocabulary
        self.backend = "seq2seq" if asked.pairs else "causal"

    @property
    def eot_token_id(self) -> int:
        return self._asked.end

    @property
    def prefix_token_id(self) -> int:
        return self._asked.begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text, behind what begins a document unless `add_special_tokens` is False."""
        begins = add_special_tokens is not False and not self._asked.pairs
        return [*([self._asked.begin] if begins else []), *self._vocabulary.encode(string)]

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        scored = self._asked.score([(context, text) for _, context, text in requests])
        return [(found.log_probability, found.greedy) for found in scored]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, whatever its length."""
        return [self._asked.score_whole(self.tok_encode(r.args[0], add_special_tokens=False)) for r in requests]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each text, up to the first of the texts that its task says end it."""
        return [self._written(*r.args) for r in requests]

    def _written(self, text: str, options: dict[str, Any]) -> str:
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        most = self._asked.model.length
        tokens = max(1, min(int(options.get("max_gen_toks") or WRITTEN), most - 1))
        drawn = bool(options.get("do_sample")) or float(options.get("temperature") or 0) > 0
        how = Choice(
            self._vocabulary.size,
            float(options.get("temperature") or 1) if drawn else 0.0,
            int(options.get("top_k") or 0),
            float(options.get("top_p") or 1),
        )
        room = (self._asked.model.source_length or most) - 1 if self._asked.pairs else most - tokens
        ids = [*self.tok_encode(text)[-room:], *([self._asked.end] if self._asked.pairs else [])]
        [(_, found)] = self._asked.write([ids], tokens, how, [self._asked.end])
        answer = self._vocabulary.decode(found.ids)
        return answer[: min((answer.index(stop) for stop in stops if stop and stop in answer), default=len(answer))]


def run_tasks(
    asked: AskedModel, names: Sequence[str], include: str = "", limit: int = 0, shots: int | None = None
) -> dict[str, Any]:
    """Run the tasks of lm-eval called `names` on a model and return their results by task: metric -> value. `include`:
    a folder of the user's own tasks; `limit`: the most documents of each, 0: all; `shots`: examples in front of each,
    None: as the task says. Raises ConfigError for a name that is unknown."""
    manager = TaskManager(include_path=include or None)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise ConfigError([violation("--tasks", n, "unknown", closest(n, manager.all_tasks)[:3]) for n in unknown])
    found = simple_evaluate(
        HarnessModel(asked),
        tasks=list(names),
        num_fewshot=shots,
        limit=limit or None,
        bootstrap_iters=0,
        log_samples=False,
        task_manager=manager,
    )
    return {name: _numbers(values) for name, values in (found or {})["results"].items()}


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return the numbers among the results of a task."""
    return {
        name.partition(",")[0]: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and "stderr" not in name
    }

"""Tasks of the Language Model Evaluation Harness (lm-eval), asked of a model under any plan."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from platform.boundary.documents import printable_line
from platform.boundary.refusals import closest_values, format_violation, refuse_all
from platform.cluster.asked_model import AskedModel
from platform.data.data_files import replace_surrogates
from platform.train.replies import Choice

WRITTEN = 256  # tokens of an answer, where a task does not say
ASKED = ("loglikelihood", "loglikelihood_rolling", "generate_until")  # requests of tasks that a HarnessModel answers


class Question(NamedTuple):
    """Text to be continued, as ids, by up to `tokens` tokens, and the texts that end its answer."""

    ids: list[int]
    how: Choice
    tokens: int
    stops: list[str]


class HarnessModel(TemplateLM):
    """Model as lm-eval asks it: requests are answered in batches by `asked`, which has a tokenizer."""

    def __init__(self, asked: AskedModel):
        """Wrap a model that has a tokenizer for lm-eval: as causal or, if it has an encoder, as seq2seq."""
        super().__init__()
        assert asked.vocabulary
        self._asked, self._vocabulary = asked, asked.vocabulary
        self.backend = "seq2seq" if asked.pairs else "causal"

    @property
    def eot_token_id(self) -> int:
        """Return the id of the token that ends a text, for lm-eval."""
        return self._asked.end

    @property
    def prefix_token_id(self) -> int:
        """Return the id of the token that begins a text, for lm-eval."""
        return self._asked.begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return a text's token ids for lm-eval, behind the first one of a document unless it asks for none."""
        begins = add_special_tokens is not False and not self._asked.pairs
        return [*([self._asked.begin] if begins else []), *self._vocabulary.encode(replace_surrogates(string))]

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation that lm-eval asks about, and if it is the likeliest."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, as token ids, for lm-eval, and if it is the likeliest."""
        scores = self._asked.score_continuations([(context, text) for _, context, text in requests])
        return [(score.log_probability, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the model's log-probability of each text of an lm-eval task, of any length."""
        return self._asked.score_full_texts([self.tok_encode(r.args[0], add_special_tokens=False) for r in requests])

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return the model's continuation of each text of an lm-eval task, up to the first of the task's stop texts."""
        questions = [self._build_question(*r.args) for r in requests]
        numbers_by_rule: dict[tuple[Choice, int], list[int]] = {}
        for number in sorted(range(len(questions)), key=lambda n: -len(questions[n].ids)):
            numbers_by_rule.setdefault((questions[number].how, questions[number].tokens), []).append(number)
        answers = [""] * len(questions)
        for (how, tokens), numbers in numbers_by_rule.items():
            prompts = [questions[n].ids for n in numbers]
            for index, reply in self._asked.continue_prompts(prompts, tokens, how, [self._asked.end]):
                number = numbers[index]
                answers[number] = _cut_answer(self._vocabulary.decode(reply.ids), questions[number].stops)
        return answers

    def _build_question(self, text: str, options: dict[str, Any]) -> Question:
        """Return the prompt, and the rules of its answer, for a text that an lm-eval task wants continued: its ids, and
        the rule of choice, number of tokens and ends of an answer, from the task's `options`."""
        stops = options.get("until") or []
        most = self._asked.model.length
        tokens = max(1, min(int(options.get("max_gen_toks") or WRITTEN), most - 1))
        drawn = bool(options.get("do_sample")) or float(options.get("temperature") or 0) > 0
        temperature = float(options.get("temperature") or 1) if drawn else 0.0
        limits = int(options.get("top_k") or 0), float(options.get("top_p") or 1)
        how = Choice(self._vocabulary.size, temperature, *limits)
        room = (self._asked.model.source_length or most) - 1 if self._asked.pairs else most - tokens
        ids = [*self.tok_encode(text)[-room:], *([self._asked.end] if self._asked.pairs else [])]
        return Question(ids, how, tokens, [stops] if isinstance(stops, str) else stops)


def _cut_answer(answer: str, stops: Sequence[str]) -> str:
    """Return a model's answer to an lm-eval task, up to the first of the texts `stops` that end it."""
    return answer[: min((answer.index(stop) for stop in stops if stop and stop in answer), default=len(answer))]


class HarnessTasks:
    """Tasks of lm-eval called `names`, or in groups of these names, with their documents. `folder`: folder of the
    user's own tasks; `shots`: examples in front of each document, None: as the task says. Raises ConfigError, naming
    `key`, for tasks that are unknown, cannot be read, or make requests that are not answered here."""

    def __init__(self, names: Sequence[str], folder: str = "", shots: int | None = None, key: str = "--tasks"):
        """Load the lm-eval tasks or groups called `names`. `folder`: folder of the user's own tasks; `shots`: examples
        in front of each document, None: as the task says; `key`: the setting or option that a ConfigError names."""
        self._names = list(names)
        self._loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
        with _fix_random_seeds():
            manager = _open_task_manager(set(names), folder)
            lines = [line for name in names if (line := self._load_or_refuse_tasks(manager, name, shots, key))]
        refuse_all(lines)

    def _load_or_refuse_tasks(self, manager: TaskManager, name: str, shots: int | None, key: str) -> str:
        """Load the lm-eval tasks called `name`; return "", or the line that refuses them, which names `key`."""
        if name not in manager.all_tasks:
            return format_violation(key, name, "unknown", closest_values(name, manager.all_tasks)[:3])
        try:
            loaded = manager.load([name])
            for task in loaded["tasks"].values():
                if shots is not None and task.get_config("num_fewshot") != 0:  # a task that says 0 means it
                    task.set_config(key="num_fewshot", value=shots)
                elif task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=0)
                task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
                if why := _why_unsupported(task):
                    return format_violation(key, name, why)
        except Exception as error:  # of the task's own code, its data, or the network
            reason = printable_line(f"{type(error).__name__}: {error}")
            return format_violation(key, name, f"cannot be read: {reason}")
        for kind, entries in self._loaded.items():
            entries.update(loaded.get(kind) or {})
        return ""

    def score_model(self, asked: AskedModel, limit: int = 0) -> dict[str, dict[str, float]]:
        """Return the scores of a trained model by lm-eval task (the named ones first): metric -> value. `limit`: the
        most documents of each task, 0: all. Raises any error of `asked` or of a task."""
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
        with _fix_random_seeds():
            model, options = HarnessModel(asked), {"bootstrap_iters": 0, "log_samples": False}
            task_results = evaluate(model, self._loaded, limit=limit or None, **options)["results"]
        order = dict.fromkeys([*self._names, *task_results])
        return {name: _numeric_metrics(task_results[name]) for name in order if name in task_results}


def _open_task_manager(names: set[str], folder: str) -> TaskManager:
    """Return lm-eval's TaskManager of the user's `folder` alone if that has all tasks `names`, else of both."""
    user_manager = TaskManager(include_path=folder, include_defaults=False) if folder else None
    if user_manager and names <= {*user_manager.all_subtasks}:
        return user_manager
    return TaskManager(include_path=folder or None)


def _why_unsupported(task: Any) -> str:
    """Return why an lm-eval task cannot be scored on a model here, such as an unsupported kind of request; "" if it
    can."""
    if getattr(task, "UNSAFE_CODE", False):
        return "runs code that the model writes, which is not done here"
    if getattr(task, "MULTIMODAL", False):
        return "asks about more than texts"
    task.build_all_requests(limit=1)
    others = sorted({r.request_type for r in task.instances} - {*ASKED})
    return f"asks for {others[0]}, which is not answered here" if others else ""


def _numeric_metrics(values: dict[str, Any]) -> dict[str, float]:
    """Return the numbers among the results of an lm-eval task by METRIC, or METRIC.FILTER if answers were filtered.
    lm-eval has METRIC,FILTER, and keys without a comma that are no metrics."""
    numbers = {}
    for key, value in values.items():
        metric, comma, name = key.partition(",")
        if comma and isinstance(value, int | float) and not metric.endswith("_stderr"):
            numbers[metric if name == "none" else f"{metric}.{name}"] = float(value)
    return numbers


@contextmanager
def _fix_random_seeds() -> Iterator[None]:
    """Set the process's random numbers as lm-eval's own command does, and restore them after the context."""
    before = random.getstate(), np.random.get_state()
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])

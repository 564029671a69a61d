"""Tasks of lm-eval during training (eval.tasks): read before anything starts, asked of the workers at evaluations."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from platform.boundary.documents import printable_line
from platform.boundary.refusals import ConfigError, format_violation
from platform.cluster.asked_model import AskedModel
from platform.cluster.crew.failures import WorkerFailed
from platform.config.fields import Config
from platform.data.tokenizer import Vocabulary

if TYPE_CHECKING:
    from platform.cluster.harness_tasks import HarnessTasks

KEY = "eval.tasks"


class NotScored(Exception):
    """Signals that an evaluation gives no scores, and why, in a line; the run goes on."""


def violations_of_tasks(config: Config) -> Iterator[str]:
    """Yield a refusal line if eval.tasks needs lm_eval, not installed, one if eval.task_folder does not exist."""
    e = config.eval
    if e.tasks and find_spec("lm_eval") is None:
        yield f"{KEY}: needs the package lm_eval: pip install 'elastic-platform[eval]'"
    if e.task_folder and not os.path.isdir(e.task_folder):
        yield format_violation("eval.task_folder", e.task_folder, "there is no such folder")


def open_tasks(config: Config) -> RunTasks | None:
    """Load the lm-eval tasks of a run (eval.tasks), None without any. Raises ConfigError if that fails."""
    if not config.eval.tasks:
        return None
    os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's progress bars would run into the console's lines
    from platform.cluster.harness_tasks import HarnessTasks

    return RunTasks(config, HarnessTasks(config.eval.tasks, config.eval.task_folder, key=KEY))


class RunTasks:
    """Tasks that a run scores its model by."""

    def __init__(self, config: Config, tasks: HarnessTasks):
        """Prepare to score a run's model by lm-eval's `tasks`, on at most eval.task_samples documents of each."""
        self._limit, self._tasks, self._named = config.eval.task_samples, tasks, config.eval.tasks[0]

    def check_vocabulary(self, vocabulary: Vocabulary | None) -> None:
        """Raise ConfigError if the run's data has no tokenizer, which the lm-eval tasks of eval.tasks need."""
        if vocabulary is None:
            raise ConfigError(
                format_violation(KEY, self._named, "tasks are texts, and the data has no tokenizer", [[]])
            )

    def score_model(self, asked: AskedModel) -> dict[str, float]:
        """Return the scores of a model by eval.tasks, TASK/METRIC -> value. Raises WorkerFailed; NotScored if a task
        fails."""
        try:
            task_metrics = self._tasks.score_model(asked, self._limit)
        except (WorkerFailed, NotScored):
            raise
        except Exception as error:  # of a task's own code: no reason to end a run of weeks
            raise NotScored(printable_line(f"{type(error).__name__}: {error}")) from error
        return {f"{task}/{metric}": value for task, values in task_metrics.items() for metric, value in values.items()}

"""The platform from Python: compose a configuration, look at its plan, run it, and resume it.

    from platform.api import Callbacks, compose, plan, resume, run

    config = compose("train.steps=20", "cluster=processes", experiment="gpt_quick")
    print(plan(config).mesh)
    result = run(config, Callbacks(on_step=lambda row: print(row.step, row.loss)))
    print(result.outcome, result.loss, result.directory)

Overrides are the arguments of `python -m platform.launch`; a run from Python and one by command are the same run. Code
of your own joins by the `register_*` functions: call them in a module that is named in `extend=[my_module]`, which the
workers import as well. Its building blocks (Spec, Parameter, Action, Causal, ...) are exported here too: their own
modules may move. A mistake raises ConfigError, a ValueError, with one line per violation, before any process starts.
`examples/` shows all of it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platform.boundary.redaction import REDACTED, redact_output, register_url_secrets
from platform.boundary.refusals import ConfigError, format_violation, refuse_all, refuse_failures
from platform.boundary.schema import Malformed
from platform.cluster import run_directory
from platform.cluster.callbacks import CallbackGuard, Callbacks
from platform.cluster.shown_commands import Command
from platform.config.composition import CONF
from platform.config.fields import Config, Model, describe_value, flatten_config, violations_of_types
from platform.config.key import WORKERS, key
from platform.config.validation import violations_of_configuration
from platform.data.objectives import Causal, register_objective
from platform.data.text_sources import register_documents, register_source
from platform.launch import DONE, STOPPED, prepare_plan
from platform.launch import compose_config as compose_arguments
from platform.model import register_model
from platform.model.attention import TransformerBlock
from platform.model.layers import StackSpecs, dim_sizes
from platform.model.losses import register_loss
from platform.monitor.events import JournalEvent
from platform.monitor.metrics import MetricsLog, MetricsRow
from platform.optimizer.learning_rate import register_schedule
from platform.optimizer.optimizers import register_optimizer
from platform.plan.generators import generate
from platform.plan.model_types import Parameter, Spec
from platform.plan.plan import Plan
from platform.plan.plan_summary import describe
from platform.plan.schedule import Action, Kind, Rows, ScheduleError, table
from platform.plan.simulate import simulate
from platform.plan.step_collectives import communication, counts_at, process_groups
from platform.predict.choose_schedule import register_pipeline
from platform.predict.make_plan import complete_violations, make_plan
from platform.weights.config_keys import (
    PLAIN,
    DropoutRule,
    Family,
    Free,
    FunctionRule,
    Renamed,
    RotaryRule,
    TensorRow,
    Words,
    module_rows,
)
from platform.weights.families import register_family

if TYPE_CHECKING:
    from platform.runtime.communicator import Communicator, SingleRank
    from platform.runtime.parallel_ops import ParallelOps, initialise
    from platform.runtime.process_groups import ProcessGroups
    from platform.train.rank_model import build_rank
    from platform.train.stage_passes import place, stretches
    from platform.weights.tensor_names import list_stored_tensors, translate_config_json
else:
    _EXECUTING = {
        "platform.runtime.communicator": ("Communicator", "SingleRank"),
        "platform.runtime.parallel_ops": ("ParallelOps", "initialise"),
        "platform.runtime.process_groups": ("ProcessGroups",),
        "platform.train.rank_model": ("build_rank",),
        "platform.train.stage_passes": ("place", "stretches"),
        "platform.weights.tensor_names": ("list_stored_tensors", "translate_config_json"),
    }

    def __getattr__(name: str) -> Any:
        """Import what executes a plan, and with it torch, when a name of it is asked for."""
        for module, names in _EXECUTING.items():
            if name in names:
                return getattr(import_module(module), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "FILES",
    "PLAIN",
    "Action",
    "Callbacks",
    "Causal",
    "Communicator",
    "Config",
    "ConfigError",
    "DropoutRule",
    "Family",
    "Free",
    "FunctionRule",
    "Kind",
    "MetricsLog",
    "Model",
    "ParallelOps",
    "Parameter",
    "Plan",
    "ProcessGroups",
    "Renamed",
    "Result",
    "RotaryRule",
    "Rows",
    "ScheduleError",
    "SingleRank",
    "Spec",
    "StackSpecs",
    "TensorRow",
    "TransformerBlock",
    "Words",
    "build_rank",
    "communication",
    "compose",
    "counts_at",
    "describe",
    "dim_sizes",
    "generate",
    "initialise",
    "key",
    "list_stored_tensors",
    "module_rows",
    "place",
    "plan",
    "process_groups",
    "register_documents",
    "register_family",
    "register_loss",
    "register_model",
    "register_objective",
    "register_optimizer",
    "register_pipeline",
    "register_schedule",
    "register_source",
    "resume",
    "run",
    "simulate",
    "stretches",
    "table",
    "translate_config_json",
]

FILES = CONF.parent  # the folder of conf/, jobs/ (Kubernetes, Slurm) and dashboards/: the checkout, or the package


@dataclass(frozen=True)
class Result:
    """Outcome of a run that Python code started. `metrics` and `events` cover the whole run, earlier drivers
    included."""

    status: int  # exit status of the same command: 0, 1 or 75 (docs/run-directory.md)
    outcome: str  # done | failed | stopped (by a signal or its time limit: `resume` continues it)
    directory: Path  # the run directory
    metrics: list[MetricsRow]  # of metrics.jsonl, one per committed step
    events: list[JournalEvent]  # of journal.jsonl

    @property
    def loss(self) -> float | None:
        """Return the training loss that this Result of `platform.api` ends with, None if no step was done."""
        return self.metrics[-1].loss if self.metrics else None


def compose(*overrides: str, experiment: str = "", config_dir: str | os.PathLike[str] | None = None) -> Config:
    """Compose the configuration of `+experiment=EXPERIMENT OVERRIDE ...`, checked; overrides are "train.steps=4",
    "tensor=1d". `config_dir`: a folder of your own files, laid out as conf/. The values of the result may be changed;
    `plan` and `run` check them again.

    Raises ConfigError.
    """
    _check_texts("overrides", overrides)
    _check_texts("experiment", [experiment])
    chosen = [f"+experiment={experiment}"] if experiment else []
    folder = None if config_dir is None else str(_read_path_argument("config_dir", config_dir))
    return compose_arguments([*chosen, *overrides], folder)


def plan(config: Config, workers: int | None = None) -> Plan:
    """Make the plan of a run without starting anything, as `python -m platform.plan` prints it: which block of each
    tensor lies on which rank, and all that a step communicates. `workers`: their number, for parallel.data=-1. Raises
    ConfigError."""
    lines = violations_of_configuration(config)
    if workers is not None and not (type(workers) is int and 1 <= workers <= WORKERS):
        constraint = f"must be an integer from 1 to {WORKERS}"
        lines.append(format_violation("workers", describe_value(workers), constraint, [1]))
    refuse_all(complete_violations(config, lines) if lines else [])
    if config.plan.search:
        from platform.predict.search import choose_plan

        choose_plan(config := deepcopy(config), workers or 1)
    return make_plan(config, workers)


def run(config: Config, callbacks: Callbacks | None = None) -> Result:
    """Train to the last step, or go on where the run in the run directory of `config` stopped, and return its Result.

    Prints what the command prints. Signals stop it as they stop the command, so it must be called from the main thread.
    After an exception in a callback the run ends at the next safe moment, saved as after a signal, and the exception is
    raised here. Raises ConfigError for a run that cannot start.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("run() handles signals: call it from the main thread")
    lines = violations_of_configuration(config) if violations_of_types(config) else []
    if not isinstance(callbacks, Callbacks | None):
        constraint = "must be Callbacks(on_step=..., on_event=...)"
        lines.append(format_violation("callbacks", describe_value(callbacks), constraint))
    refuse_all(lines)
    config, guard = deepcopy(config), CallbackGuard(callbacks or Callbacks())
    register_url_secrets(config.to_dict())
    with redact_output(sys.stdout, sys.stderr):
        job_plan, lines = prepare_plan(config, violations_of_configuration(config))
        if lines or not job_plan:
            raise ConfigError(lines)
        from platform.cluster import driver

        status = driver.drive_run(config, job_plan, command=_FromPython([config.run.dir]), guard=guard)
    if guard.error:
        guard.error.add_note(f"raised in a callback of the run in {config.run.dir}; resume() continues it")
        raise guard.error
    return _read_result(status, Path(config.run.dir))


def resume(run_dir: str | os.PathLike[str], *overrides: str, callbacks: Callbacks | None = None) -> Result:
    """Continue the run in `run_dir` from its newest checkpoint with the configuration that it had last, as `run` does;
    it may have been started by command. `overrides` change it: "train.stop_at=0", "tensor=1d", "tensor.axes.t=4".

    Raises ConfigError also for a directory that holds no run.
    """
    _check_texts("overrides", overrides)
    directory = _read_path_argument("run_dir", run_dir).absolute()
    return run(compose_arguments(overrides, stored=_read_stored_values(directory, overrides)), callbacks)


def _check_texts(argument_name: str, values: Sequence[Any]) -> None:
    """Raise ConfigError for arguments of the Python API that are no texts."""
    others = [value for value in values if type(value) is not str]
    refuse_all(format_violation(argument_name, describe_value(value), "must be text") for value in others)


def _read_path_argument(argument_name: str, argument: Any) -> Path:
    """Return an argument of the Python API as a path. Raises ConfigError if it is no path."""
    try:
        path = os.fspath(argument)
        legal = type(path) is str and 0 < len(os.fsencode(path)) and "\0" not in path
    except (TypeError, UnicodeEncodeError):  # half a surrogate pair
        legal = False
    if not legal:
        raise ConfigError(argument_name, describe_value(argument), "must be a path")
    return Path(argument)


def _read_stored_values(directory: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Read the configuration of the run in `directory`, to resume it with the arguments `overrides`. Raises ConfigError
    if there is no whole one, or if it has secrets, which are not stored, that `overrides` do not give again."""
    with refuse_failures("run.dir", directory, OSError, Malformed, why="its config.yaml cannot be read ({})"):
        config = run_directory.read_configuration(directory)
    if config is None:
        raise ConfigError("run.dir", directory, "holds no run", ["the run directory of an earlier run"])
    overridden_keys = {override.partition("=")[0].lstrip("+") for override in overrides}
    hidden = [key for key, value in flatten_config(config).items() if REDACTED in str(value)]
    reason = "a secret, which config.yaml does not hold: give it again"
    refuse_all(format_violation(key, REDACTED, reason) for key in hidden if key not in overridden_keys)
    config.run.dir, config.checkpoint.resume = str(directory), "auto"
    return config.to_dict()


def _read_result(status: int, directory: Path) -> Result:
    """Read the Result of the run in `directory`, whose driver returned the exit status `status`."""
    metrics = directory / run_directory.METRICS
    rows = MetricsLog.read_rows(metrics) if metrics.exists() else []
    return Result(
        status=status,
        outcome={DONE: "done", STOPPED: "stopped"}.get(status, "failed"),
        directory=directory,
        metrics=[_build_row(row) for row in rows],
        events=list(run_directory.read_journal(directory)),
    )


def _build_row(line_values: dict[str, Any]) -> MetricsRow:
    """Build a row of metrics for the Result of `platform.api` from a line of metrics.jsonl; a missing value is None."""
    values: dict[str, Any] = {key: line_values.get(key) for key in MetricsRow.__dataclass_fields__}
    return MetricsRow(**values)


class _FromPython(Command):
    """Start of a run from Python, in the place of a command line; its only argument is the run directory."""

    def _format_line(self, arguments: Iterable[str]) -> str:
        """Format the line of `platform.api` that resumes a run which Python code started, changed by `arguments`."""
        words = ", ".join(repr(argument) for argument in arguments if not argument.startswith("run.dir="))
        return f"from platform.api import resume; resume({words})"

"""The driver's single interface to console, metrics.jsonl and Weights & Biases."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from platform.config.fields import Config
from platform.monitor.console import Console
from platform.monitor.records.metrics import MetricsLog, MetricsRow
from platform.monitor.records.records import METRICS
from platform.monitor.wandb_log import WandbLog

OnStep = Callable[[MetricsRow], None]


class RunMonitor:
    """Sends a run's progress to metrics.jsonl, the console, W&B if configured, and the function `on_step`, called with
    each row."""

    def __init__(self, metrics: MetricsLog, console: Console, wandb: WandbLog | None, on_step: OnStep):
        self._metrics, self._console, self._wandb, self._on_step = metrics, console, wandb, on_step

    def step(self, row: MetricsRow) -> None:
        """Record a committed step's row in metrics.jsonl, and show it on the console, on W&B and to `on_step`."""
        self._metrics.write(row)
        self._console.step(row)
        self._to_wandb(lambda wandb: wandb.step(row))
        self._on_step(row)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the whole run's metrics.jsonl, one per step."""
        return MetricsLog.read(self._metrics.path)

    def say(self, text: str) -> None:
        """Print a line of text on the run's console."""
        self._console.say(text)

    def summary(self, values: dict[str, Any]) -> None:
        """Record numbers of the whole run by name, such as its goodput, on W&B; do nothing without W&B."""
        self._to_wandb(lambda wandb: wandb.summary(values))

    def close(self, status: int) -> None:
        """Close the metrics file, console and W&B of a run; `status` is the exit status that the launcher will
        return."""
        self._metrics.close()
        self._console.close()
        self._to_wandb(lambda wandb: wandb.close(status))

    def _to_wandb(self, action: Callable[[WandbLog], None]) -> None:
        """Perform `action` on the W&B log, if there is one; at its first error stop logging there and say so: the run
        goes on."""
        if self._wandb is None:
            return
        try:
            action(self._wandb)
        except Exception as error:  # a W&B failure must not end a run of weeks
            self._wandb = None
            self.say(f"W&B: stopped ({type(error).__name__}: {error}); {self._metrics.path} has every step")


def open_monitor(
    config: Config,
    run_dir: Path,
    *,
    total_steps: int,
    stream: TextIO | None = None,
    on_step: OnStep = lambda row: None,
) -> RunMonitor:
    """Open the monitor of a run that lives in the existing directory `run_dir` and ends after `total_steps` optimizer
    steps.

    `stream` (default: standard output) is refreshed in place if it is a terminal. `on_step` is called with each step's
    row of metrics after it was recorded. Says where W&B writes, if it does. Raises OSError if no file can be created in
    the directory.
    """
    console = Console(stream or sys.stdout, total_steps=total_steps, every=config.monitor.every)
    metrics = MetricsLog(run_dir / METRICS, console.say)
    wandb = WandbLog(config, run_dir) if config.monitor.kind == "wandb" else None
    if wandb:
        console.say(f"W&B: {wandb.where}")
    return RunMonitor(metrics, console, wandb, on_step)

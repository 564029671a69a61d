"""The driver's one door to everything that shows or records a run's progress."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from platform.config.fields import Config
from platform.monitor.console import Console
from platform.monitor.records.metrics import METRICS, MetricsLog
from platform.monitor.wandb_log import WandbLog


class Monitor:
    """Made by `open_monitor`."""

    def __init__(self, metrics: MetricsLog, console: Console, wandb: WandbLog | None):
        self._metrics, self._console, self._wandb = metrics, console, wandb

    def step(self, row: dict[str, Any]) -> None:
        """Records a committed step. `row` has the keys of METRICS (design.md, section 7); `val_loss` is optional."""
        assert not (unknown := row.keys() - METRICS.keys()), f"no name for {sorted(unknown)} in METRICS"
        self._metrics.append(row)
        self._console.step(row)
        self._to_wandb(lambda wandb: wandb.step(row))

    def say(self, text: str) -> None:
        """Tells the person in front of the terminal something."""
        self._console.say(text)

    def summary(self, values: dict[str, Any]) -> None:
        """Records what a run came to, such as its goodput."""
        self._to_wandb(lambda wandb: wandb.summary(values))

    def close(self, status: int) -> None:
        """Ends the recording; `status` is the exit status that the launcher will return."""
        self._metrics.close()
        self._console.close()
        self._to_wandb(lambda wandb: wandb.close(status))

    def _to_wandb(self, action: Callable[[WandbLog], None]) -> None:
        if self._wandb is None:
            return
        try:
            action(self._wandb)
        except Exception as error:  # its service process may die; weeks of training must not
            self._wandb = None
            self.say(f"W&B: stopped ({type(error).__name__}: {error}); {self._metrics.path} has every step")


def open_monitor(config: Config, run_dir: Path, *, total_steps: int, stream: TextIO | None = None) -> Monitor:
    """The monitor of a run in the existing directory `run_dir` that will end after `total_steps` updates.

    `stream` (default: standard output) is refreshed in place if it is a terminal. Says where W&B writes, if it does.
    Raises OSError where the directory takes no more files.
    """
    console = Console(stream or sys.stdout, total_steps=total_steps, every=config.monitor.every)
    metrics = MetricsLog(run_dir / "metrics.jsonl", console.say)
    wandb = WandbLog(config, run_dir) if config.monitor.kind == "wandb" else None
    if wandb:
        console.say(f"W&B: {wandb.where}")
    return Monitor(metrics, console, wandb)

"""The driver's single interface to console, metrics.jsonl, Prometheus and the processes that serve W&B and others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Protocol, TextIO

from platform.config.fields import Config
from platform.monitor.console import Console
from platform.monitor.prometheus import RayGauges
from platform.monitor.records.metrics import MetricsLog, MetricsRow, for_wandb
from platform.monitor.records.records import METRICS
from platform.monitor.sinks.services.sink import RESUMABLE
from platform.monitor.sinks.sink_process import END_SECONDS, STOP_SECONDS, SinkProcess
from platform.monitor.sinks.sink_table import asked_sinks

OnStep = Callable[[MetricsRow], None]


class Service(Protocol):
    """Service inside the driver's process that is sent a run's numbers, and may fail without harm to it."""

    def step(self, values: dict[str, float | list[int]]) -> None:
        """Send a committed step, numbers and histograms by their W&B names, to this service, such as Prometheus."""

    def summary(self, values: dict[str, Any]) -> None:
        """Send numbers of the whole run, by their W&B names, to this service, such as Prometheus."""

    def close(self, status: int) -> None:
        """End the run at this service, such as Prometheus, with the launcher's exit status."""


class RunMonitor:
    """Sends a run's progress to metrics.jsonl, the console, `services` by their names, and the function `on_step`,
    called with each row; prints what the `sinks` say, processes that read the files of the run by themselves."""

    def __init__(
        self,
        metrics: MetricsLog,
        console: Console,
        services: Mapping[str, Service],
        sinks: Sequence[SinkProcess],
        on_step: OnStep,
    ):
        """Send a run's progress to the metrics file, the console, `services` by name, and `on_step` with each row."""
        self._metrics, self._console, self._services, self._on_step = metrics, console, dict(services), on_step
        self._sinks = list(sinks)

    def step(self, row: MetricsRow) -> None:
        """Record a committed step's row: in metrics.jsonl, on the console, with Prometheus, by `on_step`."""
        self._metrics.write(row)
        self._hear_sinks()
        self._console.step(row)
        self._to_services(lambda service: service.step(for_wandb(row)))
        self._on_step(row)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the whole run's metrics.jsonl, one per step."""
        return MetricsLog.read(self._metrics.path)

    def say(self, text: str) -> None:
        """Print a line of text on the run's console."""
        self._console.say(text)

    def summary(self, values: dict[str, Any]) -> None:
        """Record numbers of the whole run by name, such as its goodput, with services such as Prometheus."""
        named = {f"elastic/{key}": value for key, value in values.items()}
        self._to_services(lambda service: service.summary(named))

    def close(self, status: int) -> None:
        """Close the metrics file, console and services of a run that ends with the exit status `status`."""
        self._metrics.close()
        for sink in self._sinks:
            sink.close(status)
        until = monotonic() + (STOP_SECONDS if status == RESUMABLE else END_SECONDS)
        for sink in self._sinks:
            sink.wait(until - monotonic())
        self._hear_sinks()
        self._console.close()
        self._to_services(lambda service: service.close(status))

    def _hear_sinks(self) -> None:
        """Print on the run's console what the processes of its services have to say, such as W&B's."""
        for sink in self._sinks:
            for line in sink.new_lines():
                self._console.say(line)

    def _to_services(self, action: Callable[[Service], None]) -> None:
        """Perform `action` on every service, such as Prometheus; at its first error, stop using one and say so."""
        for name, service in list(self._services.items()):
            try:
                action(service)
            except Exception as error:  # a service that fails must not end a run of weeks
                del self._services[name]
                self.say(f"{name}: stopped ({type(error).__name__}: {error}); {self._metrics.path} has every step")


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
    row of metrics after it was recorded. Starts a process for each service that the configuration names, such as W&B.
    Raises OSError if no file can be created in the directory.
    """
    console = Console(stream or sys.stdout, total_steps=total_steps, every=config.monitor.every)
    metrics = MetricsLog(run_dir / METRICS, console.say)
    sinks = [SinkProcess(name, config, run_dir) for name in asked_sinks(config.monitor)]
    services: dict[str, Service] = {}
    if config.cluster.kind == "ray" and config.monitor.prometheus:
        services["Prometheus"] = RayGauges(run_dir.name)
    return RunMonitor(metrics, console, services, sinks, on_step)

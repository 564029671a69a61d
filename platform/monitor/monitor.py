"""The driver's single interface to console, metrics.jsonl, Prometheus and the processes that serve W&B and others.

`Console` prints an aligned line every few steps, and on a terminal a status line refreshed in place. `RayGauges` gives
Prometheus, by way of Ray, all that W&B gets of a step, as gauges of the cluster that a run is in.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any, Protocol, TextIO

from platform.boundary import terminal
from platform.boundary.redaction import redact_secrets
from platform.config.fields import Config
from platform.monitor.json_records import METRICS
from platform.monitor.metrics import MetricsLog, MetricsRow, wandb_numbers
from platform.monitor.sinks.alerts import RESUMABLE
from platform.monitor.sinks.sink_process import END_SECONDS, STOP_SECONDS, SinkProcess, select_sinks

_SCORES = 6  # of tasks that are shown
_HEADER_EVERY = 25  # lines between headers: about one per screen
_ERASE = "\r\x1b[2K"

# title, width, text of a row and the time left
_COLUMNS: tuple[tuple[str, int, Callable[[MetricsRow, str], str]], ...] = (
    ("step", 7, lambda row, _: str(row.step)),
    ("loss", 10, lambda row, _: f"{row.loss:.4f}"),
    ("grad norm", 11, lambda row, _: f"{row.grad_norm:.3f}"),
    ("lr", 11, lambda row, _: f"{row.lr:.2e}"),
    ("tokens/s", 12, lambda row, _: f"{row.tokens_per_second:,.0f}"),
    ("MFU", 8, lambda row, _: "~" if row.mfu is None else f"{row.mfu:.1%}"),
    ("world", 7, lambda row, _: str(row.world_size)),
    ("time left", 11, lambda _, left: left),
)


class Console:
    """Prints a run's progress: a line for the first step that it sees, for every `every`-th step and for the last one,
    and on a terminal a status line that every step refreshes.

    Loss and gradient norm are that step's own; tokens/s and MFU are means over the steps since the previous line.
    `stream`: None prints nothing.
    """

    def __init__(self, stream: TextIO | None, *, total_steps: int, every: int, clock: Callable[[], float] = monotonic):
        """Configure the console of a run: a line every `every` steps of `total_steps` on `stream` (None: nothing)."""
        self._stream, self._total, self._every, self._clock = stream, total_steps, every, clock
        self._live = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
        self._lines, self._length = 0, 0
        self._since: list[MetricsRow] = []  # rows since the last line
        self._pace: deque[tuple[int, float]] = deque(maxlen=50)  # (step, clock) of recent steps, for the time left

    def show_step(self, row: MetricsRow) -> None:
        """Show a committed step on the run's console: print its metrics if a line is due, and its validation loss if it
        has one; refresh the status line."""
        step, longer = row.step, self._length and row.length not in (None, self._length)
        self._length = row.length or 0
        if longer:
            self.say(f"from step {step} on, sequences have {row.length} tokens")
        if self._pace and step <= self._pace[-1][0]:  # rolled back: time lost is no part of the pace
            self._pace.clear()
        self._pace.append((step, self._clock()))
        self._since.append(row)
        left = self._time_left(step)
        if not self._lines or step % self._every == 0 or step == self._total:
            seconds = [r.step_seconds for r in self._since]
            speed = fmean([r.tokens_per_second for r in self._since], seconds)
            known = [r.mfu for r in self._since if r.mfu is not None]
            mfu = fmean(known, seconds) if len(known) == len(seconds) else None
            self._since.clear()
            self._print_row(replace(row, tokens_per_second=speed, mfu=mfu), left)
        if row.val_loss is not None:
            of = "".join(f"  {name} {loss:.4f}" for name, loss in (row.val_losses or {}).items())
            self.say(f"{step:>{_COLUMNS[0][1]}}{row.val_loss:>{_COLUMNS[1][1]}.4f}  validation loss{of}")
        if row.task_scores:
            self.say(f"{step:>{_COLUMNS[0][1]}}  tasks{_format_scores(row.task_scores)}")
        if self._live:
            status = f"step {step}/{self._total}  loss {row.loss:.4f}  "
            status += f"{row.tokens_per_second:,.0f} tokens/s  {left} left"
            width = shutil.get_terminal_size().columns - 1  # a wrapped status line could not be erased
            self._write_text(_ERASE + status[:width])

    def say(self, text: str) -> None:
        """Print `text` as a line of its own on the run's console, above the status line."""
        self._write_text((_ERASE if self._live else "") + terminal.escape_terminal_text(text) + "\n")

    def close(self) -> None:
        """Clear the run's status line off the terminal."""
        if self._live:
            self._write_text(_ERASE)

    def _print_row(self, row: MetricsRow, left: str) -> None:
        """Print a step's metrics as an aligned console line, with the header every 25 lines; `left`: time left."""
        if self._lines % _HEADER_EVERY == 0:
            self.say("".join(f"{title:>{width}}" for title, width, _ in _COLUMNS))
        self._lines += 1
        self.say("".join(f"{text(row, left):>{width}}" for _, width, text in _COLUMNS))

    def _time_left(self, step: int) -> str:
        """Return the time that a run still takes after `step`, at the pace of recent steps, as text; "~" if unknown."""
        (first, then), (last, now) = self._pace[0], self._pace[-1]
        return _format_duration((now - then) / (last - first) * (self._total - step)) if last > first else "~"

    def _write_text(self, text: str) -> None:
        """Write a text to the run's console with its secrets redacted."""
        terminal.write_text(self._stream, redact_secrets(text))


def _format_scores(scores: dict[str, float]) -> str:
    """Return for a run's console the first scores of its evaluation tasks, and how many more there are."""
    shown = "".join(f"  {name} {score:.4f}" for name, score in list(scores.items())[:_SCORES])
    return shown + (f"  and {len(scores) - _SCORES} more" if len(scores) > _SCORES else "")


def _format_duration(seconds: float) -> str:
    """Format the seconds left of a run as days and hours, hours and minutes, or minutes and seconds, such as 1m43s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"


PREFIX = "platform_"  # Ray puts ray_ before it
TAG = "run"  # label of every gauge: the name of the run directory, by which runs in one cluster are told apart


class RayGauges:
    """Gauges of one run. Each node of a Ray cluster offers the metrics of its processes to Prometheus, where
    ray[default] is installed; the driver sets them. A gauge lasts as long as the driver."""

    def __init__(self, run: str):
        """Prepare the Prometheus gauges of a run's driver, labelled with `run`, the name of its directory."""
        self._tags, self._gauges = {TAG: run}, dict[str, Any]()

    def send_step(self, values: Mapping[str, Any]) -> None:
        """Set the driver's Prometheus gauges to a step's numbers, no histograms; do nothing once Ray is gone."""
        import ray
        from ray.util.metrics import Gauge

        if not ray.is_initialized():
            return
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        for name, value in numbers.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(gauge_name(name), name, (TAG,))
            self._gauges[name].set(float(value), self._tags)

    def send_summary(self, values: dict[str, Any]) -> None:
        """Set the driver's Prometheus gauges of numbers of the whole run by name, which W&B gets too."""
        self.send_step(values)

    def close(self, status: int) -> None:
        """End the Prometheus gauges with the driver itself: Ray forgets the metrics of an ended process."""


def gauge_name(name: str) -> str:
    """Return the name of the driver's Prometheus gauge for a metric of that name on W&B.

    >>> gauge_name("comm/all_gather/data+t")
    'platform_comm_all_gather_data_t'
    """
    return PREFIX + re.sub(r"\W", "_", name, flags=re.ASCII)


OnStep = Callable[[MetricsRow], None]


class Service(Protocol):
    """Service inside the driver's process that is sent a run's numbers, and may fail without harm to it."""

    def send_step(self, values: dict[str, float | list[int]]) -> None:
        """Send a committed step, numbers and histograms by their W&B names, from the driver to this service."""

    def send_summary(self, values: dict[str, Any]) -> None:
        """Send numbers of the whole run, by their W&B names, from the driver to this service, such as Prometheus."""

    def close(self, status: int) -> None:
        """End the run at this service of the driver, such as Prometheus, with the launcher's exit status."""


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

    def record_step(self, row: MetricsRow) -> None:
        """Record a committed step's row: in metrics.jsonl, on the console, with Prometheus, by `on_step`."""
        self._metrics.write_row(row)
        self._print_sink_messages()
        self._console.show_step(row)
        self._call_services(lambda service: service.send_step(wandb_numbers(row)))
        self._on_step(row)

    def read_rows(self) -> list[dict[str, Any]]:
        """Return the rows of the whole run's metrics.jsonl, one per step."""
        return MetricsLog.read_rows(self._metrics.path)

    def say(self, text: str) -> None:
        """Print a line of text on the run's console."""
        self._console.say(text)

    def record_summary(self, values: dict[str, Any]) -> None:
        """Record numbers of the whole run by name, such as its goodput, with services such as Prometheus."""
        wandb_values = {f"elastic/{key}": value for key, value in values.items()}
        self._call_services(lambda service: service.send_summary(wandb_values))

    def close(self, status: int) -> None:
        """Close the metrics file, console and services of a run that ends with the exit status `status`."""
        self._metrics.close()
        for sink in self._sinks:
            sink.close(status)
        until = monotonic() + (STOP_SECONDS if status == RESUMABLE else END_SECONDS)
        for sink in self._sinks:
            sink.wait(until - monotonic())
        self._print_sink_messages()
        self._console.close()
        self._call_services(lambda service: service.close(status))

    def _print_sink_messages(self) -> None:
        """Print on the run's console what the processes of its services have to say, such as W&B's."""
        for sink in self._sinks:
            for line in sink.take_new_lines():
                self._console.say(line)

    def _call_services(self, action: Callable[[Service], None]) -> None:
        """Perform `action` on every service, such as Prometheus; at its first error, stop using one and say so."""
        for name, service in list(self._services.items()):
            try:
                action(service)
            except Exception as error:  # a service that fails must not end a run of weeks
                del self._services[name]
                self.say(f"{name}: stopped ({type(error).__name__}: {error}); {self._metrics.path} has every step")


def open_monitor(
    config: Config, run_dir: Path, *, total_steps: int, stream: TextIO | None = None, on_step: OnStep = lambda _: None
) -> RunMonitor:
    """Open the monitor of a run that lives in the existing directory `run_dir` and ends after `total_steps` optimizer
    steps.

    `stream` (default: standard output) is refreshed in place if it is a terminal. `on_step` is called with each step's
    row of metrics after it was recorded. Starts a process for each service that the configuration names, such as W&B.
    Raises OSError if no file can be created in the directory.
    """
    console = Console(stream or sys.stdout, total_steps=total_steps, every=config.monitor.every)
    metrics = MetricsLog(run_dir / METRICS, console.say)
    sinks = [SinkProcess(name, config, run_dir) for name in select_sinks(config.monitor)]
    services: dict[str, Service] = {}
    if config.cluster.kind == "ray" and config.monitor.prometheus:
        services["Prometheus"] = RayGauges(run_dir.name)
    return RunMonitor(metrics, console, services, sinks, on_step)

"""Services for a run's numbers besides W&B: MLflow, TensorBoard, Trackio, and the user's own command for alerts.

- MLflow: at MLFLOW_TRACKING_URI, or where MLflow keeps its data by default.
- TensorBoard: files of events in the run directory; `tensorboard --logdir runs` shows all runs.
- Command: each alert starts it, with the alert as JSON at its input.
- Trackio: on this machine, at TRACKIO_SERVER_URL, or in the Space that TRACKIO_SPACE_ID names.

`bin_counts` makes histograms for services that show them with fewer bins than a run has counts.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import sqlite3
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from functools import cache
from itertools import compress
from math import isfinite
from time import time
from typing import Any

from platform.boundary.redaction import strip_url_secrets
from platform.monitor import events
from platform.monitor.events import JournalEvent
from platform.monitor.json_records import JOURNAL
from platform.monitor.sinks.alerts import RESUMABLE, Alert, MonitorSink, Numbers, SinkRun

_AT_ONCE = 900  # numbers in one request: MLflow takes 1,000
_PARAMS_AT_ONCE, _LONGEST_PARAM = 100, 500
_INSERT = "INSERT INTO metrics (key, value, timestamp, step, run_uuid, is_nan) VALUES (?, ?, ?, ?, ?, 0)"
_STATUS = {0: "FINISHED", RESUMABLE: "KILLED"}


class MlflowSink(MonitorSink):
    """MLflow run of a run directory, shared by all its processes. MLflow cannot replace a number."""

    replaces = False

    def __init__(self, run: SinkRun):
        """Start or continue the MLflow run, in the experiment that monitor.project names."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient, get_tracking_uri

        self._of, self._client, monitor = run, MlflowClient(), run.monitor
        if "run" not in run.state:
            project = monitor["project"]
            known = self._client.get_experiment_by_name(project)
            experiment = known.experiment_id if known else self._client.create_experiment(project)
            tags = dict.fromkeys(monitor.get("tags") or [], "true") | {"directory": str(run.directory)}
            tags |= {"mlflow.note.content": monitor["notes"]} if monitor.get("notes") else {}
            tags |= {"group": monitor["group"]} if monitor.get("group") else {}
            mlflow_run = self._client.create_run(experiment, run_name=run.directory.name, tags=tags)
            run.state["run"] = mlflow_run.info.run_id
            self._log_configuration()
        self._run: str = run.state["run"]
        self._client.update_run(self._run, status="RUNNING")
        place = get_tracking_uri()
        scheme, _, path = place.partition(":///")
        self._database = path if scheme == "sqlite" and "?" not in path else ""  # a file of this machine, if any
        self.where = f"run {self._run} of {monitor['project']} at {strip_url_secrets(place)}"

    def _log_configuration(self) -> None:
        """Log the run's configuration as the parameters of the MLflow run, which cannot change any more."""
        from mlflow.entities import Param

        pairs = _flatten_parameters(self._of.config)
        parameters = [Param(_mlflow_name(key), str(value)[:_LONGEST_PARAM]) for key, value in pairs]
        for first in range(0, len(parameters), _PARAMS_AT_ONCE):
            self._client.log_batch(self._of.state["run"], params=parameters[first : first + _PARAMS_AT_ONCE])

    def send_alert(self, alert: Alert) -> None:
        """Note an alert as a tag of the MLflow run: the newest of its kind."""
        self._client.set_tag(self._run, f"alert.{alert.kind}", f"{alert.title}: {alert.text}")

    def send_steps(self, rows: Sequence[Numbers]) -> None:
        """Log the numbers of committed steps at MLflow, which has no histograms."""
        now = round(time() * 1000)
        numbers = [
            (_mlflow_name(name), float(value), now, int(row["step"]))  # type: ignore[arg-type]
            for row in rows
            for name, value in row.items()
            if name != "step" and not isinstance(value, list)
        ]
        newest = {name: index for index, (name, *_) in enumerate(numbers)}  # MLflow shows these as the run's numbers
        plain = [index != newest[name] and isfinite(value) for index, (name, value, *_) in enumerate(numbers)]
        older = [*compress(numbers, plain)] if self._database else []
        if older:
            numbers = [number for number, inserted in zip(numbers, plain, strict=True) if not inserted]
        # the client first: what it refuses is tried again, and must not be in the table then
        self._log_numbers(numbers)
        if older and not self._insert_numbers(older):
            self._log_numbers(older)

    def _log_numbers(self, numbers: Sequence[tuple[str, float, int, int]]) -> None:
        """Log numbers by MLflow's client, in requests that it takes."""
        from mlflow.entities import Metric

        for first in range(0, len(numbers), _AT_ONCE):
            self._client.log_batch(self._run, metrics=[Metric(*n) for n in numbers[first : first + _AT_ONCE]])

    def _insert_numbers(self, numbers: Sequence[tuple[str, float, int, int]]) -> bool:
        """Write older finite numbers into MLflow's own table; return False if that has an unknown form."""
        try:  # MLflow's client makes objects for each number, which takes 20 times as long, on a processor of the run
            with closing(sqlite3.connect(self._database)) as database, database:
                database.executemany(_INSERT, [(*number, self._run) for number in numbers])
        except sqlite3.Error:
            self._database = ""
        return bool(self._database)

    def close(self, status: int | None) -> None:
        """End the MLflow run as the launcher's exit status says, and give it the run's journal."""
        journal = self._of.directory / JOURNAL
        if journal.exists():
            self._client.log_artifact(self._run, str(journal))
        self._client.set_terminated(self._run, _STATUS.get(status, "FAILED") if status is not None else "FAILED")


@cache
def _mlflow_name(name: str) -> str:
    """Return the name of a metric or key at the service MLflow, with the characters that it takes.

    >>> _mlflow_name("comm/all_gather/data+t")
    'comm/all_gather/data_t'
    """
    return re.sub(r"[^\w\-. :/]", "_", name)


def _flatten_parameters(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key of the run's configuration, joined by dots, and its value, for MLflow."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten_parameters(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class TensorboardSink(MonitorSink):
    """TensorBoard files of a run. Text goes to a separate writer: replaying a step purges everything later in the
    scalar writer."""

    def __init__(self, run: SinkRun):
        """Begin new files of TensorBoard for a run; what older ones have stays."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.directory / "tensorboard"
        self._curves = EventFileWriter(str(folder / "steps"))
        self._texts = EventFileWriter(str(folder / "texts"))
        # of the newest step, by name, used again: making them takes five times as long
        self._values: dict[str, Any] = {}
        self._next = 0  # the step that the files have not; of earlier processes' it is not known
        self.where = f"show it with `tensorboard --logdir {shlex.quote(str(folder))}`"

    def send_event(self, event: JournalEvent) -> None:
        """Write a text that the run's model made, for TensorBoard."""
        if isinstance(event, events.Sampled):
            self._write_text(f"samples/{event.prompt[:40]}", f"{event.prompt}\n\n{event.text}", event.step, event.time)

    def send_alert(self, alert: Alert) -> None:
        """Write an alert on the run as a text, for TensorBoard."""
        self._write_text(f"alerts/{alert.kind}", f"{alert.title}: {alert.text}", alert.step, alert.time)

    def _write_text(self, tag: str, text: str, step: int, time: float) -> None:
        """Write a text of the run under its tag, as TensorBoard's plug-in for texts reads it."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        quoted = "    " + text.replace("\n", "\n    ")  # shown as it is: it is read as Markdown
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[quoted.encode()])
        self._add_values(self._texts, [Summary.Value(tag=tag, metadata=metadata, tensor=tensor)], step, time)

    def send_steps(self, rows: Sequence[Numbers]) -> None:
        """Write the numbers and histograms of committed steps by their names; one that comes again removes for
        TensorBoard what the files have from it on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        for row in rows:
            step = int(row["step"])  # type: ignore[arg-type]
            if step < self._next or not self._next:
                self._curves.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
            self._next = step + 1
            values = [self._build_value(name, x) for name, x in row.items() if name != "step"]
            self._add_values(self._curves, values, step)

    def _add_values(self, writer: Any, values: list[Any], step: int, time: float | None = None) -> None:
        """Write values of one step of the run into a file of TensorBoard."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        writer.add_event(Event(step=step, wall_time=time or _wall_time(), summary=Summary(value=values)))

    def _build_value(self, name: str, value: float | list[int]) -> Any:
        """Return TensorBoard's value of a metric: a number, or a histogram."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if isinstance(value, list):
            return _build_histogram(name, value)
        if (summary_value := self._values.get(name)) is None:
            summary_value = self._values[name] = Summary.Value(tag=name)
        summary_value.simple_value = float(value)
        return summary_value

    def flush(self) -> None:
        """Store the curves and texts of the run for TensorBoard on disk."""
        self._curves.flush()
        self._texts.flush()

    def close(self, status: int | None) -> None:
        """Close the files of TensorBoard, which know no end of a run."""
        self._curves.close()
        self._texts.close()


def _wall_time() -> float:
    """Return the time that TensorBoard shows beside a step: as it is written."""
    import time

    return time.time()


def _build_histogram(name: str, value: list[int]) -> Any:
    """Make TensorBoard's histogram of a metric, with a bucket for each of a list's numbers."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    count, total = sum(value), sum(n * x for n, x in enumerate(value))
    squares, edges = sum(n * n * x for n, x in enumerate(value)), range(1, len(value) + 1)
    shape = {"min": 0, "max": len(value), "num": count, "sum": total, "sum_squares": squares}
    return Summary.Value(tag=name, histo=HistogramProto(**shape, bucket_limit=edges, bucket=value))


SECONDS = 60.0  # that a command may take


class AlertCommandSink(MonitorSink):
    """Command of monitor.alert_command. It runs in the run directory, one alert after the other."""

    takes_steps = False

    def __init__(self, run: SinkRun):
        """Prepare to start the run's command for alerts; nothing is started yet."""
        self._of = run
        self.where = "monitor.alert_command gets each alert"

    def send_alert(self, alert: Alert) -> None:
        """Start the command with an alert on the run, and wait for it; what it prints is in the log."""
        text = json.dumps({"run": str(self._of.directory), **asdict(alert)}) + "\n"
        command, place = ["/bin/sh", "-c", self._of.monitor["alert_command"]], self._of.directory
        with suppress(subprocess.TimeoutExpired):  # the next alert gets its own
            subprocess.run(command, input=text, text=True, timeout=SECONDS, cwd=place)


def bin_counts(counts: list[int], most: int) -> tuple[Any, Any]:
    """Return `counts` as a histogram of at most `most` bins, for services such as W&B, and the edges of its bins."""
    import numpy as np

    each = -(-len(counts) // most)
    bins = [sum(counts[i : i + each]) for i in range(0, len(counts), each)]
    return np.array(bins), np.array([*range(0, len(counts), each), len(counts)])


class TrackioSink(MonitorSink):
    """Trackio's run of a run directory, shared by all its processes. Trackio cannot replace a step that it has."""

    replaces = False
    stored_after = 2.0  # its thread writes twice a second

    def __init__(self, run: SinkRun):
        """Start or continue trackio's run, in the project that monitor.project names."""
        import trackio

        monitor = run.monitor
        name = run.state.setdefault("run", f"{run.directory.name}-{secrets.token_hex(2)}")  # a project has each once
        self._run: Any = trackio.init(
            project=monitor["project"],
            name=name,
            group=monitor.get("group") or None,
            config=run.config | {"tags": monitor.get("tags"), "notes": monitor.get("notes")},
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # the driver's machine is not where the work is
            auto_log_cpu=False,
        )
        place = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        show = f"show it with `trackio show --project {monitor['project']}`"
        self.where = f"run {name} at {strip_url_secrets(place)}" if place else f"run {name}; {show}"

    def send_alert(self, alert: Alert) -> None:
        """Send an alert by trackio, which shows it and posts it, as TRACKIO_WEBHOOK_URL says."""
        from trackio import AlertLevel

        self._run.alert(alert.title, alert.text, AlertLevel[alert.level], alert.step)

    def send_steps(self, rows: Sequence[Numbers]) -> None:
        """Log the numbers and histograms of committed steps with trackio."""
        import trackio

        for row in rows:
            named = {name: value for name, value in row.items() if name != "step"}
            lists = {name: value for name, value in named.items() if isinstance(value, list)}
            shown = named | {n: trackio.Histogram(np_histogram=bin_counts(counts, 512)) for n, counts in lists.items()}
            self._run.log(shown, step=int(row["step"]))  # type: ignore[arg-type]

    def close(self, status: int | None) -> None:
        """End trackio's run, once all is stored."""
        self._run.finish()

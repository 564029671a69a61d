"""MLflow: at MLFLOW_TRACKING_URI, or where MLflow keeps its data by default."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cache
from itertools import compress
from math import isfinite
from time import time
from typing import Any

from platform.boundary.redaction import bare_url
from platform.monitor.records.records import JOURNAL
from platform.monitor.sinks.services.alerts import Alert
from platform.monitor.sinks.services.sink import RESUMABLE, Numbers, Sink, SinkRun

_AT_ONCE = 900  # numbers in one request: MLflow takes 1,000
_PARAMS_AT_ONCE, _LONGEST_PARAM = 100, 500
_INSERT = "INSERT INTO metrics (key, value, timestamp, step, run_uuid, is_nan) VALUES (?, ?, ?, ?, ?, 0)"
_STATUS = {0: "FINISHED", RESUMABLE: "KILLED"}


class MlflowSink(Sink):
    """MLflow run of a run directory, shared by all its processes. MLflow cannot replace a number."""

    replaces = False

    def __init__(self, run: SinkRun):
        """Start or continue the MLflow run, in the experiment that monitor.project names."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        self._of, self._client, monitor = run, MlflowClient(), run.monitor
        if "run" not in run.state:
            found = self._client.get_experiment_by_name(monitor["project"])
            experiment = found.experiment_id if found else self._client.create_experiment(monitor["project"])
            tags = dict.fromkeys(monitor.get("tags") or [], "true") | {"directory": str(run.directory)}
            tags |= {"mlflow.note.content": monitor["notes"]} if monitor.get("notes") else {}
            tags |= {"group": monitor["group"]} if monitor.get("group") else {}
            made = self._client.create_run(experiment, run_name=run.directory.name, tags=tags)
            run.state["run"] = made.info.run_id
            self._log_configuration()
        self._run: str = run.state["run"]
        self._client.update_run(self._run, status="RUNNING")
        self._database = _local_database()
        self.where = f"run {self._run} of {monitor['project']} at {_mlflow_place()}"

    def _log_configuration(self) -> None:
        """Log the run's configuration as the parameters of the MLflow run, which cannot change any more."""
        from mlflow.entities import Param

        found = [
            Param(_mlflow_name(key), str(value)[:_LONGEST_PARAM]) for key, value in _as_parameters(self._of.config)
        ]
        for first in range(0, len(found), _PARAMS_AT_ONCE):
            self._client.log_batch(self._of.state["run"], params=found[first : first + _PARAMS_AT_ONCE])

    def alert(self, alert: Alert) -> None:
        """Note an alert as a tag of the MLflow run: the newest of its kind."""
        self._client.set_tag(self._run, f"alert.{alert.kind}", f"{alert.title}: {alert.text}")

    def steps(self, rows: Sequence[Numbers]) -> None:
        """Log the numbers of committed steps at MLflow, which has no histograms."""
        now = round(time() * 1000)
        found = [
            (_mlflow_name(name), float(value), now, int(row["step"]))  # type: ignore[arg-type]
            for row in rows
            for name, value in row.items()
            if name != "step" and not isinstance(value, list)
        ]
        newest = {name: place for place, (name, *_) in enumerate(found)}  # MLflow shows these as the run's numbers
        plain = [place != newest[name] and isfinite(value) for place, (name, value, *_) in enumerate(found)]
        older = [*compress(found, plain)] if self._database else []
        if older:
            found = [number for number, inserted in zip(found, plain, strict=True) if not inserted]
        # the client first: what it refuses is tried again, and must not be in the table then
        self._log(found)
        if older and not self._insert(older):
            self._log(older)

    def _log(self, numbers: Sequence[tuple[str, float, int, int]]) -> None:
        """Log numbers by MLflow's client, in requests that it takes."""
        from mlflow.entities import Metric

        for first in range(0, len(numbers), _AT_ONCE):
            self._client.log_batch(self._run, metrics=[Metric(*n) for n in numbers[first : first + _AT_ONCE]])

    def _insert(self, numbers: Sequence[tuple[str, float, int, int]]) -> bool:
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


def _local_database() -> str:
    """Return the file of this machine in which MLflow keeps its data, "" if it keeps them elsewhere."""
    import mlflow

    scheme, _, path = mlflow.get_tracking_uri().partition(":///")
    return path if scheme == "sqlite" and "?" not in path else ""


def _mlflow_place() -> str:
    """Return where MLflow keeps its data, without secrets."""
    import mlflow

    return bare_url(mlflow.get_tracking_uri())


@cache
def _mlflow_name(name: str) -> str:
    """Return the name of a metric or key with the characters that MLflow takes.

    >>> _mlflow_name("comm/all_gather/data+t")
    'comm/all_gather/data_t'
    """
    return re.sub(r"[^\w\-. :/]", "_", name)


def _as_parameters(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key of the run's configuration, joined by dots, and its value, for MLflow."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _as_parameters(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

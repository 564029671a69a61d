"""Table of runs as they were measured: from a row, `python -m platform.plan compare` makes the run's plan again."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from platform.boundary.command_line import typed_command
from platform.boundary.files.local_files import replace_text
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed
from platform.composition.arguments import quote
from platform.config.bounds import flat_values
from platform.config.fields import Compose, Config
from platform.monitor.records import events, records
from platform.monitor.records.metrics import MetricsLog
from platform.monitor.records.records import JOURNAL, METRICS
from platform.planning.measured.measured_runs import KEYS, NEEDED, overrides_of
from platform.planning.step_price import hardware_named

# Keys that a plan or its price depends on, by how they begin; GIVEN: keys among them that a scheme's file gives.
PRICED = ("model.", "tensor.", "branch.", "pipeline.", "parallel.", "recompute", "precision", "optimizer.kind",
          "train.global_batch", "train.microbatch")  # fmt: skip
GIVEN = ("tensor.axes", "tensor.order", "tensor.regions", "tensor.parameters", "tensor.scheme", "pipeline.kind")
WARM_UP = 3  # first steps of a generation, which are slower


class TrainedRun(NamedTuple):
    """Run that was trained: the `arguments` that name it, its configuration, all keys settled, and the number of its
    workers."""

    arguments: Sequence[str]
    config: Config
    workers: int

    @property
    def device(self) -> str:
        """Return the kind of device (cpu, cuda) that its workers had, as its journal says."""
        path = Path(self.config.run.dir) / JOURNAL
        found = records.last(path, events.from_plain) if path.is_file() else []
        starts = [event.device for event in found if isinstance(event, events.Starting)]
        return starts[-1] if starts else "cpu"


def write_table(path: Path, runs: Sequence[TrainedRun], compose: Compose) -> int:
    """Write a CSV file with a row for each run that has measured steps; return how many rows it has. `compose`: makes a
    configuration of arguments. Runs of which a row cannot be made, as a module of the user's gives what its columns
    cannot name, are left out; nothing is written without a row."""
    rows = []
    for run in runs:
        if seconds := measured_seconds(run.config):
            with suppress(ConfigError):  # the runs are trained: their table must not fail the command
                rows.append(row_of(run, seconds, compose))
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if rows:
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        replace_text(path, text.getvalue())
    return len(rows)


def measured_seconds(config: Config) -> float | None:
    """Return the median seconds of a step of a run's newest generation, after its first few; None without steps."""
    path = Path(config.run.dir) / METRICS
    rows = MetricsLog.read(path) if path.is_file() else []
    newest = [row["step_seconds"] for row in rows if row.get("generation") == rows[-1].get("generation")]
    return median(newest[WARM_UP:] or newest) if newest else None


def row_of(run: TrainedRun, seconds: float, compose: Compose) -> dict[str, str]:
    """Return the row of a run whose step takes `seconds` on average: all columns that a table needs, and each key that
    is by default not as the run has it."""
    config, device = run.config, run.device
    found = hardware_named(config.cluster.gpu) if device == "cuda" else None
    values, columns = flat_values(config), {key: column for column, key in KEYS.items()}
    cells = {
        "name": " ".join(run.arguments),
        "hardware": "cpu" if device == "cpu" else found.name if found else "",
        "cluster.device": device,
        "gpus": str(run.workers),
        **{column: str(values[KEYS[column]]) for column in NEEDED if column in KEYS},
        "tensor": config.tensor.scheme,
        "axes": " ".join(f"{name}={size}" for name, size in config.tensor.axes.items()),
        "schedule": config.pipeline.kind,
        "stages": str(config.pipeline.stages),
        "chunks": str(config.pipeline.chunks),
        "branch": config.branch.kind,
        "system": "ours",
    }
    cells |= {f"branch.axes.{name}": str(size) for name, size in config.branch.axes.items()}
    there = flat_values(compose(list(overrides_of(cells))))
    for key in _priced(values):
        if values[key] != there[key]:
            cells[columns.get(key, key)] = _typed(values[key])
    return {**cells, "seconds": f"{seconds:.6g}"}


def _priced(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys on which a plan or its price depends, beside what every row has."""
    return (key for key in values if key.startswith(PRICED) and not key.startswith((*GIVEN, "branch.axes")))


def _typed(value: Any) -> str:
    """Return the value of a key as it is typed on a command line."""
    return quote(value) if isinstance(value, str) else json.dumps(value).replace('"', "'")


def table_of_sweep(name: str, runs: Sequence[TrainedRun], compose: Compose) -> str:
    """Write the table of a sweep's runs beside their directories; return a line for the user, that it cannot be written
    too, as the runs are trained: their table must not fail the command."""
    common = set[str].intersection(*(set(run.arguments) for run in runs))
    named = [run._replace(arguments=[a for a in run.arguments if a not in common]) for run in runs]
    path = Path(os.path.commonpath([os.path.dirname(run.config.run.dir) for run in runs])) / f"{name}.csv"
    try:
        if not write_table(path, named, compose):
            return "no step was measured: there is no table of the sweep"
    except (OSError, Malformed) as error:
        return f"the table of the measured steps cannot be written: {error}"
    return f"the measured steps, beside the predicted: {typed_command('plan')} compare {path}"

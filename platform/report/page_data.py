"""Data of a page: what its script draws of each run, as plain data, from the files of the run directories.

The files may be in use, torn, of an older layout or anybody's: what cannot be read is said, and the rest is shown.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from platform.boundary import documents
from platform.boundary.redaction import REDACTED
from platform.boundary.refusals import ConfigError, format_value
from platform.boundary.schema import Malformed
from platform.cluster import run_directory
from platform.config.fields import Config
from platform.monitor import events
from platform.monitor.events import JournalEvent
from platform.monitor.goodput import KINDS, build_account
from platform.monitor.json_records import JOURNAL, METRICS
from platform.monitor.metrics import MetricColumns
from platform.plan.layout import format_count
from platform.plan.plan_summary import format_number
from platform.report import account
from platform.report.account import list_key_numbers, state_line
from platform.report.page import all_panels, matches_metric, panel_table
from platform.status.seen_run import Look, read_lock_owner, read_run_contents

_NUMBERS = 120_000  # about so many numbers of curves are put into a page, and at most so many points into a curve:
_POINTS = (60, 1000)
_EVENTS, _SAMPLES = 400, 20  # most that are shown of a run
_TIMELINE = "timeline.svg"
_PICTURE = 400 << 10  # most bytes that are put into a page


class WatchedRun:
    """Run directory that is read on as it grows: `columns` of metrics, `found`, what else a look into it finds, None
    without a run, and `faults`, a line for each file that could not be read."""

    def __init__(self, directory: Path):
        """Prepare to read the run of a page in a directory, of which nothing need be there yet."""
        self.directory = directory
        self.columns = MetricColumns(directory / METRICS)
        self.found: Look | None = None
        self.faults: list[str] = []

    @property
    def journal_events(self) -> Sequence[JournalEvent]:
        """Return the journal's events of the run that is on the page."""
        return self.found.evidence.journal if self.found else []

    def read_run_news(self) -> int:
        """Read the news of the page's run; return how many of the rows of metrics, from the first, still hold."""
        self.found = None
        with suppress(ConfigError):
            self.found = read_run_contents(self.directory)
        self.faults = list(self.found.torn) if self.found else []
        kept = self.read_new_metrics()
        if self.columns.unread:
            lines = format_count(self.columns.unread, "line")
            self.faults.append(f"{METRICS}: {lines} passed over, as no row of metrics")
        return kept

    def read_new_metrics(self) -> int:
        """Read new rows of metrics of the page's run; return how many of the rows, from the first, still hold."""
        try:
            return self.columns.read_rows_and_count_kept()
        except OSError as error:
            self.faults.append(f"{METRICS} cannot be read: {documents.printable_line(error)}")
            return 0

    def change_signature(self) -> list[Any]:
        """Return what changes with the files of the run directory, but for its metrics, and with its driver's death."""
        signature: list[Any] = [read_lock_owner(self.directory)]
        for name in (JOURNAL, run_directory.CONFIG, run_directory.PLAN, run_directory.LOCK, _TIMELINE):
            with suppress(OSError):
                state = (self.directory / name).stat()
                signature.append((state.st_mtime_ns, state.st_size))
        return signature


def collect_page_data(runs: Sequence[WatchedRun], live: bool = False) -> dict[str, Any]:
    """Return all that a page draws: its sections of panels, and the runs, which have been looked at."""
    curves = sum(_numbers_per_point(run) for run in runs)
    points = min(max(_NUMBERS // max(curves, 1), _POINTS[0]), _POINTS[1])
    named = _unique_names([run.directory for run in runs])
    kinds = KINDS | {"rest": "saving, evaluating, between steps"}
    drawn = [_collect_run_data(run, name, points) for run, name in zip(runs, named, strict=True)]
    page = {"live": live, "made": time.time(), "sections": panel_table()["sections"], "kinds": kinds}
    return {**page, "runs": drawn, "swept": _swept_values([run["settings"] for run in drawn])}


def _swept_values(settings: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    """Return, for a page on several runs, key -> its value in each, of the keys in which they differ."""
    usual = dict(_flat_settings(Config().to_dict()))
    keys = sorted({key for of_run in settings for key in of_run} - {"run.dir"})
    swept = {key: [of.get(key, _command_line_text(usual.get(key)) if of else "") for of in settings] for key in keys}
    return {key: values for key, values in swept.items() if len(set(values)) > 1}


def _unique_names(directories: Sequence[Path]) -> list[str]:
    """Return a short name on the page for each run directory: as many of its last parts as it takes to be unique."""
    for count in range(1, 6):
        names = [documents.printable_line("/".join(d.parts[-count:]) or d) for d in directories]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]


def _heat_metrics() -> list[str]:
    """Return the metrics of the page's panels that show a mean alone, as colours."""
    return [m for panel in all_panels() if panel.get("kind") == "heat" for m in panel["metrics"]]


def _spread_metrics() -> list[str]:
    """Return the metrics of the page's panels that show spreads over workers, and of the ranks at their ends."""
    return [m for panel in all_panels() if "ranks" in panel for m in (*panel["metrics"], f"{panel['ranks']}/*")]


def _numbers_per_point(run: WatchedRun) -> int:
    """Return how many numbers a point of all the curves of a run has."""
    single = _heat_metrics() + _spread_metrics()
    return sum(1 if matches_metric(single, name) else 3 for name in run.columns.column_names)


def _collect_run_data(run: WatchedRun, name: str, points: int) -> dict[str, Any]:
    """Return what a page draws of one run, with curves of at most about `points` points."""
    journal, wrote = run.journal_events, run.found.evidence.wrote if run.found else 0.0
    ledger = build_account(journal, wrote if account.is_unfinished(journal) else 0.0, _seconds_by_step(run.columns))
    config = run.found.config if run.found else None
    news, left_out = account.shown_events(journal, _EVENTS)
    return {
        "name": name,
        "path": documents.printable_line(run.directory, 4096),
        "origins": [o for o in account.list_origins(run.found) if o[1]] if run.found else [],
        **_run_headline(run),
        "began": journal[0].time if journal else 0.0,
        "curves": build_curves(run.columns, points),
        "events": [
            [round(e.time, 3), account.event_step(e), account.event_tone(e), account.event_line(e)] for e in news
        ],
        "left_out": left_out,
        "periods": [[s.kind, round(s.start, 3), round(s.end, 3)] for s in ledger.periods[-2000:]],
        "shares": account.time_shares(ledger, _useful_seconds(run)),
        "failures": [
            [f.time, f.step, f.who, f.what, f.stopped, f.repeated, f.steps, f.fewer, f.total_seconds]
            for f in ledger.failures[-_EVENTS:]
        ],
        "samples": [
            [e.step, e.prompt[:500], e.text[:2000]] for e in journal if isinstance(e, events.Sampled)
        ][-_SAMPLES:],
        "traffic": next((e.rows[:20] for e in reversed(journal) if isinstance(e, events.Traffic)), []),
        "plan": _shown_plan(run.found.plan, run.faults) if run.found else {},
        "pictures": list(_run_pictures(run, config)),
        "settings": _settings_not_default(config) if config else {},
    }  # fmt: skip


def _seconds_by_step(columns: MetricColumns) -> dict[int, float]:
    """Return step -> its seconds, of the steps in a page's run whose time is known."""
    return {step: s for step, s in zip(columns.steps, columns.column("perf/step_seconds"), strict=True) if s == s}


def _useful_seconds(run: WatchedRun) -> float | None:
    """Return, for its page, the useful seconds of a run that goes on, None for one that has ended."""
    if not account.is_unfinished(run.journal_events):
        return None  # the journal has them all; of one that goes on, only up to its last checkpoint
    return float(np.nansum(run.columns.column("perf/step_seconds")))


def _run_headline(run: WatchedRun) -> dict[str, Any]:
    """Return the state of a run, its most important numbers, and what of it cannot be read."""
    state, tiles = state_line(run.found, run.columns), list(list_key_numbers(run.found, run.columns))
    best = min((v for v in run.columns.column("val/loss") if isfinite(v)), default=None)
    return {"state": state, "tiles": tiles, "faults": run.faults, "best": best}


def run_headlines(runs: Sequence[WatchedRun]) -> list[dict[str, Any]]:
    """Return the headlines of runs that have been looked at."""
    return [_run_headline(run) for run in runs]


def new_rows(columns: MetricColumns, first: int, most: int) -> dict[str, Any] | None:
    """Return the rows of a run's metrics from `first` on, for curves that are drawn already; None if they are more than
    `most`, or have numbers of metrics that few rows have."""
    steps = columns.steps[first:]
    sparse = [name for name in columns.column_names if _is_sparse(name)]
    if len(steps) > most or any(v == v for name in sparse for v in columns.column(name)[first:]):
        return None
    tokens, hours = columns.column("tokens"), np.nan_to_num(np.asarray(columns.column("perf/step_seconds"))) / 3600
    grid: dict[str, list[Any]] = {"step": list(steps), "tokens": [int(v) if isfinite(v) else 0 for v in tokens[first:]]}
    grid |= {"hours": _round_values(np.cumsum(hours)[first:])}
    dense = [name for name in columns.column_names if name not in sparse]
    return {"grid": grid, "of": {name: _round_values(np.asarray(columns.column(name)[first:])) for name in dense}}


def build_curves(columns: MetricColumns, points: int) -> dict[str, Any]:
    """Return the curves of a run's metrics: `grids`, lists of the steps, tokens and hours of training of points, and by
    W&B name [grid, means] or [grid, means, lowest, highest].

    A metric of many rows is divided into `points` parts of as many rows each, so that no peak is lost; one that few
    rows have is taken as it is, on a grid of its own.
    """
    steps = np.array(columns.steps, np.int64)
    hours = np.cumsum(np.nan_to_num(np.asarray(columns.column("perf/step_seconds")))) / 3600
    tokens = np.nan_to_num(np.asarray(columns.column("tokens")), posinf=0, neginf=0)
    grids: list[dict[str, list[Any]]] = []
    places: dict[bytes, int] = {}
    curves: dict[str, Any] = {}
    heats, spreads = _heat_metrics(), _spread_metrics()

    def find_grid(rows: np.ndarray) -> int:
        """Return the number of the grid of the points at these rows."""
        key = rows.tobytes()
        if key not in places:
            places[key] = len(grids)
            x = {"step": steps[rows].tolist(), "tokens": tokens[rows].astype(np.int64).tolist()}
            grids.append({**x, "hours": _round_values(hours[rows])})
        return places[key]

    def rows_of_points(rows: np.ndarray) -> np.ndarray:
        """Return the rows that give points their x: all, or the last row of each part."""
        return rows if len(rows) <= points else rows[_part_edges(len(rows), points)[1:] - 1]

    all_rows = np.arange(len(steps))
    find_grid(rows_of_points(all_rows))  # the first: to which rows are added while the page is served
    for name in columns.column_names:
        values = np.asarray(columns.column(name))
        rows = np.flatnonzero(~np.isnan(values)) if _is_sparse(name) else all_rows
        if not len(rows):
            continue
        grid_number = find_grid(rows_of_points(rows))
        if len(rows) <= points:
            curves[name] = [grid_number, _round_values(values[rows])]
            continue
        edges = _part_edges(len(rows), points)
        if matches_metric(spreads, name):
            curves[name] = [grid_number, _round_values(_spread_values(columns, name, rows, edges))]
            continue
        low, mean, high = _part_extremes(values[rows], edges[:-1])
        spread = [] if matches_metric(heats, name) or np.array_equal(low, high, equal_nan=True) else [low, high]
        curves[name] = [grid_number, *map(_round_values, [mean, *spread])]
    return {"grids": grids, "of": curves, "rows": len(steps)}


def _is_sparse(name: str) -> bool:
    """Return True if only some rows of a run have the metric of that W&B name: its points are joined over the rest."""
    return name.split("/")[0] in ("val", "tasks", "layers") or name == "elastic/recovery_seconds"


def _spread_values(columns: MetricColumns, name: str, rows: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return a number per part of `rows`: the mean of a median, else from the row of the lowest min or highest max."""
    numbers, end = np.asarray(columns.column(name.replace("ranks/", "workers/", 1)))[rows], name.rpartition("/")[2]
    if end == "median":
        return _part_extremes(numbers, edges[:-1])[1]
    ranking = np.nan_to_num(-numbers if end == "min" else numbers, nan=-np.inf)
    extreme_rows = [first + int(ranking[first:after].argmax()) for first, after in pairwise(edges.tolist())]
    return np.asarray(columns.column(name))[rows[extreme_rows]]


def _part_edges(rows: int, parts: int) -> np.ndarray:
    """Return the edges of so many parts of a page's curve, each of as many rows."""
    return np.linspace(0, rows, parts + 1).astype(np.int64)


def _part_extremes(values: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the lowest, mean and highest number of each part of `values`, without NaN; parts begin at `starts`."""
    finite = np.where(np.isfinite(values), values, np.nan)
    known = np.add.reduceat(~np.isnan(finite), starts, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.nan_to_num(finite), starts) / known
    return np.fmin.reduceat(finite, starts), mean, np.fmax.reduceat(finite, starts)


def _round_values(values: np.ndarray) -> list[float | None]:
    """Return the numbers of a curve as JSON has them, with five digits; None for NaN and infinities."""
    return [float(f"{v:.5g}") if isfinite(v) else None for v in values.tolist()]


def _shown_plan(plan: dict[str, Any], faults: list[str]) -> dict[str, Any]:
    """Return, for the page, `facts` of a plan by plan.json, and `table`, the layout of each region; {} without any."""
    try:
        mesh, regions = dict(plan["mesh"]), dict(plan["regions"])
        dims = list(dict.fromkeys(dim for region in regions.values() for dim in region))
        facts = {
            "workers": " x ".join(f"{axis} {n}" for axis, n in mesh.items() if n != 1) or "1",
            "scheme": plan.get("scheme"),
            "precision": plan.get("precision"),
            "microbatches": plan.get("microbatches"),
            "parameters": f"{plan['parameter_count']:,}, of which a worker has {plan['parameters_per_worker']:,}",
            "bytes per step": {name: f"{format_number(n)}B" for name, n in plan.get("communication", {}).items()},
        }
        rows = [[name, *("+".join(region.get(dim, ())) or "-" for dim in dims)] for name, region in regions.items()]
    except (ValueError, TypeError, KeyError, AttributeError):
        if plan:
            faults.append(f"{run_directory.PLAN} is not a plan of this version")
        return {}
    return {"facts": {name: fact for name, fact in facts.items() if fact}, "table": [["region", *dims], *rows]}


def _run_pictures(run: WatchedRun, config: Config | None) -> Iterator[tuple[str, str]]:
    """Yield the pictures of a run as (title, address with the picture in it): its schedule as planned, and as measured
    where it wrote one. Images run nothing and load nothing."""
    try:
        picture = documents.read_bytes(run.directory / _TIMELINE, _PICTURE)
        yield "as planned, predicted and measured", _svg_data_url(picture)
        return
    except (Malformed, OSError) as error:
        if os.path.lexists(run.directory / _TIMELINE):
            run.faults.append(f"{_TIMELINE} is not shown: {documents.printable_line(error)}")
    if config and config.pipeline.stages > 1 and not config.extend:  # no code of others is run
        from platform.predict.make_plan import make_plan
        from platform.predict.step_price import draw_step

        with suppress(ConfigError):
            plan = make_plan(config, None)
            yield "as planned", _svg_data_url(draw_step(config, plan, None).encode())


def _svg_data_url(svg: bytes) -> str:
    """Return the address on a page of an SVG picture that has the picture in itself."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def _settings_not_default(config: Config) -> dict[str, str]:
    """Return, for a run's page, the keys of its configuration with another value than the default, as text."""
    usual = dict(_flat_settings(Config().to_dict()))
    changed = {key: value for key, value in _flat_settings(config.to_dict()) if usual.get(key) != value}
    changed |= {account.HIDDEN: REDACTED} if account.HIDDEN in changed else {}
    return {key: documents.printable_line(_command_line_text(value), 200) for key, value in changed.items()}


def _command_line_text(value: Any) -> str:
    """Return the value of a key of a run's configuration as the page shows it, typed on a command line."""
    return f"[{','.join(map(_command_line_text, value))}]" if isinstance(value, list | tuple) else format_value(value)


def _flat_settings(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a run's configuration for its page, joined by dots, with their values."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value

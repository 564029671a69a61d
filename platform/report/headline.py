"""Headline of a page: the state of a run in one line, the culprit first, and its most important numbers."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from platform.monitor.goodput import goodput
from platform.monitor.records.columns import Columns
from platform.monitor.records.journal_event import End
from platform.plan.reports.describe import human
from platform.status.facts import clock_text, state_word
from platform.status.seen_run import Look

_RECENT = 50  # steps whose median speed is shown


def state_line(found: Look | None, columns: Columns) -> dict[str, Any]:
    """Return the state of a run as `tone` (good, warn, bad, live), `line` and further `details`, lines of text."""
    if found is None:
        line = f"of this run only its metrics are here, up to step {columns.steps[-1]:,}" if columns.steps else ""
        return {"tone": "warn", "line": line or "no run has started here yet", "details": []}
    if verdict := found.verdict:
        stack = ["where it was, the innermost call last:", *verdict.stack] if verdict.stack else []
        when = f"since {clock_text(verdict.since)}; " if verdict.since else ""
        return {
            "tone": "bad" if verdict.attention else "warn",
            "line": verdict.line,
            "details": [f"{when}{verdict.sure}", *verdict.details, *stack],
        }
    of = f" of {found.evidence.steps:,}" if found.evidence.steps else ""
    line = f"{state_word(found).removeprefix('ended: ')}: step {_last_step(found, columns):,}{of}"
    return {"tone": "good" if found.evidence.end else "live", "line": line, "details": []}


def last_number(columns: Columns, name: str) -> float | None:
    """Return the last number in a column of a run's metrics, None if it has none."""
    return next((v for v in reversed(columns.column(name)) if v == v), None)


def _last_step(found: Look, columns: Columns) -> int:
    """Return the last step of a run that is recorded."""
    return columns.steps[-1] if columns.steps else found.evidence.step


def tiles(found: Look | None, columns: Columns) -> Iterator[tuple[str, str, str]]:
    """Yield the most important numbers of a run as (name, value, remark)."""
    if found:
        of = f"of {found.evidence.steps:,}" if found.evidence.steps else ""
        yield "step", f"{_last_step(found, columns):,}", of
    if (loss := last_number(columns, "train/loss")) is not None:
        yield "loss", f"{loss:.4f}", ""
    if (loss := last_number(columns, "val/loss")) is not None:
        lowest = min(v for v in columns.column("val/loss") if v == v)
        yield "validation loss", f"{loss:.4f}", f"lowest {lowest:.4f}"
    if recent := [v for v in columns.column("perf/tokens_per_second")[-_RECENT:] if v == v]:
        yield "tokens/s", f"{median(recent):,.0f}", f"median of {len(recent)}"
    if (mfu := last_number(columns, "perf/mfu")) is not None:
        yield "MFU", f"{mfu:.1%}", ""
    if (tokens := last_number(columns, "tokens")) is not None:
        yield "tokens", human(tokens).strip(), ""
    if (workers := last_number(columns, "elastic/world_size")) is not None:
        yield "workers", f"{workers:,.0f}", ""
    if (peak := last_number(columns, "memory/peak_bytes")) is not None:
        yield "peak memory", f"{human(peak)}B", "largest worker"
    if found and found.evidence.journal:
        cost = goodput(found.evidence.journal)
        if isinstance(found.evidence.end, End):
            yield "goodput", f"{cost.goodput:.1%}", f"of {cost.seconds:,.0f} s"
        survived = [f"{len(cost.recoveries)} survived"] if cost.failures else []
        of_driver = [f"{cost.restarts} of the driver"] if cost.restarts else []
        yield "failures", f"{cost.failures + cost.restarts}", ", ".join([*survived, *of_driver])

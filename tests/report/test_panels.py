"""One table says what the page and the W&B workspace show: all that a run logs, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

from platform.monitor.metrics import MetricColumns, MetricsLog, MetricsRow
from platform.report.page import STATIC, all_panels, matches_metric, panel_table
from platform.train.replies import GAUGES

ENDS = {"min": 0.25, "median": 0.5, "max": 0.75}
GAUGED = [*GAUGES, "bandwidth/inside a node"]
INNER = {"dict": {"a": 0.5, "b": 0.25}, "list": [1, 2, 3]}
KEYS = {
    "title",
    "metrics",
    "x",
    "kind",
    "total",
    "log",
    "unit",
    "even",
    "steps",
    "view",
    "ranks",
    "table",
    "summary",
    "names",
    "note",
    "tab",
}


def full_row() -> MetricsRow:
    """Return a row in which every key has a value of its type."""
    values: dict[str, Any] = {}
    for name, hint in get_type_hints(MetricsRow).items():
        kinds = [
            getattr(kind, "__origin__", kind).__name__ for kind in (get_args(hint) if "|" in str(hint) else [hint])
        ]
        values[name] = INNER.get(kinds[0], 1)
    values["experts"] = dict.fromkeys(("dropped", "entropy", "largest"), 0.5)
    values["workers"] = {f"{name}/{end}": n for name in GAUGED for end, n in ENDS.items()}
    values["worker_ranks"] = {f"{name}/{end}": 1 for name in GAUGED for end in ("min", "max")}
    return MetricsRow(**values)


def metrics_of(panel: dict[str, Any]) -> list[str]:
    """Return the metrics that a panel shows, those of the ranks at the ends of a spread among them."""
    return [*panel.get("metrics", []), *([f"{panel['ranks']}/*"] if "ranks" in panel else [])]


def test_every_panel_is_fed_and_every_metric_is_shown(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write_row(full_row())
    log.close()
    columns = MetricColumns(log.path)
    columns.read_rows_and_count_kept()
    logged = set(columns.column_names)
    shown = {name: [p["title"] for p in all_panels() if matches_metric(metrics_of(p), name)] for name in logged}
    hidden = panel_table()["not_shown"]
    assert {name for name, panels in shown.items() if not panels} == hidden.keys() & logged == {"step", "tokens"}
    assert {name: panels for name, panels in shown.items() if len(panels) > 1} == {}
    metrics = [metric for panel in all_panels() for metric in metrics_of(panel)]
    assert [metric for metric in metrics if not any(matches_metric([metric], name) for name in logged)] == []
    assert {panel["total"] for panel in all_panels() if "total" in panel} <= logged


def test_panels_say_what_can_be_drawn() -> None:
    drawing = "".join((STATIC / name).read_text() for name in ("page.js", "charts.js"))
    views = set(re.findall(r"^  (\w+)\(run, box", drawing, re.M))
    kinds = set(re.findall(r"(\w+): draw[A-Z]", drawing))
    units = set(re.findall(r"^  (\w+)[:,]", drawing.partition("UNITS = {")[2].partition("};")[0], re.M))
    panels = list(all_panels())
    assert {p["view"] for p in panels if "view" in p} == views and views
    assert {p.get("kind", "line") for p in panels} == kinds == {"line", "stack", "heat", "bars", "spread"}
    assert {p["unit"] for p in panels if "unit" in p} == units
    assert all(p.keys() <= KEYS and ("view" in p) != ("metrics" in p) for p in panels)
    assert all("view" in p for p in panels if p.keys() & {"table", "summary"})
    assert all((p.get("kind") == "spread") == ("ranks" in p) for p in panels)
    assert len({p["title"] for p in panels}) == len(panels)

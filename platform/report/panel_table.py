"""The table of sections and panels that the page of a run and its W&B workspace are made from: `panels.yaml`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

STATIC = Path(__file__).parent / "static"
_TABLE = Path(__file__).with_name("panels.yaml")


@cache
def panel_table() -> dict[str, Any]:
    """Return the table of panels: `sections`, each with its `title` and `panels`, and `not_shown`, name -> reason."""
    import yaml

    return yaml.safe_load(_TABLE.read_text())


def all_panels() -> Iterator[dict[str, Any]]:
    """Yield every panel of a run's page and of its W&B workspace, by section."""
    for section in panel_table()["sections"]:
        yield from section["panels"]


def matches_metric(metrics: list[str], name: str) -> bool:
    """Return True if a panel of these `metrics` (NAME, or NAME/*) shows the metric of that W&B name."""
    return any(name == m or (m.endswith("/*") and name.startswith(m[:-1])) for m in metrics)

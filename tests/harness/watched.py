"""A run directory that is looked into while its job runs."""

from __future__ import annotations

from pathlib import Path

from platform.monitor import JsonLines, MetricsLog, compute_goodput, events


class Watched:
    """The run directory of a job."""

    def __init__(self, path: Path):
        self.path = path

    def rows(self) -> list[dict]:
        path = self.path / "metrics.jsonl"
        return MetricsLog.read_rows(path) if path.exists() else []

    @property
    def step(self) -> int:
        rows = self.rows()
        return rows[-1]["step"] if rows else 0

    def numbers(self) -> list[tuple]:
        return [(row["step"], row["samples"], row["loss"], row["grad_norm"]) for row in self.rows()]

    def ends(self) -> list[int]:
        return [
            line["status"] for line in JsonLines.read_objects(self.path / "drivers.jsonl") if line["event"] == "ended"
        ]

    def cost(self) -> events.Goodput:
        return compute_goodput(events.read_events(self.path / "journal.jsonl"))

"""Costs that a run has measured of itself: of its steps, its snapshots in memory and its checkpoints."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import NamedTuple

from platform.boundary.schema import Malformed


class OwnCosts(NamedTuple):
    """Costs in seconds that a run has measured on so many workers, 0 where it has not: of a `step`; of a `snapshot`, by
    which it makes a step longer; of a checkpoint, for which the run stands (`stall`), and until it is written
    (`saving`)."""

    step: float = 0.0
    snapshot: float = 0.0
    stall: float = 0.0
    saving: float = 0.0


def own_costs(run_dir: Path, workers: int) -> OwnCosts:
    """Return the costs that the run in a directory measured in its last steps on so many workers; without a readable
    journal or metrics, none."""
    from platform.monitor.records import events, records  # planning a run without one has no time to import these
    from platform.monitor.records.metrics import read_row
    from platform.monitor.records.records import JOURNAL, METRICS

    try:
        rows = [row for row in records.last(run_dir / METRICS, read_row) if row.get("world_size") == workers]
        saves = [e for e in records.last(run_dir / JOURNAL, events.from_plain) if isinstance(e, events.Checkpoint)]
    except (OSError, Malformed):
        return OwnCosts()
    measured = {row["step"]: row for row in rows if isinstance(row.get("parts"), dict)}
    after = [measured[save.step + 1] for save in saves if save.step + 1 in measured]
    return OwnCosts(
        step=_usual([row["step_seconds"] for row in measured.values()]),
        snapshot=_usual([seconds for row in measured.values() if (seconds := row["parts"].get("snapshot", 0.0)) > 0]),
        stall=_usual([max(0.0, row["seconds"]["checkpoint"] - row["parts"].get("snapshot", 0.0)) for row in after]),
        saving=_usual([save.seconds for save in saves]),
    )


def _usual(seconds: list[float]) -> float:
    """Return the median of measured seconds, 0 without any."""
    return median(seconds) if seconds else 0.0

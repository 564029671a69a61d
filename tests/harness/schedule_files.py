"""Pipeline schedules written to files, as torch.distributed.pipelining writes them."""

from __future__ import annotations

from pathlib import Path

from platform.plan.schedule import Schedule


def to_csv(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule's compute actions: one line per stage, cells such as `4B0` (chunk, kind, microbatch)."""
    Path(path).write_text("".join(",".join(map(str, row)) + "\n" for row in schedule.rows), encoding="utf-8")

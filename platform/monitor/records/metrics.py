"""`metrics.jsonl`: one object per committed step (design.md, section 7), and what its keys are called on W&B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from platform.monitor.records import records
from platform.monitor.records.json_lines import JsonLines

# Key of a row -> metric on W&B. A nested dict becomes one metric per inner key: seconds.forward is time/forward.
METRICS: dict[str, str | None] = {
    "step": "step",  # updates done, from 1
    "tokens": "tokens",  # consumed since the start of the run: the other x axis
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "val_loss": "val/loss",  # only in the rows of steps that were evaluated
    "step_seconds": "perf/step_seconds",
    "tokens_per_second": "perf/tokens_per_second",
    "tflops_per_worker": "perf/tflops_per_worker",
    "mfu": "perf/mfu",  # null where the hardware's peak is unknown
    "seconds": "time",
    "bubble": "bubble",  # {planned, measured}, over ideal; only in the rows of a pipeline with monitor.timeline
    "comm_bytes": "comm",
    "peak_memory_bytes": "memory/peak_bytes",
    "world_size": "elastic/world_size",
    "generation": "elastic/generation",
    "recovery_seconds": "elastic/recovery_seconds",  # since the failure; only in the row of the first step after one
    "skipped": "train/skipped",  # only in the rows of steps that updated nothing (train.on_spike)
    "samples": None,  # [first, end]: `tokens` says it on W&B
}


class MetricsLog(JsonLines):
    """The metrics of a run. `append(row)` once per committed step."""

    @staticmethod
    def read(path: Path | str) -> list[dict[str, Any]]:
        """One row per step, ascending. After a rollback a step recurs: a row takes back all from its step on."""
        rows: list[dict[str, Any]] = []
        for row in records.lines(path, records.ROW):
            while rows and rows[-1]["step"] >= row["step"]:
                rows.pop()
            rows.append(row)
        return rows


def flatten(row: dict[str, Any]) -> dict[str, float]:
    """The row under its W&B names; what is unknown (null) is left out."""
    flat: dict[str, float] = {}
    for key, value in row.items():
        name = METRICS[key]
        if name is None or value is None:
            continue
        flat |= {f"{name}/{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat

"""`metrics.jsonl`: one object per committed step (docs/design.md, section 7), and the W&B names of its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from platform.monitor.records import records
from platform.monitor.records.json_lines import JsonLines

# Key of a row -> its metric on W&B. A nested dict becomes one metric per inner key: seconds.forward is time/forward.
METRICS: dict[str, str | None] = {
    "step": "step",  # updates done, from 1
    "tokens": "tokens",  # consumed since the start of the run: the other x axis
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "val_loss": "val/loss",  # only in the rows of steps after which the model was evaluated
    "step_seconds": "perf/step_seconds",
    "tokens_per_second": "perf/tokens_per_second",
    "tflops_per_worker": "perf/tflops_per_worker",
    "mfu": "perf/mfu",  # null where the hardware's peak is unknown
    "seconds": "time",
    "bubble": "bubble",  # {planned, measured}: makespan / ideal - 1; only for a pipeline with monitor.timeline
    "comm_bytes": "comm",
    "peak_memory_bytes": "memory/peak_bytes",
    "world_size": "elastic/world_size",
    "generation": "elastic/generation",
    "recovery_seconds": "elastic/recovery_seconds",  # since the failure; only in the row of the first step after one
    "skipped": "train/skipped",  # only in the rows of steps that updated nothing (train.on_spike)
    "samples": None,  # [first, end); on W&B `tokens` shows the same
}


class MetricsLog(JsonLines):
    """Metrics file of a run: `append(row)` is called once per committed step."""

    @staticmethod
    def read(path: Path | str) -> list[dict[str, Any]]:
        """Return one row per step, ascending. After a rollback steps recur: a row replaces all from its step on."""
        rows: list[dict[str, Any]] = []
        for row in records.lines(path, records.ROW):
            while rows and rows[-1]["step"] >= row["step"]:
                rows.pop()
            rows.append(row)
        return rows


def flatten(row: dict[str, Any]) -> dict[str, float]:
    """Return the row under its W&B names, without values that are unknown (null)."""
    flat: dict[str, float] = {}
    for key, value in row.items():
        name = METRICS[key]
        if name is None or value is None:
            continue
        flat |= {f"{name}/{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat

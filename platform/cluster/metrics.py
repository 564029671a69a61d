"""The ranks' reports of a step as one row of metrics.jsonl (design.md, section 7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

_SAME_ON_ALL = ("step", "loss", "grad_norm", "lr", "tokens", "samples")


def metrics_row(
    reports: Sequence[dict[str, Any]],
    wall_seconds: float,
    *,
    length: int,
    flops_per_token: float,
    peak_flops: float | None,
    generation: int,
) -> dict[str, Any]:
    """One row for a committed step.

    `step_seconds` is the driver's wall time from sending the step out to the last rank's report, so that dispatch
    counts; `seconds` are means over the ranks, `comm_bytes` sums, `peak_memory_bytes` the largest. Throughput counts
    this step's tokens, samples of `length`; `mfu` is relative to `peak_flops` per worker, None where that is unknown.
    """
    first, end = reports[0]["samples"]
    tokens_per_second = (end - first) * length / wall_seconds
    flops_per_worker = tokens_per_second * flops_per_token / len(reports)
    comm_bytes: Counter[str] = Counter()
    for report in reports:
        comm_bytes.update(report["comm_bytes"])
    return {
        **{key: reports[0][key] for key in _SAME_ON_ALL},
        "step_seconds": wall_seconds,
        "seconds": {part: fmean(r["seconds"][part] for r in reports) for part in reports[0]["seconds"]},
        "tokens_per_second": tokens_per_second,
        "tflops_per_worker": flops_per_worker / 1e12,
        "mfu": flops_per_worker / peak_flops if peak_flops else None,
        "comm_bytes": dict(sorted(comm_bytes.items())),
        "peak_memory_bytes": max(r["peak_memory_bytes"] for r in reports),
        "world_size": len(reports),
        "generation": generation,
    }

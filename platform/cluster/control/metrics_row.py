"""Conversion of a step's report into a row of metrics.jsonl (docs/design.md, section 7)."""

from __future__ import annotations

from typing import Any

from platform.train.protocol.answers import StepReport

_AS_REPORTED = ("step", "loss", "grad_norm", "lr", "tokens", "seconds", "peak_memory_bytes", "world_size")


def metrics_row(
    report: StepReport,
    wall_seconds: float,
    *,
    length: int,
    flops_per_token: float,
    peak_flops: float | None,
    generation: int,
) -> dict[str, Any]:
    """Return the row for a committed step. `report`: of all ranks together, see `platform.train.step.step_report`.

    `step_seconds` is the driver's wall time from sending the step out to the last rank's answer, so that dispatch
    counts; `seconds` are means over the ranks, `comm_bytes` sums, `peak_memory_bytes` maxima. Throughput counts this
    step's tokens, samples of `length`; `mfu` is relative to `peak_flops` per worker, None if that is unknown.
    """
    first, end = report.samples
    tokens_per_second = (end - first) * length / wall_seconds
    flops_per_worker = tokens_per_second * flops_per_token / report.world_size
    return {
        **{key: getattr(report, key) for key in _AS_REPORTED},
        "samples": [first, end],
        "step_seconds": wall_seconds,
        "tokens_per_second": tokens_per_second,
        "tflops_per_worker": flops_per_worker / 1e12,
        "mfu": flops_per_worker / peak_flops if peak_flops else None,
        "comm_bytes": dict(sorted(report.comm_bytes.items())),
        "generation": generation,
        **({"skipped": True} if report.skipped else {}),
    }

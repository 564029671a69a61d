"""Rows as the driver writes them (docs/run-directory.md), invented."""

from typing import Any

from platform.monitor import MetricsRow, json_records


def line(step: int, **changes: Any) -> dict[str, Any]:
    """Return a row as it is in the file."""
    return json_records.plain_fields(row(step, **changes))


def row(step: int, **changes: Any) -> MetricsRow:
    seconds = dict.fromkeys("data forward backward exposed_comm bubble reduce optimizer checkpoint".split(), 0.0125)
    values = {
        "step": step,
        "loss": 7.5 * step**-0.125,
        "grad_norm": 1 / 3,
        "lr": 3e-3,
        "tokens": step * 2048,
        "samples": [16 * step - 16, 16 * step],
        "step_seconds": 0.1,
        "seconds": seconds,
        "tokens_per_second": 20480.0,
        "tflops_per_worker": 0.0125,
        "mfu": None,
        "comm_bytes": {"all_reduce/t": 2**53 + 1, "all_reduce/data+t": 9},
        "peak_memory_bytes": 123456789,
        "world_size": 4,
        "generation": 1,
        **changes,
    }
    return MetricsRow(**values)

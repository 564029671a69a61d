"""`metrics.jsonl`: one row per committed step (docs/run-directory.md), and the W&B names of its keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

from platform.boundary import schema
from platform.boundary.schema import OpenMap
from platform.monitor.records import records
from platform.monitor.records.json_lines import JsonLines
from platform.monitor.records.records import Steps

_ROW = Annotated[dict[str, Any], OpenMap((("step", Steps),), ("step",))]


class Wandb(NamedTuple):
    """Name of a key of MetricsRow on W&B. A map becomes one metric per inner key: seconds.forward is time/forward."""

    name: str


@dataclass(frozen=True, kw_only=True)
class MetricsRow:
    """Row of metrics.jsonl: a step that every rank has acknowledged. Keys whose default is None are left out where they
    are None."""

    step: Annotated[int, Wandb("step")]  # updates done, from 1
    loss: Annotated[float, Wandb("train/loss")]
    grad_norm: Annotated[float, Wandb("train/grad_norm")]
    lr: Annotated[float, Wandb("train/lr")]
    tokens: Annotated[int, Wandb("tokens")]  # consumed since the start of the run: the other x axis
    samples: list[int]  # [first, end); on W&B `tokens` shows the same
    seconds: Annotated[dict[str, float], Wandb("time")]
    peak_memory_bytes: Annotated[int, Wandb("memory/peak_bytes")]
    world_size: Annotated[int, Wandb("elastic/world_size")]
    step_seconds: Annotated[float, Wandb("perf/step_seconds")]
    tokens_per_second: Annotated[float, Wandb("perf/tokens_per_second")]
    tflops_per_worker: Annotated[float, Wandb("perf/tflops_per_worker")]
    mfu: Annotated[float | None, Wandb("perf/mfu")]  # None where the hardware's peak is unknown
    comm_bytes: Annotated[dict[str, int], Wandb("comm")]
    generation: Annotated[int, Wandb("elastic/generation")]
    workers: Annotated[dict[str, float] | None, Wandb("workers")] = None  # by GAUGE/min, GAUGE/median, GAUGE/max
    worker_ranks: Annotated[dict[str, int] | None, Wandb("ranks")] = None  # that have these, by GAUGE/min, GAUGE/max
    skipped: Annotated[bool | None, Wandb("train/skipped")] = None  # true where the step updated nothing
    loss_scale: Annotated[float | None, Wandb("train/loss_scale")] = None  # of this step, where precision=fp16
    length: Annotated[int | None, Wandb("train/length")] = None  # tokens of a sequence, where they grow
    parts: Annotated[dict[str, float] | None, Wandb("parts")] = None  # seconds, of the stage that computes longest
    predicted_seconds: Annotated[float | None, Wandb("perf/predicted_seconds")] = None  # of a full step
    bubble: Annotated[dict[str, float] | None, Wandb("bubble")] = None  # planned, measured: makespan / ideal - 1
    val_loss: Annotated[float | None, Wandb("val/loss")] = None  # of steps after which the model was evaluated
    val_losses: Annotated[dict[str, float] | None, Wandb("val/sources")] = None  # of the sources of a mixture, by name
    task_scores: Annotated[dict[str, float] | None, Wandb("tasks")] = None  # of eval.tasks, by TASK/METRIC
    layer_grad_norms: Annotated[dict[str, float] | None, Wandb("layers/grad_norm")] = None  # see monitor.layers
    layer_rms: Annotated[dict[str, float] | None, Wandb("layers/rms")] = None  # root mean square of a layer's result
    experts: Annotated[dict[str, float] | None, Wandb("experts")] = None  # dropped, entropy, largest: of their load
    expert_load: Annotated[list[int] | None, Wandb("experts/load")] = None  # tokens that chose each, in all layers
    recovery_seconds: Annotated[float | None, Wandb("elastic/recovery_seconds")] = None  # of the first after a failure


class MetricsLog(JsonLines):
    """Metrics file of a run: `write(row)` is called once per committed step."""

    def write(self, row: MetricsRow) -> None:
        """Append a committed step's row to the metrics file, now or as soon as it can be written."""
        self.append(records.plain(row))

    @staticmethod
    def read(path: Path | str) -> list[dict[str, Any]]:
        """Return the rows of a metrics file that hold, by step."""
        return valid_rows(records.lines(path, read_row))


def read_row(row: dict[str, Any]) -> dict[str, Any]:
    """Check and return a row of a metrics file of any version. Raises Malformed if it has no valid step."""
    return schema.read(_ROW, row)


def valid_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a metrics file that still hold, by step: a row replaces all before it from its step on."""
    found: list[dict[str, Any]] = []
    for row in rows:
        while found and found[-1]["step"] >= row["step"]:
            found.pop()
        found.append(row)
    return found


@cache
def wandb_names() -> dict[str, str]:
    """Return the W&B name of every key of a row of metrics.jsonl that W&B gets."""
    hints = get_type_hints(MetricsRow, include_extras=True)
    return {key: bound.name for key, hint in hints.items() for bound in getattr(hint, "__metadata__", ())}


def for_wandb(row: MetricsRow) -> dict[str, float | list[int]]:
    """Return the numbers of a row of metrics.jsonl under their W&B names, as `named_numbers` does."""
    return named_numbers(vars(row))


def named_numbers(values: Mapping[str, Any]) -> dict[str, float | list[int]]:
    """Return the values of a row of metrics.jsonl under their W&B names, maps flattened, without unknown ones (None);
    a list is one histogram, of as many bins as it has numbers."""
    flat: dict[str, float | list[int]] = {}
    for key, name in wandb_names().items():
        value = values.get(key)
        if isinstance(value, dict):
            flat |= {f"{name}/{inner}": number for inner, number in value.items()}
        elif value is not None:
            flat[name] = value
    return flat

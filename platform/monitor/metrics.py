"""`metrics.jsonl`: one row per committed step (docs/run-directory.md), and the W&B names of its keys; and
`MetricColumns`, its numbers by these names, read as far as it is written and read on as it grows."""

from __future__ import annotations

import io
import json
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from math import inf, nan
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

from platform.boundary import documents, schema
from platform.boundary.schema import OpenMap, Real
from platform.monitor import json_records
from platform.monitor.json_records import LARGEST, NON_FINITE, JsonLines, Steps

_NUMBERS = tuple((name, Real | None) for name in ("loss", "val_loss", "step_seconds", "tokens_per_second"))  # shown
_ROW = Annotated[dict[str, Any], OpenMap((("step", Steps), *_NUMBERS), ("step",))]


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
    losses_ahead: Annotated[dict[str, float] | None, Wandb("train/ahead")] = None  # of modules of model.predict_ahead
    layer_grad_norms: Annotated[dict[str, float] | None, Wandb("layers/grad_norm")] = None  # see monitor.layers
    layer_rms: Annotated[dict[str, float] | None, Wandb("layers/rms")] = None  # root mean square of a layer's result
    experts: Annotated[dict[str, float] | None, Wandb("experts")] = None  # dropped, entropy, largest: of their load
    expert_load: Annotated[list[int] | None, Wandb("experts/load")] = None  # tokens that chose each, in all layers
    recovery_seconds: Annotated[float | None, Wandb("elastic/recovery_seconds")] = None  # of the first after a failure


class MetricsLog(JsonLines):
    """Metrics file of a run: `write_row(row)` is called once per committed step."""

    def write_row(self, row: MetricsRow) -> None:
        """Append a committed step's row to the metrics file, now or as soon as it can be written."""
        self.append(json_records.plain_fields(row))

    @staticmethod
    def read_rows(path: Path | str) -> list[dict[str, Any]]:
        """Return the rows of a metrics file that hold, by step."""
        return valid_rows(json_records.read_lines(path, validate_row))


def validate_row(row: dict[str, Any]) -> dict[str, Any]:
    """Check and return a row of a metrics file of any version. Raises Malformed for a step or a number that is none."""
    return schema.parse_value(_ROW, row)


def valid_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a metrics file that still hold, by step: a row replaces all before it from its step on."""
    valid: list[dict[str, Any]] = []
    for row in rows:
        while valid and valid[-1]["step"] >= row["step"]:
            valid.pop()
        valid.append(row)
    return valid


@cache
def wandb_names() -> dict[str, str]:
    """Return the W&B name of every key of a row of metrics.jsonl that W&B gets."""
    hints = get_type_hints(MetricsRow, include_extras=True)
    return {key: bound.name for key, hint in hints.items() for bound in getattr(hint, "__metadata__", ())}


def wandb_numbers(row: MetricsRow) -> dict[str, float | list[int]]:
    """Return the numbers of a row of metrics.jsonl under their W&B names, as `numbers_by_name` does."""
    return numbers_by_name(vars(row))


def numbers_by_name(values: Mapping[str, Any]) -> dict[str, float | list[int]]:
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


_BLOCK = 4 << 20  # bytes that are read at once
_DECODER = json.JSONDecoder()
_MOST_COLUMNS = 4096  # anybody may have written the file
_Shape = tuple[str | tuple[str | int, ...], ...]  # of a row: its keys, a map's with its own, a list's with its length


class MetricColumns:
    """Numbers of a run's metrics file: `steps`, and by W&B name a column with a number for each of these steps, NaN for
    none. A row replaces all from its step on. `unread`: whole lines that are no rows, and were passed over.

    A row is a line as MetricsLog writes it, of any version; of an unknown one, the keys that are known here. Rows of
    one shape are checked together, column by column, which is much faster than each row against a schema.
    """

    def __init__(self, path: Path):
        """Prepare to read the columns of the metrics.jsonl at `path`, which need not be there yet."""
        self._path = path
        self._forget_rows()

    def _forget_rows(self) -> None:
        """Forget all that was read of metrics.jsonl."""
        self._place = self.unread = 0  # the place is behind the last whole line
        self._numbers: dict[str, array[float]] = {}
        self.steps = array("q")

    @property
    def column_names(self) -> list[str]:
        """Return the W&B names of the columns of metrics.jsonl."""
        return list(self._numbers)

    def column(self, name: str) -> array[float]:
        """Return the column of metrics.jsonl of that W&B name, as long as `steps`; all NaN if there is none."""
        numbers = self._numbers.get(name)
        return _pad_column(array("d") if numbers is None else numbers, len(self.steps))

    def read_rows_and_count_kept(self) -> int:
        """Read the new lines of metrics.jsonl; return how many leading rows still hold."""
        rows_kept = len(self.steps)  # a file that has become shorter is read anew
        with suppress(FileNotFoundError, NotADirectoryError):
            for lines in self._new_lines():
                rows_kept = min(rows_kept, self._add_lines(lines))
        return min(rows_kept, len(self.steps))

    def _new_lines(self) -> Iterator[list[bytes]]:
        """Yield the whole lines that metrics.jsonl has got since the last time, a block at once; what follows may be
        torn."""
        with documents.open_regular_file(self._path) as file:
            if file.seek(0, io.SEEK_END) < self._place:
                self._forget_rows()
            file.seek(self._place)
            rest = b""
            while block := file.read(_BLOCK):
                *whole_lines, rest = (rest + block).split(b"\n")
                self._place += sum(map(len, whole_lines)) + len(whole_lines)
                yield whole_lines
                if len(rest) > LARGEST:
                    self._place, rest, self.unread = self._place + len(rest), b"", self.unread + 1

    def _add_lines(self, lines: Sequence[bytes]) -> int:
        """Add the rows on lines of metrics.jsonl; return how many rows before them still hold."""
        rows_kept, last = len(self.steps), self.steps[-1] if self.steps else -1
        shape: _Shape = ()
        alike: list[list[Any]] = []  # the values of rows of that shape, which become columns together
        for line in lines:
            row = _parse_row(line)
            if row is None:
                self.unread += 1
                continue
            step: int = row["step"]
            row_shape, values = _flatten_row(row)
            if row_shape != shape or step <= last:
                self._add_rows(shape, alike)
                shape, alike = row_shape, []
            if step <= last:  # after a rollback
                rows_kept = min(rows_kept, self._roll_back_rows(step))
            last = step
            self.steps.append(step)
            alike.append(values)
        self._add_rows(shape, alike)
        return rows_kept

    def _roll_back_rows(self, step: int) -> int:
        """Forget the rows of metrics.jsonl from a step on; return how many there are before it."""
        before = bisect_left(self.steps, step)
        del self.steps[before:]
        for longer in self._numbers.values():
            del longer[before:]
        return before

    def _add_rows(self, shape: _Shape, rows: Sequence[Sequence[Any]]) -> None:
        """Add to the columns of metrics.jsonl the values of rows of one shape, whose steps have just been added."""
        before = len(self.steps) - len(rows)
        for name, values in zip(_flat_names(shape), zip(*rows, strict=True), strict=True):
            if name and (numbers := _convert_numbers(values)) is not None:
                if name not in self._numbers and len(self._numbers) < _MOST_COLUMNS:
                    self._numbers[name] = array("d")
                column = self._numbers.get(name)
                if column is not None and len(_pad_column(column, before)) == before:  # else a name comes twice
                    column.extend(numbers)


def _parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the row on a line of a metrics file, with a valid step; None if it is none."""
    try:
        row, end = _DECODER.raw_decode(text := line.decode())
        step = row["step"] if end == len(text) else None
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    return row if type(step) is int and 0 <= step < 1 << 53 and isinstance(row, dict) else None


def _pad_column(column: array[float], length: int) -> array[float]:
    """Return a column of metrics after adding NaN at its end, in place, up to a length."""
    if len(column) < length:
        column.extend([nan] * (length - len(column)))
    return column


def _flatten_row(row: dict[str, Any]) -> tuple[_Shape, list[Any]]:
    """Return the shape of a row of metrics.jsonl, and its values, the parts of maps and lists each."""
    shape: list[Any] = []
    values: list[Any] = []
    for key, value in row.items():
        if type(value) is dict:
            shape.append((key, *value))
            values += value.values()
        elif type(value) is list:
            shape.append((key, len(value)))
            values += value
        else:
            shape.append(key)
            values.append(value)
    return tuple(shape), values


@lru_cache(maxsize=8)
def _flat_names(shape: _Shape) -> list[str]:
    """Return the W&B names of the values in rows of metrics.jsonl of that shape, "" of what W&B does not get."""
    known = wandb_names()
    names: list[str] = []
    for part in shape:
        if isinstance(part, str):
            names.append(known.get(part, ""))
        else:
            key, *inner = part
            places: Iterable[Any] = range(inner[0]) if inner and isinstance(inner[0], int) else inner
            names += [f"{known[key]}/{place}" if key in known else "" for place in places]
    return names


def _convert_numbers(values: Sequence[Any]) -> array[float] | None:
    """Return values in rows of metrics as floats, NaN where one is no number; None if none is."""
    try:
        return array("d", values)
    except (TypeError, OverflowError):  # few have texts, as NaN and infinities are, or nothing
        numbers = [_convert_number(value) for value in values]
    return None if all(n is None for n in numbers) else array("d", [nan if n is None else n for n in numbers])


def _convert_number(value: Any) -> float | None:
    """Return a value in a row of metrics as a float, None if it is none; NaN and infinities are texts there."""
    if isinstance(value, int):  # True is 1: the step was skipped
        return float(value) if abs(value) < 1 << 1000 else inf
    return value if isinstance(value, float) else NON_FINITE.get(value) if isinstance(value, str) else None

"""Tables of measured runs: each row of a CSV file as a configuration, beside the seconds that its step took."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from platform.boundary.refusals import ConfigError, closest, refuse_all
from platform.config.fields import Compose
from platform.costs.machine import Hardware
from platform.costs.price import StepPrice, price_of
from platform.costs.step_work import EVEN, StepWork
from platform.plan.core.plan import Plan
from platform.plan.operations.words import flops
from platform.planning.make_plan import make_plan
from platform.planning.step_price import read_hardware, work_of

# column -> key that its cells set; a column with a key's own name, such as model.kv_heads, sets that key
KEYS = {
    "model": "model",
    "layers": "model.layers",
    "d_model": "model.d_model",
    "heads": "model.heads",
    "length": "model.length",
    "vocab": "model.vocab",
    "microbatch": "train.microbatch",
    "global_batch": "train.global_batch",
    "tensor": "tensor",
    "branch": "branch",
    "stages": "pipeline.stages",
    "chunks": "pipeline.chunks",
    "data": "parallel.data",
    "context": "parallel.context",
    "experts": "parallel.experts",
    "tensor_experts": "parallel.tensor_experts",
    "recompute": "recompute",
    "zero": "parallel.zero",
    "precision": "precision",
    "overlap": "parallel.overlap",
    "dropout": "model.dropout",
    "kv_heads": "model.kv_heads",
    "d_ff": "model.d_ff",
    "activation": "model.activation",
    "model_experts": "model.experts",
    "experts_per_token": "model.experts_per_token",
    "expert_d_ff": "model.expert_d_ff",
    "shared_experts": "model.shared_experts",
    "capacity_factor": "model.capacity_factor",
}
SHAPE = ("layers", "d_model", "heads", "length", "vocab")  # of a model that is no preset
NEEDED = ("gpus", *SHAPE, "microbatch", "global_batch")
INTEGERS = (*NEEDED, "stages", "chunks", "data", "context", "experts", "zero", "kv_heads", "d_ff")
MEASURED = ("seconds", "tflops")  # of a step; of a GPU, by the FLOPs that `counted` says
OTHERS = ("name", "hardware", "axes", "schedule", "system", "counted", *MEASURED)
COUNTED = ("model", "hardware")  # FLOPs of the model alone, or with recomputation
NARROW = "fp8"  # a precision of rows: products of layers' weights in 8 bits, all else in bf16
RIVALS = ("model", *SHAPE, "global_batch", "gpus", "hardware")  # what plans share that are ranked by their steps


class System(NamedTuple):
    """Differences of a system that measured a row from ours: values of fields of Execution, and of Hardware."""

    execution: Mapping[str, Any] = {}
    hardware: Mapping[str, float] = {}


USUAL = "usual"
SYSTEMS = {
    USUAL: System({"repeats_all": True}),
    "ours": System(),  # leaves out what no gradient needs of a recomputed layer: its last product
    # sums gradients in fp16, each tensor rank keeps all of a layer's input for recomputation, and a stage stands by
    # while it exchanges activations (p2p_communication.py synchronizes the device)
    "megatron-2021": System({"gradient_bytes": 2, "kept_whole": True, "repeats_all": True, "stands_by": True}),
    # ZeRO-3 of v0.3.15 (stage3.py, partition_parameters.py): `_allgather_param` synchronizes the device, torch copies
    # the shares out of its own buffer, and gradients are summed by all_reduce unless `contiguous_gradients`, off by
    # default. Its collectives leave a node as over 1.9 adapters: fitted on table 2 of Narayanan et al. 2021
    "deepspeed-2021": System(
        {"gradient_bytes": 2, "kept_whole": True, "repeats_all": True, "by_weight": True}, {"adapters": 1.9}
    ),
    # as ours: torch's recomputation by saved tensors (use_reentrant=False) stops where all of them are there
    "fsdp": System(),
}


@dataclass(frozen=True)
class MeasuredRun:
    """Row of a table of measured runs: its `cells` by column, the `work` of its plan, the hardware that it ran on, and
    the `seconds` measured of a step. `model_flops` are the step's as the table counts them."""

    name: str
    cells: Mapping[str, str]
    work: StepWork
    hardware: Hardware
    seconds: float
    counted_flops: float
    system: System = field(default_factory=System)

    def predicted(self, constants: Mapping[str, float]) -> StepPrice:
        """Return the price of the run's step with these constants of its hardware."""
        return price_of(self.work, self.hardware.with_constants({**constants, **self.system.hardware}))

    @property
    def rivals(self) -> tuple[str, ...]:
        """Return a key of all that runs share which differ in their plans alone: model, batch, devices."""
        return tuple(self.cells.get(column, "") for column in RIVALS)


def read_runs(path: str, compose: Compose, hardware: str = "", mark: str = "") -> list[MeasuredRun]:
    """Read a table of measured runs. `compose`: makes a configuration of arguments; `hardware`: the rows' hardware if
    they name none; `mark`: a column of marks. Raises ConfigError with every mistake of the table, by row and column."""
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader((line for line in file if not line.startswith("#")), skipinitialspace=True)
            reader.fieldnames = columns = [_column(title) for title in reader.fieldnames or ()]
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    refuse_all(_violations_of_columns(path, columns, hardware, mark))
    if not rows:
        raise ConfigError(f"{path}: has no rows below its columns")
    found, lines = [], []
    for number, row in enumerate(rows, 1):
        cells = {column: (value or "").strip() for column, value in row.items() if isinstance(column, str)}
        cells["hardware"] = cells.get("hardware") or hardware
        where = f"{path}, row {number}"
        if None in row:
            lines.append(f"{where}: has more cells than there are columns")
        elif wrong := list(_violations_of_cells(cells)):
            lines += [f"{where}, column {line}" for line in wrong]
        else:
            try:
                found.append(_run(cells, str(number), compose))
            except ConfigError as error:
                lines += [f"{where}: {line}" for line in error.violations]
    refuse_all(lines)
    return found


def _column(title: str) -> str:
    """Return the name of a column, as which titles such as `Global batch` and `TFLOP/s` are understood too."""
    name = title.strip().lower().replace(" ", "_").removesuffix("_per_gpu")
    return {"tflop/s": "tflops"}.get(name, name)


def _violations_of_columns(path: str, columns: Sequence[str], hardware: str, mark: str) -> Iterator[str]:
    """Yield a line per column that is unknown or given twice, and per column that is needed and missing."""
    known = (*KEYS, *NEEDED, *OTHERS, mark)
    yield from (f"{path}, column {column}: is given twice" for column, n in Counter(columns).items() if n > 1)
    for column in columns:
        if column not in known and "." not in column:
            yield f"{path}, column {column}: unknown; nearest legal: {', '.join(closest(column, known)[:3])}, or a key"
    if mark and mark not in columns:
        yield f"{path}: calibrate={mark} is no share of the rows, and no column"
    needed = [*_needed_columns("model" in columns), *([] if hardware else ["hardware"])]
    yield from (f"{path}: column {column} is missing" for column in needed if column not in columns)
    if not set(columns) & set(MEASURED):
        yield f"{path}: column seconds, or tflops, is missing"


def _needed_columns(preset: bool) -> tuple[str, ...]:
    """Return the columns that a row needs whose model is a `preset`, or is not."""
    return tuple(column for column in NEEDED if not (preset and column in SHAPE))


def _violations_of_cells(cells: Mapping[str, str]) -> Iterator[str]:
    """Yield a line per cell of a row that is empty and needed, or no number where it should be one."""
    needed = _needed_columns(bool(cells.get("model")))
    for column in INTEGERS:
        text = cells.get(column, "")
        if column in needed and not text:
            yield f"{column}: is empty"
        elif text and not (text.isdecimal() and (int(text) or column in ("zero", "kv_heads", "d_ff"))):
            yield f"{column}={text}: must be a whole number"
    given = [(column, cells[column]) for column in MEASURED if cells.get(column)]
    if len(given) != 1:
        yield f"{' or '.join(MEASURED)}: exactly one must be given"
    for column, text in given:
        try:
            positive = 0 < float(text) < float("inf")
        except ValueError:
            positive = False
        if not positive:
            yield f"{column}={text}: must be a number > 0"
    for column, legal in (("counted", COUNTED), ("system", tuple(SYSTEMS))):
        if (text := cells.get(column, "")) and text not in legal:
            yield f"{column}={text}: must be {' or '.join(legal)}"


def _run(cells: Mapping[str, str], number: str, compose: Compose) -> MeasuredRun:
    """Return the measured run of a row's cells. Raises ConfigError if they are no legal plan."""
    hardware = read_hardware(cells["hardware"])
    narrow = NARROW if cells.get("precision") == NARROW else ""
    if narrow and narrow not in hardware.peaks:
        legal = ", ".join(sorted(hardware.peaks))
        raise ConfigError(f"column precision={narrow}: {hardware.name} has no such peak; nearest legal: {legal}")
    config = compose(list(overrides_of(cells)))
    gpus = int(cells["gpus"])
    pipeline = config.pipeline
    loop = tuple(range(pipeline.stages)) * pipeline.chunks  # where the schedules whose makespan is known place chunks
    plan = make_plan(config, gpus, loop if pipeline.kind in EVEN else None)
    config.parallel.data = plan.replicas
    if plan.mesh.size != gpus:
        raise ConfigError(f"column gpus={gpus}: the plan has {plan.mesh.size} workers, {plan.mesh}")
    system = SYSTEMS[cells.get("system") or USUAL]
    work = work_of(config, plan, narrow=narrow, **system.execution)
    counted = counted_flops(plan, cells.get("counted") == "hardware")
    measured = cells.get("seconds")
    seconds = float(measured) if measured else counted / (float(cells["tflops"]) * 1e12 * gpus)
    return MeasuredRun(cells.get("name") or f"row {number}", cells, work, hardware, seconds, counted, system)


def counted_flops(plan: Plan, recomputed: bool) -> float:
    """Return the FLOPs of a step of a plan, of the model alone or with all `recomputed` operations."""
    again = sum(flops(o.operation, plan.sizes) for o in plan.operations.values() if o.operation.recomputed)
    per_token = again / (plan.sizes["batch"] * plan.sizes["length"]) if recomputed else 0.0
    return (plan.flops_per_token + per_token) * plan.tokens_per_step


def overrides_of(cells: Mapping[str, str]) -> Iterator[str]:
    """Yield the arguments of the configuration that a row describes; what it leaves open is as it is by default."""
    defaults = {"cluster.device": "cuda", "train.steps": "1", "parallel.data": "-1", "model.capacity_factor": "0"}
    given = {KEYS.get(column, column) for column, text in cells.items() if text}
    yield from (f"{key}={value}" for key, value in defaults.items() if key not in given)
    stages, chunks = cells.get("stages") or "1", cells.get("chunks") or "1"
    usual = "none" if stages == "1" else "interleaved" if chunks != "1" else "1f1b"
    yield f"pipeline={cells.get('schedule') or usual}"
    skipped = {"stages": "1", "chunks": "1"}
    for column, text in cells.items():
        key = KEYS.get(column, column if "." in column else "")
        if key and text and skipped.get(column) != text:
            yield f"{key}={'bf16' if text == NARROW and key == 'precision' else text}"
    axes = cells.get("axes", "")
    for pair in filter(None, axes.replace(";", " ").split()):
        yield f"tensor.axes.{pair}" if "=" in pair else f"tensor.axes.t={pair}"

"""Measured runs: tables of them as CSV files, and their steps compared with predicted ones.

In `read_measured_runs` each row is a configuration, beside the seconds that its step took; `compare_runs` fits
constants on some runs, and gives errors and rankings of the others. `write_run_table` writes runs as measured: from a
row, `python -m platform.plan compare` makes the run's plan again.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, zip_longest
from math import floor, inf, isfinite, log, nan
from operator import itemgetter
from pathlib import Path
from statistics import mean, median
from time import monotonic
from typing import Any, NamedTuple

from platform.boundary import refusals
from platform.boundary.documents import parse_yaml, read_bytes
from platform.boundary.local_files import replace_text
from platform.boundary.redaction import redact_secrets
from platform.boundary.refusals import ConfigError, closest_values, format_violation, refuse_all, refuse_failures
from platform.boundary.schema import Malformed, parse_value
from platform.boundary.terminal import align_rows
from platform.config.arguments import quote_value
from platform.config.composition import CONF
from platform.config.fields import KEYS, Compose, Config, flatten_config
from platform.config.key import WORKERS
from platform.model import build_model
from platform.monitor import events, json_records
from platform.monitor.json_records import JOURNAL, METRICS
from platform.monitor.metrics import MetricsLog
from platform.predict.calibration import fit_constants, kendall_tau
from platform.predict.hardware import Hardware
from platform.predict.make_plan import make_plan
from platform.predict.price import StepPrice, price_work
from platform.predict.step_price import build_step_work, find_gpu_hardware, read_hardware
from platform.predict.systems import System, find_redone_words, split_foreign_recompute_words
from platform.predict.work import EVEN, StepWork, count_step_flops

# column -> key that its cells set; a column with a key's own name, such as model.kv_heads, sets that key
COLUMNS = {
    key.rpartition(".")[2]: key
    for key in (
        "model model.layers model.d_model model.heads model.length model.vocab train.microbatch train.global_batch"
        " tensor branch pipeline.stages pipeline.chunks parallel.data parallel.context parallel.experts"
        " parallel.tensor_experts recompute parallel.zero precision parallel.overlap model.dropout model.kv_heads"
        " model.d_ff model.activation model.experts_per_token model.expert_d_ff model.shared_experts"
        " model.capacity_factor"
    ).split()
} | {"model_experts": "model.experts"}
SHAPE = ("layers", "d_model", "heads", "length", "vocab")  # of a model that is no preset
NEEDED = ("gpus", *SHAPE, "microbatch", "global_batch")
ZERO = ("zero", "kv_heads", "d_ff", "mtp")  # columns whose number may be 0
INTEGERS = (*NEEDED, "stages", "chunks", "data", "context", "experts", *ZERO)
MEASURED = ("seconds", "tflops")  # of a step; of a GPU, by the FLOPs that `counted` says
OTHERS = ("name", "hardware", "axes", "schedule", "layers_per_stage", "mtp", "system", "release", "counted", *MEASURED)
REPORTED = 5.0  # seconds after which it is said how many rows are read
DIGITS = 18  # most of a whole number
UNPLANNED = ("name", "release", "counted", *MEASURED)  # columns on which a row's plan does not depend
COUNTED = ("model", "hardware")  # FLOPs of the model alone, or with recomputation
# precision of rows -> peak of products of layers' weights in 8 or 4 bits, scaled by tensors or by blocks; else bf16
NARROW = {"fp8": "fp8", "mxfp8": "fp8", "nvfp4": "nvfp4"}
# what plans share that are ranked by their steps, beside the model
RIVALS = ("mtp", "global_batch", "gpus", "hardware", "precision", "system", "release", "counted")
USUAL = "usual"
SYSTEMS = CONF / "system"  # folder with a file for each system that measured rows


def read_system(name: str) -> System:
    """Return the system `name` of `conf/system/`. Raises ConfigError if its file describes none."""
    with refuse_failures("system", name, OSError, Malformed, why="cannot be read ({})"):
        values = parse_value(dict[str, Any], parse_yaml(read_bytes(SYSTEMS / f"{name}.yaml")) or {})
        for key in values.keys() - (known := System.__dataclass_fields__.keys()):
            legal = closest_values(key, known)[:3]
            raise ConfigError(format_violation(f"system {name}: {key}", values[key], "unknown field", legal))
        return parse_value(System, values)


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

    def predict_price(self, constants: Mapping[str, float]) -> StepPrice:
        """Return the price of the run's step with these constants of its hardware."""
        system = self.work.execution.system
        fixed = {"adapters": system.adapters} if system.adapters else {}
        usual = system.constants.get(self.hardware.name, {})
        return price_work(self.work, self.hardware.replace_constants({**usual, **constants, **fixed}))

    @property
    def group(self) -> str:
        """Return the name of the runs that have one set of constants: of a hardware, and a release or else a system."""
        return " ".join(filter(None, (self.hardware.name, self.cells.get("release") or self.cells.get("system"))))

    @property
    def rival_key(self) -> tuple[str, ...]:
        """Return a key of all that runs share which differ in their plans alone: model, batch, devices."""
        shared = {column for column in self.cells if COLUMNS.get(column, column).startswith("model")}
        return tuple(f"{column}={self.cells[column]}" for column in sorted({*RIVALS, *shared} & self.cells.keys()))


def read_measured_runs(
    path: str, compose: Compose, hardware: str = "", mark: str = "", report: Callable[[str], object] = str
) -> list[MeasuredRun]:
    """Read a table of measured runs. `compose`: makes a configuration of arguments; `hardware`: the rows' hardware if
    they name none; `mark`: a column of marks; `report`: takes a line now and then that says how far it is. Raises
    ConfigError with every mistake of the table, by row and column."""
    try:
        table = io.StringIO(read_bytes(path, json_records.LARGEST).decode("utf-8-sig"), newline="")
        reader = csv.DictReader(
            (line for line in table if line.strip() and not line.startswith("#")), skipinitialspace=True
        )
        reader.fieldnames = columns = [_column_name(title) for title in reader.fieldnames or ()]
        rows = list(reader)
    except (OSError, UnicodeDecodeError, Malformed, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not columns:
        raise ConfigError(f"{path}: is empty")
    if foreign := [separator for separator in ";\t|" if len(columns) == 1 and separator in columns[0]]:
        raise ConfigError(f"{path}: its columns are separated by {foreign[0]!r}, must be by ','")
    refuse_all(_violations_of_columns(path, columns, hardware, mark))
    if not rows:
        raise ConfigError(f"{path}: has no rows below its columns")
    if hardware:
        read_hardware(hardware)  # refused although all rows may name another
    runs, lines, shown = list[MeasuredRun](), list[str](), monotonic()
    works: dict[frozenset[tuple[str, str]], StepWork] = {}
    for number, row in enumerate(rows, 1):
        if monotonic() - shown > REPORTED:
            report(f"reading row {number} of {len(rows)}")
            shown = monotonic()
        cells = {column: (value or "").strip() for column, value in row.items() if isinstance(column, str)}
        cells["hardware"] = cells.get("hardware") or hardware
        where = f"{path}, row {number}"
        if None in row:
            lines.append(f"{where}: has more cells than there are columns")
        elif cell_faults := list(_violations_of_cells(cells)):
            lines += [f"{where}, column {line}" for line in cell_faults]
        else:
            try:
                planned = frozenset((k, v) for k, v in cells.items() if k not in UNPLANNED and k != mark)
                works[planned] = work = works.get(planned) or _build_work(cells, compose)
                runs.append(_build_run(cells, str(number), work))
            except ConfigError as error:
                lines += [f"{where}: {line}" for line in error.violations]
    refuse_all(lines)
    return runs


def _column_name(title: str) -> str:
    """Return the name of a column, as which titles such as `Global batch` and `TFLOP/s` are understood too."""
    name = title.strip().lower().replace(" ", "_").removesuffix("_per_gpu")
    return {"tflop/s": "tflops"}.get(name, name)


def _violations_of_columns(path: str, columns: Sequence[str], hardware: str, mark: str) -> Iterator[str]:
    """Yield a line per column that is unknown or given twice, and per column that is needed and missing."""
    known = (*COLUMNS, *NEEDED, *OTHERS, mark)
    yield from (f"{path}, column {column}: is given twice" for column, n in Counter(columns).items() if n > 1)
    for column in columns:
        if column not in known and "." not in column:
            near = ", ".join(closest_values(column, known)[:3])
            yield f"{path}, column {column}: unknown; nearest legal: {near}, or a key"
    if mark and mark not in columns:
        yield f"{path}: calibrate={mark} is no share of the rows, and no column"
    needed = [*_list_needed_columns("model" in columns), *([] if hardware else ["hardware"])]
    yield from (f"{path}: column {column} is missing" for column in needed if column not in columns)
    if not set(columns) & set(MEASURED):
        yield f"{path}: column seconds, or tflops, is missing"


def _list_needed_columns(preset: bool) -> tuple[str, ...]:
    """Return the columns that a row needs whose model is a `preset`, or is not."""
    return tuple(column for column in NEEDED if not (preset and column in SHAPE))


def _violations_of_cells(cells: Mapping[str, str]) -> Iterator[str]:
    """Yield a line per cell of a row that is empty and needed, or no number where it should be one."""
    needed = _list_needed_columns(bool(cells.get("model")))
    for column in INTEGERS:
        text = cells.get(column, "")
        if column in needed and not text:
            yield f"{column}: is empty"
        elif text and not (text.isdecimal() and (text.strip("0") or column in ZERO)):
            yield format_violation(column, text, "must be a whole number")
        elif len(text) > DIGITS or (column == "gpus" and int(text or 0) > WORKERS):
            yield format_violation(column, text, f"must be <= {WORKERS if column == 'gpus' else 10**DIGITS:,}")
    measured_cells = [(column, cells[column]) for column in MEASURED if cells.get(column)]
    if len(measured_cells) != 1:
        yield f"{' or '.join(MEASURED)}: exactly one must be given"
    for column, text in measured_cells:
        try:
            positive = 0 < float(text) < float("inf")
        except ValueError:
            positive = False
        if not positive:
            yield format_violation(column, text, "must be a number > 0")
    for column, legal in (("counted", COUNTED), ("system", sorted(path.stem for path in SYSTEMS.glob("*.yaml")))):
        if (text := cells.get(column, "")) and text not in legal:
            yield format_violation(column, text, f"must be {' or '.join(legal)}")


def _build_work(cells: Mapping[str, str], compose: Compose) -> StepWork:
    """Return the work of a step of the run of a row's cells. Raises ConfigError if they are no legal plan."""
    hardware = read_hardware(cells["hardware"])
    narrow = NARROW.get(precision := cells.get("precision", "").strip("'\""), "")
    if precision and (narrow or precision) not in hardware.peaks:
        legal = sorted(word for word in {*hardware.peaks, *NARROW} if NARROW.get(word, word) in hardware.peaks)
        raise ConfigError("column precision", precision, f"{hardware.name} has no such peak", legal)
    config = compose(list(iterate_overrides(cells)))
    gpus, predicted = int(cells["gpus"]), int(cells.get("mtp") or 0)
    _refuse_unpriced_prediction(config, predicted, bool(cells.get("layers_per_stage")))
    config.model.layers += predicted
    config.train.pair_passes = "off"  # what a system overlaps is its own
    config.model.predict_ahead = 0  # what modules take is that of layers and heads
    pipeline = config.pipeline
    loop = tuple(range(pipeline.stages)) * pipeline.chunks  # where the schedules whose makespan is known place chunks
    parts = list(_divide_units(config, text, predicted)) if (text := cells.get("layers_per_stage", "")) else []
    plan = make_plan(config, gpus, loop if pipeline.kind in EVEN else None, parts)
    config.parallel.data = plan.num_replicas
    if plan.mesh.world_size != gpus:
        raise ConfigError(f"column gpus={gpus}: the plan has {plan.mesh.world_size} workers, {plan.mesh}")
    redone = split_foreign_recompute_words(cells.get("recompute", ""))
    known = find_redone_words(plan) if redone else set[str]()
    if unknown := " ".join(sorted(redone - known)):
        constraint = "nothing of this model is computed again by that name"
        raise ConfigError("column recompute", unknown, constraint, [*KEYS["recompute"].choices, *sorted(known)])
    system = read_system(cells.get("system") or USUAL)
    return build_step_work(config, plan, narrow=narrow, system=system, more_heads=predicted, redone=redone)


def _refuse_unpriced_prediction(config: Config, predicted: int, is_divided: bool) -> None:
    """Refuse layers of multi-token prediction without a price; `is_divided`: the row says which layers a stage has."""
    reasons = {
        f"model.kind={config.model.kind} has none, model.kind=decoder may": config.model.kind != "decoder",
        f"must be <= {config.model.layers}, the model's layers": predicted > config.model.layers,
        "needs layers_per_stage, to which the last stage adds them": config.pipeline.stages > 1 and not is_divided,
    }
    broken = [why for why, applies in reasons.items() if applies and predicted]
    refuse_all(format_violation("column mtp", predicted, why, [0]) for why in broken)


def _divide_units(config: Config, text: str, predicted: int) -> Iterator[Sequence[str]]:
    """Yield the units of each chunk of a model whose layers a row divides: one number of layers for every stage, or one
    for each chunk in the model's order; the last chunk has layers of multi-token prediction too, `predicted` of them.
    Raises ConfigError for a number that does not do so."""
    chunks, layers = config.pipeline.stages * config.pipeline.chunks, config.model.layers - predicted
    counts = [int(number) for number in text.split() if number.isdecimal()]
    if len(counts) == 1:
        counts = [counts[0] // config.pipeline.chunks] * chunks
    units, layer_units = list(getattr(build_model(config.model), "units", ())), layers + predicted
    if len(counts) != chunks or sum(counts) != layers or len(units) != layer_units + 2:  # with embedding and head
        legal = [f"{layers // config.pipeline.stages}"] if layers % chunks == 0 else []
        raise ConfigError("column layers_per_stage", text, f"must add up to {layers} layers in {chunks} chunks", legal)
    ends = [0, *(1 + n for n in accumulate(counts[:-1])), len(units)]
    yield from (units[first:end] for first, end in pairwise(ends))


def _build_run(cells: Mapping[str, str], number: str, work: StepWork) -> MeasuredRun:
    """Return the measured run of a row's cells, whose step has this `work`."""
    counted = count_step_flops(work.plan, cells.get("counted") == "hardware", work.execution)
    measured = cells.get("seconds")
    seconds = float(measured) if measured else counted / (float(cells["tflops"]) * 1e12 * int(cells["gpus"]))
    hardware = read_hardware(cells["hardware"])
    return MeasuredRun(cells.get("name") or f"row {number}", cells, work, hardware, seconds, counted)


def iterate_overrides(cells: Mapping[str, str]) -> Iterator[str]:
    """Yield the arguments of the configuration that a row describes; what it leaves open is as it is by default."""
    defaults = {"cluster.device": "cuda", "train.steps": "1", "parallel.data": "-1", "model.capacity_factor": "0"}
    keys_present = {COLUMNS.get(column, column) for column, text in cells.items() if text}
    yield from (f"{key}={value}" for key, value in defaults.items() if key not in keys_present)
    stages, chunks = cells.get("stages") or "1", cells.get("chunks") or "1"
    usual = "none" if stages == "1" else "interleaved" if chunks != "1" else "1f1b"
    yield f"pipeline={cells.get('schedule') or usual}"
    skipped = {"stages": "1", "chunks": "1"}
    for column, text in cells.items():
        key = COLUMNS.get(column, column if "." in column else "")
        if key and text and skipped.get(column) != text:
            narrow, redone = (
                key == "precision" and text in NARROW,
                key == "recompute" and split_foreign_recompute_words(text),
            )
            yield f"{key}={'bf16' if narrow else 'none' if redone else text}"
    axes = cells.get("axes", "")
    for pair in filter(None, axes.replace(";", " ").split()):
        yield f"tensor.axes.{pair}" if "=" in pair else f"tensor.axes.t={pair}"


# constants of a hardware that measured steps can settle, and their first values
CONSTANTS = {
    "products": 0.8, "memory": 0.8, "attention": 0.5, "interference": 0.4, "node": 0.8, "network": 0.8, "launch": 6e-6,
}  # fmt: skip
FITTED = ("products", "memory", "attention", "interference")  # few tables tell more apart
ROUNDING = 1e-9

Constants = Mapping[str, Mapping[str, float]]  # name of a group of runs -> its constants


class ErrorSizes(NamedTuple):
    """Errors of predictions, as shares of the measured seconds: mean, median, 90th percentile and largest of their
    sizes, over `runs` of them."""

    runs: int
    mean: float
    median: float
    p90: float
    largest: float


def summarize_errors(errors: Sequence[float]) -> ErrorSizes:
    """Return the sizes of a list of errors of predictions, which is not empty."""
    sizes = sorted(map(abs, errors))
    ninth = sizes[max(0, -floor(-0.9 * len(sizes)) - 1)]
    return ErrorSizes(len(sizes), mean(sizes), median(sizes), ninth, sizes[-1])


class Ranking(NamedTuple):
    """Ranking of `runs` of one model and batch by their predictions: Kendall's `tau`, and `regret`, by which share the
    run that is predicted fastest takes longer than the fastest one."""

    runs: tuple[str, ...]
    tau: float
    regret: float


class Comparison(NamedTuple):
    """Predicted seconds of measured runs, whether each was `fitted` on, and the constants of every group."""

    runs: Sequence[MeasuredRun]
    predicted: Sequence[float]
    fitted: Sequence[bool]
    constants: Constants

    @property
    def relative_errors(self) -> list[float]:
        """Return by which share each prediction is longer than the measured seconds."""
        return [p / run.seconds - 1 for p, run in zip(self.predicted, self.runs, strict=True)]

    def score_runs(self, fitted: bool) -> ErrorSizes | None:
        """Return the scores of the runs that constants were `fitted` on, or of the others; None if there are none."""
        errors = [e for e, marked in zip(self.relative_errors, self.fitted, strict=True) if marked == fitted]
        return summarize_errors(errors) if errors else None

    def score_rankings(self) -> list[Ranking]:
        """Return the rankings of all groups of two runs or more that share model, batch and devices."""
        groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for i, run in enumerate(self.runs):
            groups[run.rival_key].append(i)
        rankings = []
        for group in (group for group in groups.values() if len(group) > 1):
            measured, predicted = [self.runs[i].seconds for i in group], [self.predicted[i] for i in group]
            chosen = measured[predicted.index(min(predicted))]
            names = tuple(self.runs[i].name for i in group)
            rankings.append(Ranking(names, kendall_tau(measured, predicted), chosen / min(measured) - 1))
        return rankings


def compare_runs(runs: Sequence[MeasuredRun], marked: Sequence[bool], names: Sequence[str] = FITTED) -> Comparison:
    """Predict the step of each run, after fitting the constants `names` of each group on its `marked` runs."""
    constants = fit_group_constants([run for run, fits in zip(runs, marked, strict=True) if fits], names)
    predicted = [run.predict_price(constants.get(run.group, {})).seconds for run in runs]
    return Comparison(runs, predicted, marked, constants)


def leave_one_out(runs: Sequence[MeasuredRun], names: Sequence[str] = FITTED) -> Comparison:
    """Predict the step of each run with constants that are fitted on all others."""
    predicted = []
    for i, run in enumerate(runs):
        others = [other for j, other in enumerate(runs) if j != i and other.group == run.group]
        predicted.append(run.predict_price(fit_group_constants(others, names).get(run.group, {})).seconds)
    return Comparison(runs, predicted, [False] * len(runs), fit_group_constants(runs, names))


def fit_group_constants(runs: Sequence[MeasuredRun], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the constants of each group of runs, by its name, fitted on them."""
    constants_by_group = {}
    for group in dict.fromkeys(run.group for run in runs):
        log_errors = partial(_log_errors, [run for run in runs if run.group == group])
        constants_by_group[group] = fit_constants(log_errors, {name: CONSTANTS[name] for name in names})
    return constants_by_group


def select_moved(constants: Mapping[str, float]) -> dict[str, float]:
    """Return the fitted constants of a group on which some row depends."""
    return {key: value for key, value in constants.items() if abs(value / CONSTANTS[key] - 1) > ROUNDING}


def _log_errors(runs: Sequence[MeasuredRun], constants: Mapping[str, float]) -> list[float]:
    """Return the logarithms of predicted over measured seconds of runs with some constants."""
    return [log(run.predict_price(constants).seconds / run.seconds) for run in runs]


def mark_fitted_runs(runs: Sequence[MeasuredRun], calibrate: str) -> list[bool]:
    """Return which runs constants are to be fitted on: evenly spaced ones, of which `calibrate` is the share, or those
    in whose column of that name something else than 0, no or false stands; none if it is "". Raises ConfigError."""
    if not calibrate:
        return [False] * len(runs)
    if not is_share(calibrate):
        return [run.cells.get(calibrate, "").lower() not in ("", "0", "no", "false") for run in runs]
    if not 0 < (share := float(calibrate)) <= 1:
        raise ConfigError(f"calibrate={calibrate}: must be > 0 and <= 1, or a column")
    return [floor((i + 1) * share + ROUNDING) > floor(i * share + ROUNDING) for i in range(len(runs))]


def is_share(calibrate: str) -> bool:
    """Return True if the value of `calibrate` is a number, and no column."""
    try:
        float(calibrate)
    except ValueError:
        return False
    return True


def dump_comparison(c: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON-able data."""
    rows = [
        {"name": run.name, "predicted": p, "measured": run.seconds, "error": e, "fitted": marked}
        for run, p, e, marked in zip(c.runs, c.predicted, c.relative_errors, c.fitted, strict=True)
    ]
    sizes = {"fitted": c.score_runs(True), "scored": c.score_runs(False)}
    scores = {key: errors and errors._asdict() for key, errors in sizes.items()}
    return {
        "rows": rows,
        **scores,
        "rankings": [r._asdict() for r in c.score_rankings()],
        "constants": dict(c.constants),
    }


def format_prediction_errors(c: Comparison) -> Sequence[str]:
    """Return a comparison as lines for people."""
    width = max(len(run.name) for run in c.runs)
    lines = [f"{'':{width}}  {'predicted':>11}  {'measured':>11}  {'TFLOP/s':>8}  {'error':>7}"]
    for run, p, error, marked in zip(c.runs, c.predicted, c.relative_errors, c.fitted, strict=True):
        speed = run.counted_flops / (p * run.work.plan.mesh.world_size) / 1e12
        note = "  fitted on" if marked else ""
        shown = f"{speed:.2g}" if speed < 1 else f"{speed:.1f}"
        errors = f"{run.seconds:>9.4g} s  {shown:>8}  {_format_share(error, '+.1%'):>7}{note}"
        lines.append(f"{run.name:{width}}  {p:>9.4g} s  {errors}")
    for name, constants in c.constants.items():
        moved = [f"{key} {value:.3g}" for key, value in select_moved(constants).items()]
        lines.append(f"{name} fitted: {', '.join(moved) or 'no row depends on a constant'}")
        for key in (key for key in constants if key != "interference" and constants[key] > 1):
            lines.append(f"  {key} {constants[key]:.3g} is above 1: no speed, but a cause of time that is missing")
    for title, scores in (("fitted on", c.score_runs(True)), ("scored", c.score_runs(False))):
        if scores:
            sizes = zip(("mean", "median", "p90", "largest"), scores[1:], strict=True)
            shown = ", ".join(f"{size} {_format_share(share, '.2%')}" for size, share in sizes)
            lines.append(f"errors of the {scores.runs} runs {title}: {shown}")
    for r in c.score_rankings():
        regret = f"tau {r.tau:.2f}, regret {_format_share(r.regret, '.2%')}"
        lines.append(f"ranking of {r.runs[0]} ... {r.runs[-1]} ({len(r.runs)}): {regret}")
    return lines


def _format_share(share: float, layout: str) -> str:
    """Format a share by a layout of percents, and a huge one in few digits."""
    return f"{share:{layout}}" if abs(share) < 1e4 else f"{100 * share:.3g}%"


# Keys that a scheme's file gives, by how they begin.
GIVEN = ("tensor.axes", "tensor.order", "tensor.regions", "tensor.parameters", "tensor.scheme", "pipeline.kind")
WARM_UP = 3  # first steps of a generation, which are slower
_STATES = {refusals.DONE: "", refusals.STOPPED: "stopped", None: "not run"}  # exit status -> state of a run of a sweep


class TrainedRun(NamedTuple):
    """Run that was trained: the `arguments` that name it, its configuration, all keys settled, and the number of its
    workers."""

    arguments: Sequence[str]
    config: Config
    workers: int

    @property
    def device(self) -> str:
        """Return the kind of device (cpu, cuda) on which the run was measured, as its journal says."""
        path = Path(self.config.run.dir) / JOURNAL
        journal_events = json_records.read_last_lines(path, events.parse_event) if path.is_file() else []
        starts = [event.device for event in journal_events if isinstance(event, events.Starting)]
        return starts[-1] if starts else "cpu"


def write_run_table(path: Path, runs: Sequence[TrainedRun], compose: Compose) -> int:
    """Write a CSV file with a row for each run that has measured steps; return how many rows it has. `compose`: makes a
    configuration of arguments. Runs of which a row cannot be made, as a module of the user's gives what its columns
    cannot name, are left out; nothing is written without a row."""
    rows = []
    for run in runs:
        if seconds := median_step_seconds(run.config):
            with suppress(ConfigError):  # the runs are trained: their table must not fail the command
                rows.append(build_table_row(run, seconds, compose))
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if rows:
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        replace_text(path, text.getvalue())
    return len(rows)


def median_step_seconds(config: Config) -> float | None:
    """Return the measured seconds of a run's step: the newest generation's median, the first few left out; or None."""
    path = Path(config.run.dir) / METRICS
    rows = MetricsLog.read_rows(path) if path.is_file() else []
    newest = [row["step_seconds"] for row in rows if row.get("generation") == rows[-1].get("generation")]
    return median(newest[WARM_UP:] or newest) if newest else None


def build_table_row(run: TrainedRun, seconds: float, compose: Compose) -> dict[str, str]:
    """Return the row of a run whose step takes `seconds` on average: all columns that a table needs, and each key that
    is by default not as the run has it."""
    config, device = run.config, run.device
    hardware = find_gpu_hardware(config.cluster.gpu) if device == "cuda" else None
    values, columns = flatten_config(config), {key: column for column, key in COLUMNS.items()}
    cells = {
        "name": " ".join(run.arguments),
        "hardware": "cpu" if device == "cpu" else hardware.name if hardware else "",
        "cluster.device": device,
        "gpus": str(run.workers),
        **{column: str(values[COLUMNS[column]]) for column in NEEDED if column in COLUMNS},
        "tensor": config.tensor.scheme,
        "axes": " ".join(f"{name}={size}" for name, size in config.tensor.axes.items()),
        "schedule": config.pipeline.kind,
        "stages": str(config.pipeline.stages),
        "chunks": str(config.pipeline.chunks),
        "branch": config.branch.kind,
        "system": "ours",
    }
    cells |= {f"branch.axes.{name}": str(size) for name, size in config.branch.axes.items()}
    rebuilt_values = flatten_config(compose(list(iterate_overrides(cells))))
    for key in _iterate_priced_keys():
        if values[key] != rebuilt_values[key]:
            cells[columns.get(key, key)] = _format_value(values[key])
    return {**cells, "seconds": f"{seconds:.6g}"}


def _iterate_priced_keys() -> Iterator[str]:
    """Yield the keys on which a plan or its price depends, beside what every row has."""
    priced = (key for key, k in KEYS.items() if k.planned or key in ("precision", "optimizer.kind"))
    return (key for key in priced if not key.startswith((*GIVEN, "branch.axes")))


def _format_value(value: Any) -> str:
    """Return the value of a key in a table of measured runs, as it is typed on a command line."""
    return quote_value(value) if isinstance(value, str) else json.dumps(value).replace('"', "'")


def list_swept_arguments(jobs: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the arguments of each measured run of a sweep that some other run of it lacks."""
    common = set[str].intersection(*(set(arguments) for arguments in jobs))
    return [[a for a in arguments if a not in common] for arguments in jobs]


def format_sweep(runs: Sequence[TrainedRun], statuses: Sequence[int]) -> str:
    """Format a table of a sweep's measured runs for the user: what differs, last training loss, lowest validation loss,
    and run directory; the best first, unfinished ones last. `statuses`: exit statuses of the runs that started."""
    ranked = []
    for run, names, status in zip_longest(runs, list_swept_arguments([run.arguments for run in runs]), statuses):
        rows: list[dict[str, Any]] = []
        with suppress(OSError, Malformed):
            rows = MetricsLog.read_rows(Path(run.config.run.dir) / METRICS)
        validated = [loss for row in rows if isfinite(loss := row.get("val_loss") or inf)]
        losses = (rows or [{}])[-1].get("loss") or nan, min(validated, default=nan)
        cells = [f"{loss:.4f}" if isfinite(loss) else "-" for loss in losses]
        state = _STATES.get(status, f"failed ({status})")
        directory = os.path.relpath(run.config.run.dir)
        order = bool(state), *(loss if isfinite(loss) else inf for loss in losses[::-1])
        ranked.append((order, [redact_secrets(" ".join(names)), *cells, directory, state]))
    head = ["", "last loss", "lowest val loss", "run directory", ""]
    ordered = [row for _, row in sorted(ranked, key=itemgetter(0))]
    return "\n".join(["jobs, the best first", *align_rows([head, *ordered])])


def write_sweep_table(name: str, runs: Sequence[TrainedRun], compose: Compose) -> str:
    """Write the table of a sweep's measured runs, to compare with predictions, beside their directories; return a line
    for the user, that it cannot be written too, as the runs are trained: their table must not fail the command."""
    swept = list_swept_arguments([run.arguments for run in runs])
    named = [run._replace(arguments=names) for run, names in zip(runs, swept, strict=True)]
    path = Path(os.path.commonpath([os.path.dirname(run.config.run.dir) for run in runs])) / f"{name}.csv"
    try:
        if not write_run_table(path, named, compose):
            return "no step was measured: there is no table of the sweep"
    except (OSError, Malformed) as error:
        return f"the table of the measured steps cannot be written: {error}"
    return f"the measured steps, beside the predicted: {refusals.typed_command('plan')} compare {path}"

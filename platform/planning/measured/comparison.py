"""Comparison of predicted with measured steps: constants fitted on some runs, errors and rankings of the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import floor, log
from statistics import mean, median
from typing import Any, NamedTuple

from platform.boundary.refusals import ConfigError
from platform.costs.fit import fit, kendall
from platform.planning.measured.measured_runs import MeasuredRun

# constants of a hardware that measured steps can settle, and their first values
CONSTANTS = {"products": 0.8, "memory": 0.8, "attention": 0.5, "interference": 0.4, "node": 0.8, "network": 0.8}
FITTED = ("products", "memory", "attention", "interference")  # few tables tell more apart
ROUNDING = 1e-9

Constants = Mapping[str, Mapping[str, float]]  # name of a hardware -> its constants


class ErrorSizes(NamedTuple):
    """Errors of predictions, as shares of the measured seconds: mean, median, 90th percentile and largest of their
    sizes, over `runs` of them."""

    runs: int
    mean: float
    median: float
    p90: float
    largest: float


def error_sizes(errors: Sequence[float]) -> ErrorSizes:
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
    """Predicted seconds of measured runs, whether each was `fitted` on, and the constants of every hardware."""

    runs: Sequence[MeasuredRun]
    predicted: Sequence[float]
    fitted: Sequence[bool]
    constants: Constants

    @property
    def errors(self) -> list[float]:
        """Return by which share each prediction is longer than the measured seconds."""
        return [p / run.seconds - 1 for p, run in zip(self.predicted, self.runs, strict=True)]

    def scores(self, fitted: bool) -> ErrorSizes | None:
        """Return the scores of the runs that constants were `fitted` on, or of the others; None if there are none."""
        errors = [e for e, marked in zip(self.errors, self.fitted, strict=True) if marked == fitted]
        return error_sizes(errors) if errors else None

    def rankings(self) -> list[Ranking]:
        """Return the rankings of all groups of two runs or more that share model, batch and devices."""
        groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for i, run in enumerate(self.runs):
            groups[run.rivals].append(i)
        found = []
        for group in (group for group in groups.values() if len(group) > 1):
            measured, predicted = [self.runs[i].seconds for i in group], [self.predicted[i] for i in group]
            chosen = measured[predicted.index(min(predicted))]
            names = tuple(self.runs[i].name for i in group)
            found.append(Ranking(names, kendall(measured, predicted), chosen / min(measured) - 1))
        return found


def compare(runs: Sequence[MeasuredRun], marked: Sequence[bool], names: Sequence[str] = FITTED) -> Comparison:
    """Predict the step of each run, after fitting the constants `names` of each hardware on the `marked` runs."""
    constants = fitted_on([run for run, fits in zip(runs, marked, strict=True) if fits], names)
    predicted = [run.predicted(constants.get(run.hardware.name, {})).seconds for run in runs]
    return Comparison(runs, predicted, marked, constants)


def leave_one_out(runs: Sequence[MeasuredRun], names: Sequence[str] = FITTED) -> Comparison:
    """Predict the step of each run with constants that are fitted on all others."""
    predicted = []
    for i, run in enumerate(runs):
        constants = fitted_on([other for j, other in enumerate(runs) if j != i], names)
        predicted.append(run.predicted(constants.get(run.hardware.name, {})).seconds)
    return Comparison(runs, predicted, [False] * len(runs), fitted_on(runs, names))


def fitted_on(runs: Sequence[MeasuredRun], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the constants of each hardware, fitted on the runs that were measured on it."""
    found = {}
    for name in dict.fromkeys(run.hardware.name for run in runs):
        here = [run for run in runs if run.hardware.name == name]
        first = {name: CONSTANTS[name] for name in names}

        def errors(constants: Mapping[str, float], here: Sequence[MeasuredRun] = here) -> list[float]:
            """Return the logarithms of predicted over measured seconds with some constants."""
            return [log(run.predicted(constants).seconds / run.seconds) for run in here]

        found[name] = fit(errors, first)
    return found


def marked_runs(runs: Sequence[MeasuredRun], calibrate: str) -> list[bool]:
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


def as_data(c: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON-able data."""
    rows = [
        {"name": run.name, "predicted": p, "measured": run.seconds, "error": e, "fitted": marked}
        for run, p, e, marked in zip(c.runs, c.predicted, c.errors, c.fitted, strict=True)
    ]
    scores = {
        key: found and found._asdict() for key, found in (("fitted", c.scores(True)), ("scored", c.scores(False)))
    }
    return {"rows": rows, **scores, "rankings": [r._asdict() for r in c.rankings()], "constants": dict(c.constants)}


def as_text(c: Comparison) -> Sequence[str]:
    """Return a comparison as lines for people."""
    width = max(len(run.name) for run in c.runs)
    lines = [f"{'':{width}}  {'predicted':>11}  {'measured':>11}  {'TFLOP/s':>8}  {'error':>7}"]
    for run, p, error, marked in zip(c.runs, c.predicted, c.errors, c.fitted, strict=True):
        speed = run.counted_flops / (p * run.work.plan.mesh.size) / 1e12
        note = "  fitted on" if marked else ""
        shown = f"{speed:.2g}" if speed < 1 else f"{speed:.1f}"
        errors = f"{run.seconds:>9.4g} s  {shown:>8}  {error:>+7.1%}{note}"
        lines.append(f"{run.name:{width}}  {p:>9.4g} s  {errors}")
    for name, constants in c.constants.items():
        moved = [f"{key} {value:.3g}" for key, value in constants.items() if abs(value / CONSTANTS[key] - 1) > ROUNDING]
        lines.append(f"{name} fitted: {', '.join(moved) or 'no row depends on a constant'}")
    for title, found in (("fitted on", c.scores(True)), ("scored", c.scores(False))):
        if found:
            sizes = (
                f"mean {found.mean:.2%}, median {found.median:.2%}, p90 {found.p90:.2%}, largest {found.largest:.2%}"
            )
            lines.append(f"errors of the {found.runs} runs {title}: {sizes}")
    for r in c.rankings():
        lines.append(f"ranking of {r.runs[0]} ... {r.runs[-1]} ({len(r.runs)}): tau {r.tau:.2f}, regret {r.regret:.2%}")
    return lines

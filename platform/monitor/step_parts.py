"""The parts of a training step in seconds: predicted beside measured, and the largest cause of their difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from platform.monitor.events import Replanning
from platform.plan.layout import format_count
from platform.plan.plan_summary import BUBBLE, COMPUTING, DATA, OPTIMIZER, REST, SNAPSHOT, format_seconds

Parts = Mapping[str, float]  # name of a part (`platform.plan.plan_summary`) -> seconds

NEAR = 0.05  # share of a prediction up to which a step takes as long as predicted
MATTERS = 2.0  # factor between prediction and measurement from which on a user is told
BUSY = 1.5  # load average over cores from which on others use the machine too
LEAST = 0.01  # share of a step below which a part is among the rest
CAUSES = {
    COMPUTING: "computing, in which devices are {speed} than described",
    BUBBLE: "the bubble: messages between stages are {speed} than described, or passes more {even}",
    OPTIMIZER: "the update, for which memory is {speed} than described",
    DATA: "data, which no prediction counts",
    SNAPSHOT: "snapshots in memory (elastic.snapshot_every), which no prediction counts",
    REST: "what lies between the parts, such as the driver's orders, which no prediction counts",
}
DELAYED = 0.3  # share of its time in which a worker waits for a processor, from which on it is worth a word
WAITS = "{name}: links are {speed} than described, or ranks more {even}"


def average_parts(steps: Sequence[Parts]) -> dict[str, float]:
    """Return the parts of a typical step: their means over the middle half of `steps`, ordered by seconds."""
    ordered = sorted(steps, key=lambda parts: sum(parts.values()))
    middle = ordered[len(steps) // 4 : len(steps) - len(steps) // 4]
    names = dict.fromkeys(name for parts in middle for name in parts)
    return {name: fmean(parts.get(name, 0.0) for parts in middle) for name in names}


def parts_table(predicted: Parts, measured: Parts, hardware: str, steps: int) -> Iterator[str]:
    """Yield the lines of a table of the parts of a step, predicted on a `hardware` and measured over so many `steps`,
    and of the largest cause of the difference."""
    expected, taken = sum(predicted.values()), sum(measured.values())
    names = [name for name in dict.fromkeys((*predicted, *measured)) if name != REST]
    rows = [(name, predicted.get(name, 0.0), measured.get(name, 0.0)) for name in names]
    rows = [row for row in rows if max(row[1] / expected, row[2] / taken) >= LEAST]
    predicted_rows, measured_rows = sum(row[1] for row in rows), sum(row[2] for row in rows)
    rows += [(REST, max(0.0, expected - predicted_rows), taken - measured_rows), ("altogether", expected, taken)]
    width = max(len(name) for name, *_ in rows)
    yield f"a step on {hardware}, measured in {format_count(steps, 'step')}"
    yield f"  {'':<{width}}  predicted   measured  difference"
    for name, before, after in rows:
        expects = format_seconds(before) if before else "-"
        yield f"  {name:<{width}}  {expects:>9}  {format_seconds(after):>9}  {_format_difference(after - before):>10}"
    yield describe_main_cause(predicted, measured)


def describe_main_cause(predicted: Parts, measured: Parts) -> str:
    """Return the line that says by how much a step differs from its prediction, and mostly in which part."""
    expected, taken = sum(predicted.values()), sum(measured.values())
    behind = taken - expected
    if abs(behind) <= NEAR * expected:
        return f"a step takes as long as predicted, to {abs(behind) / expected:.1%}"
    sign = 1 if behind > 0 else -1
    names = dict.fromkeys((*predicted, *measured))
    name = max(names, key=lambda n: sign * (measured.get(n, 0.0) - predicted.get(n, 0.0)))
    speed, even = ("slower", "uneven") if behind > 0 else ("faster", "even")
    why = CAUSES.get(name, WAITS).format(name=name, speed=speed, even=even)
    share = (measured.get(name, 0.0) - predicted.get(name, 0.0)) / behind
    most = "all" if share >= 1 else f"{share:.0%}"
    factor = taken / expected
    times = f"{factor:,.0f}" if factor >= 10 else f"{factor:.2g}"
    return f"a step takes {times} times as long as predicted; {most} of the difference is {why}"


def is_worth_telling(predicted: Parts, measured: Parts) -> bool:
    """Return True if a step takes so much longer or shorter than predicted that the console should say why."""
    factor = sum(measured.values()) / sum(predicted.values())
    return factor >= MATTERS or factor <= 1 / MATTERS


def describe_likely_cause(load: float, cores: int, workers: int, threads: int) -> str:
    """Return the console's line on why steps on this machine's CPU may be slow, by its load average, `cores` and the
    workers with so many `threads` each; "" if none of these explains it."""
    if workers * threads > cores:
        count = format_count(workers * threads, "thread")
        return f"likely cause: {count} of the workers share {format_count(cores, 'core')}"
    if load <= BUSY * cores:
        return ""
    waits = "; threads of a worker wait for each other then: try cluster.threads=1" if threads > 1 else ""
    busy = f"this machine is busy, with a load average of {load:.0f} on {format_count(cores, 'core')}"
    return f"likely cause: {busy}{waits}"


def describe_busy_processors(workers: Any) -> str:
    """Return the line that says that workers wait for processors, and their threads for each other, with the key that
    cures it; "" if they do not. `workers`: ranges of gauges in a row of metrics, which anybody may have written."""
    gauges = workers if isinstance(workers, dict) and "gpu/median" not in workers else {}
    delayed, threads = (gauges.get(f"{gauge}/median") for gauge in ("delayed", "threads"))
    if not (isinstance(delayed, float) and delayed >= DELAYED and isinstance(threads, float) and threads > 1):
        return ""
    why = f"a worker waits for a processor in {min(delayed, 1):.0%} of its time"
    cure = "the machine is busy, or its container's quota spent; cluster.threads=1 spares it the second"
    return f"{why}, and its {threads:g} threads for each other: {cure}"


def replanning_line(event: Replanning) -> str:
    """Return the line that says what a run does whose steps left their prediction, and why."""
    times = {name: n for name, n in event.times.items() if abs(n - 1) >= NEAR}
    parts = [f"{name} {n:,.0f}" if n >= 10 else f"{name} {n:.2g}" for name, n in times.items()]
    measured, predicted = format_seconds(event.measured), format_seconds(event.predicted)
    told = f"step {event.step}: steps take {measured}, predicted {predicted}"
    why = f"times as long as described: {', '.join(parts) or 'nothing'}"
    if event.now <= event.then:
        return f"{told} ({why}); no other plan is quicker"
    quicker = f"{event.chosen} takes {format_seconds(event.then)} instead of {format_seconds(event.now)}"
    gain = f"gains {format_seconds(event.gain)} in the steps left, for {format_seconds(event.cost)}"
    return f"{told} ({why}); {quicker}, {gain}: {'re-forms' if event.reforms else 'stays'}"


def _format_difference(seconds: float) -> str:
    """Format a difference of durations with its sign."""
    return ("+" if seconds >= 0 else "-") + format_seconds(abs(seconds))

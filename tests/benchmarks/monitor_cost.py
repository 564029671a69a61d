"""What a step pays for being watched: rows, console, alerts and every service whose package is installed, in a real run
of one worker, beside steps of the same run of which nothing is recorded.

    OMP_NUM_THREADS=1 WANDB_MODE=offline python -m tests.benchmarks.monitor_cost [--pairs 60] \
        [--services wandb mlflow] [--batches 3 9]

Blocks of three seconds, as long as services wait between two looks, without and with take turns, every other pair the
other way round. Without, the driver records nothing, and the services' processes are stopped (SIGSTOP); with, they
also send what an earlier block has left them.
`recorded`: the time between two steps in which the driver records one, by the clock. `worker`: processor time of the
worker's process, and `step` the clock of whole steps, both as the median of the pairs with its 95 % interval. Gauges
are read in both: `gauges_cost` has what they cost.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from statistics import median
from unittest import mock

from platform import launch
from platform.monitor.monitor import RunMonitor
from platform.monitor.records.metrics import MetricsRow
from platform.monitor.sinks.__main__ import EVERY_SECONDS
from platform.monitor.sinks.sink_table import SINKS, lack_of_package
from tests.harness.happenings import EXAMPLES

BATCHES = (3, 9)  # sequences: a step of 30 ms and one of 100
SECONDS, WARM_SECONDS = EVERY_SECONDS, 30.0  # of a block; until services have imported their packages
OVERRIDES = (
    *("+experiment=gpt_quick", "tensor=serial", "parallel.data=1", "train.steps=1000000", "eval.every=0"),
    *("checkpoint.every=0", "checkpoint.on_stop=false", "monitor.sample=0", "monitor.goodput_below=0.5"),
    "monitor.alert_command=cat > /dev/null",
)


def processes() -> tuple[dict[int, float], dict[int, float]]:
    """Return the services' processes and all others below this one, each with its seconds of processor time."""
    parents: dict[int, int] = {}
    serving: set[int] = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if b"platform.monitor.sinks" in (path / "cmdline").read_bytes():
                serving.add(int(path.name))
    mine, theirs = below(parents, {os.getpid()}), below(parents, serving) | serving
    return {pid: spent(pid) for pid in theirs & mine}, {pid: spent(pid) for pid in mine - theirs}


def below(parents: dict[int, int], roots: set[int]) -> set[int]:
    """Return the processes below `roots`."""
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - roots


def spent(pid: int) -> float:
    """Return the seconds of processor time of all threads of a process."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):
            total += int(path.read_text().split()[0])
    return total / 1e9


class Turns:
    """The driver's monitor, which records steps in every other block. `pairs`: of each pair of blocks the seconds of a
    step by the clock, of the worker, and recording, without and with."""

    def __init__(self, journal: Path, count: int):
        self.journal, self.count, self.own = journal, count, RunMonitor.step
        self.pairs: list[dict[bool, tuple[float, float, float]]] = []
        self.order, self.served, self.steps_watched = [True], 0.0, 0
        self.warm = time.perf_counter() + WARM_SECONDS
        self.begin()

    def begin(self) -> None:
        """Begin a block."""
        self.steps, self.inside = 0, 0.0
        serving, others = processes()
        for pid in serving:
            os.kill(pid, signal.SIGCONT if self.order[0] else signal.SIGSTOP)
        self.others, self.sinks, self.start = others, sum(serving.values()), time.perf_counter()

    def step(self, monitor: RunMonitor, row: MetricsRow) -> None:
        """Record a step or not; at the end of a block begin the next."""
        begin = time.perf_counter()
        if self.order[0]:
            self.own(monitor, row)
        self.steps += 1
        self.inside += time.perf_counter() - begin
        if (seconds := time.perf_counter() - self.start) < SECONDS:
            return
        serving, others = processes()
        worker = sum(now - self.others.get(pid, 0.0) for pid, now in others.items())
        watched = self.order.pop(0)
        if self.start > self.warm:
            if not self.pairs or len(self.pairs[-1]) == 2:
                self.pairs.append({})
            self.pairs[-1][watched] = tuple(x / self.steps for x in (seconds, worker, self.inside))
            if watched:
                self.served += sum(serving.values()) - self.sinks
                self.steps_watched += self.steps
        if watched:  # as a run does now and then: MLflow and trackio get what is saved
            event = {"time": time.time(), "generation": 1, "event": "checkpoint", **EXAMPLES["checkpoint"]}
            with open(self.journal, "a") as file:
                file.write(json.dumps(event | {"step": row.step}) + "\n")
        if not self.order:
            self.order = [False, True] if len(self.pairs) % 2 else [True, False]
        if len(self.pairs) == self.count and len(self.pairs[-1]) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            self.order = [True]
        self.begin()


def shown(differences: Iterable[float]) -> str:
    """Format the median of relative differences with its 95 % interval."""
    ordered = sorted(differences)
    n = len(ordered)
    low, middle, high = (ordered[min(n - 1, max(0, int(n / 2 + side * n**0.5)))] for side in (-0.98, 0, 0.98))
    return f"{middle:+.2%} ({low:+.2%} to {high:+.2%})"


def measure(batch: int, count: int, names: list[str]) -> str:
    """Return the table's row of a step of so many sequences."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "TRACKIO_DIR": f"{folder}/trackio"}
        os.chdir(folder)  # MLflow keeps artifacts here
        run = Path(folder) / "run"
        turns = Turns(run / "journal.jsonl", count)
        sizes = [f"train.global_batch={batch}", f"train.microbatch={batch}", f"run.dir={run}"]
        services = [f"monitor=[{','.join(names)}]"] if names else []
        with mock.patch.object(RunMonitor, "step", lambda monitor, row: turns.step(monitor, row)):
            launch.main([*OVERRIDES, *sizes, *services])
    step, worker, _ = (median(pair[False][i] for pair in turns.pairs) for i in range(3))
    recorded = median(pair[True][2] - pair[False][2] for pair in turns.pairs)
    more = [shown(pair[True][i] / pair[False][i] - 1 for pair in turns.pairs) for i in (0, 1)]
    served = turns.served / turns.steps_watched
    return (
        f"| {step * 1e3:.1f} | {recorded * 1e6:.0f} us: {recorded / step:.2%} | {more[1]} | {more[0]}"
        f" | {served * 1e3:.1f} ms |"
    )


def main() -> None:
    """Print a row for each size of step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--services", nargs="*", help="default: all that are installed")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="sequences of a step")
    given = parser.parse_args()
    names = given.services
    if names is None:
        names = [name for name, kind in SINKS.items() if kind.package and not lack_of_package(name)]
    rows = [measure(batch, given.pairs, names) for batch in given.batches]
    print(f"services: {', '.join(names)}")
    print("| step without (ms) | recorded | worker | step | all services' processors, a step |\n|---|---|---|---|---|")
    print(*rows, sep="\n")


if __name__ == "__main__":
    sys.exit(main())

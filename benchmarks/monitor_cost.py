"""What a step pays for being watched: rows, console, alerts and every service whose package is installed, in a real run
of one worker, beside steps of the same run of which nothing is recorded.

    OMP_NUM_THREADS=1 WANDB_MODE=offline python -m benchmarks.monitor_cost [--pairs 1500] \
        [--services wandb mlflow] [--batches 3 9]

Steps without and with take turns, in random order of each pair, as a machine that others use drifts: here two blocks of
three seconds differ by 10 %, two steps that follow each other by 5, and there are a hundred times as many. In a
step without, the driver records nothing, and the services' processes are stopped (SIGSTOP) until the next step with,
so that all that they do for a row falls into steps with.
`recorded`: the time between two steps in which the driver records one, by the clock. `step`: what steps with take
longer than those without, the mean of the pairs with its 95 % interval; not a median, as services work in one step of
many. Gauges are read in both: `gauges_cost` has what they cost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, median, stdev
from unittest import mock

from platform import launch
from platform.monitor.metrics import MetricsRow
from platform.monitor.monitor import RunMonitor
from platform.monitor.sinks.sink_process import SINKS, lack_of_package
from tests.harness.happenings import EXAMPLES

BATCHES = (3, 9)  # sequences of a step: on two machines, 30 and 110 ms; 100 and 250
WARM_SECONDS, EVENT_EVERY = 45.0, 40  # until services have imported their packages; steps
OVERRIDES = (
    *("+experiment=gpt_quick", "tensor=serial", "parallel.data=1", "train.steps=1000000", "eval.every=0"),
    "cluster.threads=1",
    *("checkpoint.last=false", "checkpoint.on_stop=false", "monitor.sample=0", "monitor.goodput_below=0.5"),
    "monitor.alert_command=cat > /dev/null",
)


def services() -> dict[int, float]:
    """Return the processes that serve this one's run and all below them, each with its seconds of processor time."""
    parents: dict[int, int] = {}
    serving: set[int] = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if b"platform.monitor.sinks" in (path / "cmdline").read_bytes():
                serving.add(int(path.name))
    return {pid: spent(pid) for pid in (below(parents, serving) | serving) & below(parents, {os.getpid()})}


def below(parents: dict[int, int], roots: set[int]) -> set[int]:
    """Return the processes below `roots`."""
    family = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family - roots


def spent(pid: int) -> float:
    """Return the seconds of processor time of all threads of a process."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):
            total += int(path.read_text().split()[0])
    return total / 1e9


class Turns:
    """The driver's monitor, which records one of every two steps. `pairs`: of each pair of steps, without and with:
    its seconds, and those in which the driver records. `served`: seconds of the services' processors since then."""

    def __init__(self, journal: Path, count: int):
        self.journal, self.count, self.own = journal, count, RunMonitor.record_step
        self.pairs: list[dict[bool, tuple[float, float]]] = []
        self.chance, self.order = random.Random(0), [True]
        self.pair: dict[bool, tuple[float, float]] = {}  # the one under way
        self.serving: dict[int, float] = {}
        self.start, self.warm, self.served = 0.0, time.perf_counter() + WARM_SECONDS, 0.0

    def step(self, monitor: RunMonitor, row: MetricsRow) -> None:
        """End one step of the pairs, and begin the next: record the row, or stop what serves."""
        if self.start:
            self.end(row.step)
        watched = self.order[0]
        self.start = time.perf_counter()
        for pid in self.serving:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT if watched else signal.SIGSTOP)
        begin = time.perf_counter()
        if watched:
            self.own(monitor, row)
        self.inside = time.perf_counter() - begin

    def end(self, step: int) -> None:
        """Keep the seconds of the step that ends, if services are warm, and draw the next pair's order."""
        seconds, watched = time.perf_counter() - self.start, self.order.pop(0)
        self.pair[watched] = seconds, self.inside
        if self.order:
            return
        if self.start > self.warm and len(self.pair) == 2:
            self.pairs.append(self.pair)
        self.order, self.pair = self.chance.sample((False, True), 2), {}
        if step % EVENT_EVERY < 2:  # as a run does now and then: MLflow and trackio get what is saved
            now = services()
            if self.pairs:
                self.served += sum(now.values()) - sum(self.serving.values())
            self.serving = now
            event = {"time": time.time(), "generation": 1, "event": "checkpoint", **EXAMPLES["checkpoint"]}
            with open(self.journal, "a") as file:
                file.write(json.dumps(event | {"step": step}) + "\n")
        if len(self.pairs) == self.count:
            for pid in self.serving:
                os.kill(pid, signal.SIGCONT)
            self.serving = {}
            os.kill(os.getpid(), signal.SIGTERM)


def shown(differences: Sequence[float]) -> str:
    """Format the mean of relative differences with its 95 % interval."""
    middle, wide = mean(differences), 1.96 * stdev(differences) / len(differences) ** 0.5
    return f"{middle:+.2%} ({middle - wide:+.2%} to {middle + wide:+.2%})"


def measure(batch: int, count: int, names: list[str]) -> str:
    """Return the table's row of a step of so many sequences."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "TRACKIO_DIR": f"{folder}/trackio"}
        os.chdir(folder)  # MLflow keeps artifacts here
        run = Path(folder) / "run"
        turns = Turns(run / "journal.jsonl", count)
        sizes = [f"train.global_batch={batch}", f"train.microbatch={batch}", f"run.dir={run}"]
        asked = [f"monitor=[{','.join(names)}]"] if names else []
        with mock.patch.object(RunMonitor, "record_step", lambda monitor, row: turns.step(monitor, row)):
            launch.main([*OVERRIDES, *sizes, *asked])
    pairs = turns.pairs[:count]
    step = median(pair[False][0] for pair in pairs)
    recorded = median(pair[True][1] for pair in pairs)
    more = shown([(pair[True][0] - pair[False][0]) / step for pair in pairs])
    served = turns.served / len(pairs)
    return f"| {step * 1e3:.1f} | {recorded * 1e6:.0f} us: {recorded / step:.2%} | {more} | {served * 1e3:.1f} ms |"


def main() -> None:
    """Print a row for each size of step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=1500)
    parser.add_argument("--services", nargs="*", help="default: all that are installed")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="sequences of a step")
    options = parser.parse_args()
    names = options.services
    if names is None:
        names = [name for name, kind in SINKS.items() if kind.package and not lack_of_package(name)]
    rows = [measure(batch, options.pairs, names) for batch in options.batches]
    print(f"services: {', '.join(names)}")
    print("| step without (ms) | recorded | step | all services' processors, a row |\n|---|---|---|---|")
    print(*rows, sep="\n")


if __name__ == "__main__":
    sys.exit(main())

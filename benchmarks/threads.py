"""A worker with the default number of threads beside one with one thread, on a quiet machine and on a busy one.

    python -m benchmarks.threads [--models gpt_tiny ...] [--pairs 11] [--steps 3] [--loads 0 8] [--earlier 3]

Each of them is a process of its own with the environment of a worker, and takes its steps in turn with the others while
they sleep. Load is made by processes that compute; quiet is what the scheduler gives to a process of the real-time
class (SCHED_FIFO, which takes root), or what the machine is. `earlier`: turns with the 300,000 looks of libgomp's own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

from platform.boundary.interrupts import POLICY, SPINNING
from platform.cluster.crew.job import Job, assign_worker
from platform.config.fields import Config

MODELS = ("gpt_tiny", "gpt_small")  # of benchmarks/step_time.py
WORKERS = {
    "default": (0, {}),
    "one thread": (1, {}),
    "earlier": (0, {SPINNING: "300000"}),
}  # cluster.threads, variables
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(100000))"


class Turn(NamedTuple):
    """Seconds of a step, by the clock and of all processors."""

    seconds: float
    processors: float


class Worker:
    """Process that takes steps of a model when it is told to."""

    def __init__(self, model: str, threads: int, variables: Mapping[str, str], *, first: bool):
        """Start the process; `first`: before all others that the scheduler has."""
        left_out = ("OMP_NUM_THREADS", SPINNING, POLICY)
        environment = {name: text for name, text in os.environ.items() if name not in left_out} | variables
        command = [sys.executable, "-m", "benchmarks.threads", "--serve", model, str(threads), str(int(first))]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.take_steps(2)  # the first ones are cold

    def take_steps(self, steps: int) -> Turn:
        """Take steps; return the mean of their times."""
        assert self._process.stdin and self._process.stdout
        print(steps, file=self._process.stdin, flush=True)
        return Turn(*map(float, self._process.stdout.readline().split()))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def serve_steps(model: str, threads: int, first: bool) -> None:
    """Take as many steps as each line of the input says, and print the seconds of one, and of all processors."""
    if first:
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    config = Config()
    config.cluster.threads = threads
    job = Job(config, [{"data": 0}], "cpu", Path("runs"))
    assignment = assign_worker(job, 0, local_rank=0, local_world_size=1, group_rank=0)
    assignment.enter_environment()
    import torch

    from benchmarks.step_time import SIZES
    from platform.predict.make_plan import make_plan
    from platform.runtime.communicator import SingleRank
    from tests.harness.oracle import trainer_of

    torch.set_num_threads(assignment.threads)
    config.model, config.train.microbatch = SIZES[model]
    config.train.global_batch = config.train.microbatch
    config.precision, config.optimizer.schedule, config.train.compile = "fp32", "constant", "off"
    plan = make_plan(config)
    trainer, done = trainer_of(config, plan, SingleRank(plan.mesh)), 0
    for line in sys.stdin:
        began, spent = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            done += 1
            trainer.step(done)
        seconds, processors = time.perf_counter() - began, time.process_time() - spent
        print(seconds / int(line), processors / int(line), flush=True)


@contextmanager
def make_load(processes: int) -> Iterator[None]:
    """Let so many processes compute while the context lasts."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def measure_turns(model: str, load: int, pairs: int, steps: int, earlier: int) -> dict[str, list[Turn]]:
    """Return the turns of each worker of WORKERS, which come in an order that changes, `earlier` at most `earlier`."""
    turns: dict[str, list[Turn]] = {name: [] for name in WORKERS}
    with ExitStack() as stack:
        workers = {name: Worker(model, *how, first=not load) for name, how in WORKERS.items()}
        for worker in workers.values():
            stack.callback(worker.close)
        stack.enter_context(make_load(load))
        for i in range(pairs):
            names = [name for name in WORKERS if name != "earlier" or i < earlier]
            for name in names if i % 2 else names[::-1]:
                turns[name].append(workers[name].take_steps(1 if name == "earlier" else steps))
    return turns


def table_row(model: str, load: int, turns: Mapping[str, Sequence[Turn]]) -> str:
    """Format the turns of all workers as a row of the table."""
    ratios = [a.seconds / b.seconds for a, b in zip(turns["default"], turns["one thread"], strict=True)]
    clock = {name: 1000 * median(turn.seconds for turn in some) for name, some in turns.items()}
    spent = {name: 1000 * median(turn.processors for turn in some) for name, some in turns.items()}
    shown = [f"{clock[name]:.1f}" for name in WORKERS] + [f"{spent[name]:.1f}" for name in WORKERS]
    ratio = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    where = f"{load} busy processes, load {os.getloadavg()[0]:.0f}" if load else "quiet"
    return f"| {model} | {where} | {shown[0]} | {shown[1]} | {ratio} | {shown[2]} | {' | '.join(shown[3:])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--loads", nargs="+", type=int, default=[0, 8])
    parser.add_argument("--earlier", type=int, default=3)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve_steps(args.serve[0], int(args.serve[1]), args.serve[2] == "1")
    print(
        "| model | machine | default (ms) | one thread (ms) | ratio | earlier (ms) | CPU ms: default | one | earlier |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for model in args.models:
        for load in args.loads:
            turns = measure_turns(model, load, args.pairs, args.steps, args.earlier)
            print(table_row(model, load, turns), flush=True)


if __name__ == "__main__":
    main()

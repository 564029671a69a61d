"""The cost of workers' gauges, beside a step without them: with and without in turn, in one process.

    OMP_NUM_THREADS=1 python -m benchmarks.gauges_cost

Prints the CPU time of one reading; of rank 0's report by size of the world; of the driver's row; what a rank's report
grows by; and that of whole steps of the quick model, steps with and without gauges in turn.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from platform.config.fields import Config
from platform.monitor import MetricsLog, MetricsRow
from platform.plan.plan import Plan
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from platform.train import gauges
from platform.train.gauges import GaugeReader, gauge_sources
from platform.train.replies import GAUGES, StepReport
from platform.train.step_report import ReportCombiner
from platform.train.trainer import SECTIONS
from tests.harness.oracle import configure, trainer_of

ROUNDS = 300
FOUND = {"cpu": 1.0, "memory": 4e8, "gpu": 0.97, "device_memory": 6e10, "power": 600.0, "temperature": 60.0}


class Alone(SingleRank):
    """Communicator of rank 0 in a world whose other ranks have sent what it has."""

    def collect_numbers(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return this rank's numbers [n] as those of every rank."""
        return numbers.repeat(self.world, 1)


def in_turn(works: Sequence[Callable[[], Any]], rounds: int = ROUNDS) -> list[float]:
    """Return the median seconds of the thread's CPU time of each of the works, which are done in turn, in an order that
    changes, each after a first call that warms the caches."""
    spent: list[list[float]] = [[] for _ in works]
    numbered = [*zip(works, spent, strict=True)]
    for i in range(rounds):
        for work, seconds in numbered[i % len(works) :] + numbered[: i % len(works)]:
            work()
            begin = time.thread_time()
            work()
            seconds.append(time.thread_time() - begin)
    return [median(seconds) for seconds in spent]


def plan_of(world: int) -> Plan:
    """Return a plan of replicas of two workers each."""
    return make_plan(configure("1d", {"t": 2}, data=world // 2, global_batch=world) if world > 1 else configure())


def of_reports(world: int) -> list[float]:
    """Return rank 0's seconds for a report without gauges, with those of the step before, and with new ones."""
    plan = plan_of(world)
    communicator = Alone(plan.mesh)
    communicator.world = world
    reach = {"t": "inside a node", "data": "between nodes"}
    plain, gauged, renewed = (ReportCombiner(plan, communicator, 1.5, reach=tiers) for tiers in ({}, reach, reach))
    seconds = dict.fromkeys(SECTIONS, 0.1)
    mine = StepReport(1, 1.0, 1.0, 1.0, False, 1, (0, 1), 1.0, seconds, {}, 1, 1, [], waits={"t": 0.2, "data": 0.3})
    same, count = replace(mine, gauges=FOUND), iter(range(1 << 30))
    works = [
        lambda: plain.combine_reports(mine),
        lambda: gauged.combine_reports(same),
        lambda: renewed.combine_reports(replace(mine, gauges=FOUND | {"cpu": float(next(count))})),
    ]
    return in_turn(works, 30 if world > 64 else ROUNDS)


def of_rows(folder: Path) -> list[float]:
    """Return the driver's seconds for a row without gauges, and with all of them on three tiers."""
    values: dict[str, Any] = dict.fromkeys(MetricsRow.__dataclass_fields__, 0.5)
    values |= {"seconds": dict.fromkeys(SECTIONS, 0.1), "comm_bytes": {"all_reduce/t": 1}, "parts": {"computing": 0.1}}
    values |= {"samples": [0, 1], "experts": None, "expert_load": None, "val_losses": None, "task_scores": None}
    values |= dict.fromkeys(("layer_grad_norms", "layer_rms", "bubble", "workers", "worker_ranks"))
    names = [*GAUGES, *(f"bandwidth/{tier}" for tier in ("inside a node", "between nodes", "between racks"))]
    workers = {f"{name}/{end}": 1234.5678 for name in names for end in ("min", "median", "max")}
    ranks = {f"{name}/{end}": 512 for name in names for end in ("min", "max")}
    log = MetricsLog(folder / "metrics.jsonl")
    plain, gauged = MetricsRow(**values), MetricsRow(**values | {"workers": workers, "worker_ranks": ranks})
    seconds = in_turn([lambda: log.write_row(plain), lambda: log.write_row(gauged)])
    log.close()
    return seconds


def quick() -> Config:
    """Return a model smaller than gpt_quick's, whose step is short."""
    c = configure(layers=2, d_model=64, heads=4, length=64, vocab=1024, global_batch=4, microbatch=4)
    return replace(c, precision="fp32")


def of_steps() -> tuple[list[float], list[float]]:
    """Return the CPU seconds of all threads in steps without and with gauges, in turn, and the sorted
    differences of pairs, of which every other one has its steps the other way round."""
    c = quick()
    plan = make_plan(c)
    communicator = SingleRank(plan.mesh)
    trainer, combiner, own = trainer_of(c, plan, communicator), ReportCombiner(plan, communicator, 1.5), GaugeReader()
    steps, spent = iter(range(1, 1 << 30)), ([], [])
    own.start_reading(torch.device("cpu"))
    for i in range(400):
        for gauged in (False, True) if i % 2 else (True, False):
            begin = time.process_time()
            report = trainer.step(next(steps))
            report.gauges = own.take_means() if gauged else {}
            combiner.combine_reports(report)
            spent[gauged].append(time.process_time() - begin)
    pairs = [after - before for before, after in zip(*spent, strict=True)]
    return [median(seconds) for seconds in spent], sorted(pairs)


def main() -> None:
    """Print the costs."""
    sources = list(gauge_sources(""))
    reading = in_turn([lambda: GaugeReader().take_reading(sources)])[0]
    print(
        f"a reading, each {gauges.SECONDS:g} s: {reading * 1e6:.0f} us: {reading / gauges.SECONDS:.4%} of a processor"
    )
    for world in (1, 4, 64, 1024):
        plain, same, new = of_reports(world)
        print(
            f"rank 0's report on {world} ranks: {plain * 1e6:.0f} us without, {(same - plain) * 1e6:+.1f} us with,"
            f" {(new - plain) * 1e6:+.0f} us once a second: {(new - same) / gauges.SECONDS:.4%} of a processor"
        )
    print(f"a rank's report: {8 * len(GAUGES)} bytes more, and no message")
    with tempfile.TemporaryDirectory() as folder:
        plain, gauged = of_rows(Path(folder))
    print(f"the driver's row: {plain * 1e6:.0f} us without, {(gauged - plain) * 1e6:+.0f} us with 9 gauges")
    (without, with_), pairs = of_steps()
    low, middle, high = (pairs[int(len(pairs) / 2 + side * len(pairs) ** 0.5)] / without for side in (-0.98, 0, 0.98))
    print(f"steps in turn: {without * 1e3:.2f} ms of CPU time without, {with_ * 1e3:.2f} ms with")
    print(f"pairs of them differ by {middle:+.2%} (95 % interval of the median: {low:+.2%} to {high:+.2%})")


if __name__ == "__main__":
    main()

"""The host's cost of a layer and microbatch, beside plain PyTorch's: tensors too small to matter, so that it is all
Python, autograd and launches.

    OMP_NUM_THREADS=1 python -m benchmarks.host_cost [--repeats 40]

Prints, forward and backward pass together, the CPU time of the thread (the least of the repeats, ours and plain in
turn) and the calls of Python functions, of ours run eagerly, with whole blocks compiled, and of plain PyTorch
(`tests/harness/reference_model.py`). What a layer and a microbatch more cost is the difference of four runs of steps.

Then a whole step of twelve such layers, with clipping, update and report, beside the plain loop of `step_time.py`, both
with compiled blocks, in turn: the median ratio of their CPU times with its interval.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product

import torch

from benchmarks.step_time import PlainLoop, build_ours
from platform.config.fields import Config
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from tests.harness.oracle import MODELS, configure, trainer_of
from tests.harness.reference_model import ReferenceModel

LAYERS, MICROBATCHES = (2, 8), (2, 6)


def configured(model: str, layers: int, microbatches: int, compiles: str) -> Config:
    """Return the configuration of a tiny model of a kind, one sequence per microbatch."""
    c = configure(layers=layers, global_batch=microbatches, microbatch=1, precision="fp32", **MODELS[model])
    c.train.compile = compiles
    return c


def ours(c: Config) -> Callable[[], object]:
    """Return what runs the passes of a step of a trainer that is warm."""
    plan = make_plan(c)
    trainer = trainer_of(c, plan, SingleRank(plan.mesh))
    steps = iter(range(1, 1 << 20))
    for _ in range(3):
        trainer.step(next(steps))
    return lambda: trainer.step(next(steps))


def plain(c: Config) -> Callable[[], object]:
    """Return what runs the passes of plain PyTorch on as many microbatches."""
    model = ReferenceModel(c.model).float()
    tokens = torch.zeros(1, c.model.length, dtype=torch.long)

    def step() -> None:
        for _ in range(c.train.global_batch):
            model(tokens, tokens).backward()

    return step


def calls(step: Callable[[], object]) -> int:
    """Return the calls of Python functions in one step; on a CPU the backward pass runs in the same thread."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def of_one_more(costs: dict[tuple[int, int], float]) -> float:
    """Return what one layer and microbatch more cost, from the cost by (layers, microbatches)."""
    (l1, l2), (m1, m2) = LAYERS, MICROBATCHES
    return (costs[l2, m2] - costs[l2, m1] - costs[l1, m2] + costs[l1, m1]) / (l2 - l1) / (m2 - m1)


def cpu_seconds(step: Callable[[], object]) -> float:
    """Return the seconds of CPU time that this thread takes for a step."""
    start = time.thread_time()
    step()
    return time.thread_time() - start


def compare_steps(model: str, repeats: int) -> str:
    """Return the row of a whole step of twelve tiny layers beside the plain loop's, both compiled."""
    c = configured(model, 12, 1, "on")
    c.train.steps, c.optimizer.clip = 1 << 20, 1.0
    trainer = build_ours(c, "cpu")
    plain_loop = PlainLoop(c, "cpu", {n: w.detach().clone() for n, w in trainer.weights.master.items()}, True)
    pairs = []
    for k in range(1, repeats + 6):
        pairs.append((cpu_seconds(lambda k=k: trainer.step(k)), cpu_seconds(lambda k=k: plain_loop.step(k))))  # type: ignore[misc]
    times = pairs[5:]  # the first ones compile
    ratios, draw = [ours / plain for ours, plain in times], random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    least = [1e3 * min(side) for side in zip(*times, strict=True)]
    interval = f"{medians[50]:.3f} to {medians[-51]:.3f}"
    return f"| {model} | {least[0]:.2f} | {least[1]:.2f} | {statistics.median(ratios):.3f} | {interval} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print("| model | run | CPU ms | ratio | Python calls | ratio |\n|---|---|---|---|---|---|")
    kinds = {"plain": (plain, "off"), "eager": (ours, "off"), "compiled": (ours, "on")}
    for model in ("gpt", "llama"):
        steps = {
            (kind, *size): make(configured(model, *size, how))
            for kind, (make, how) in kinds.items()
            for size in product(LAYERS, MICROBATCHES)
        }
        least = dict.fromkeys(steps, float("inf"))
        for _ in range(repeats):
            for key, step in steps.items():
                least[key] = min(least[key], cpu_seconds(step))
        counted = {key: calls(step) for key, step in steps.items()}
        cost = {}
        for kind in kinds:
            of_kind = [
                {size: measured[kind, *size] for size in product(LAYERS, MICROBATCHES)} for measured in (least, counted)
            ]
            ms, count = of_one_more(of_kind[0]) * 1e3, of_one_more(of_kind[1])
            cost[kind] = ms, count
            ratios = [x / y for x, y in zip(cost[kind], cost["plain"], strict=True)]
            print(f"| {model} | {kind} | {ms:.3f} | {ratios[0]:.2f} | {count:.0f} | {ratios[1]:.2f} |", flush=True)
    print("\n| step of 12 layers | ours, ms | plain, ms | median ratio | 95 % |\n|---|---|---|---|---|")
    for model in ("gpt", "llama"):
        print(compare_steps(model, 5 * repeats), flush=True)


if __name__ == "__main__":
    main()

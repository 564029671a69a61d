"""The same trainer under Ray's actors and under plain processes, by command: seconds of a step.

    OMP_NUM_THREADS=1 python benchmarks/orchestration.py [--steps 60] [--rounds 2]

Runs are launched in turn, Ray, processes, processes, Ray, as two commands cannot alternate by step; the first steps of
each are left out. Prints the median of `step_seconds` of every run, the ratio of the medians of all steps of either
kind with a bootstrap interval of 95 %, and the goal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
GOAL = 1.01
SKIPPED = 5  # first steps of a run
KINDS = ("local", "processes")  # cluster=: an embedded Ray, and none
COMMAND = (
    "+experiment=gpt_quick data=synthetic tensor=serial parallel.data=2 model.layers=4 model.d_model=256 model.heads=8 "
    "model.length=128 model.vocab=8192 train.global_batch=8 train.microbatch=4 eval.every=0 monitor.sample=0 "
    "checkpoint.last=false"
).split()


def step_seconds(kind: str, steps: int) -> list[float]:
    """Launch one run and return the seconds of its steps, without the first ones. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*COMMAND, f"cluster={kind}", f"train.steps={steps + SKIPPED}", f"run.dir={folder}/run"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        arguments = [sys.executable, "-m", "platform.launch", *command]
        subprocess.run(arguments, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        rows = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        return [row["step_seconds"] for row in rows][SKIPPED:]


def interval(ours: list[float], others: list[float], draws: int = 2000) -> tuple[float, float]:
    """Return the bootstrap interval of 95 % of the ratio of two medians."""
    draw = random.Random(0)
    middle = lambda x: statistics.median(draw.choices(x, k=len(x)))  # noqa: E731
    ratios = sorted(middle(ours) / middle(others) for _ in range(draws))
    return ratios[int(0.025 * draws)], ratios[int(0.975 * draws) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind")
    args = parser.parse_args()
    seen: dict[str, list[float]] = {kind: [] for kind in KINDS}
    print("| run | median step (ms) |\n|---|---|")
    for k in range(args.rounds):
        for kind in KINDS if k % 2 == 0 else reversed(KINDS):
            seconds = step_seconds(kind, args.steps)
            seen[kind] += seconds
            print(f"| {kind} | {1000 * statistics.median(seconds):.2f} |", flush=True)
    ray, plain = (seen[kind] for kind in KINDS)
    ratio = statistics.median(ray) / statistics.median(plain)
    low, high = interval(ray, plain)
    verdict = "met" if ratio <= GOAL else "not met"
    print(f"\nratio **{ratio:.3f}** ({low:.3f} to {high:.3f}), goal <= {GOAL}: {verdict}")


if __name__ == "__main__":
    main()

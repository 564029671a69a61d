"""Microbatch sizes of a GPT on one core: larger ones compute faster, and make a longer bubble (Narayanan et al., 3.4).

    OMP_NUM_THREADS=1 python -m benchmarks.microbatches [--rounds 9]

Prints, for each size b, processor seconds of a step of 64 sequences (of this process, whatever else the machine does),
sequences per second over those of b = 1 (figure 7), and the time of 64 sequences through 8 stages by the paper's
equation 1, (64 / b + 8 - 1) t(b), over that of the best size (figure 8). The sizes are stepped in turn; medians.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from tests.harness.oracle import configure, trainer_of

SIZES, SEQUENCES, STAGES = (1, 2, 4, 8, 16, 32), 64, 8
MODEL = {"d_model": 64, "heads": 4, "length": 32, "vocab": 256, "layers": 4, "precision": "fp32"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    trainers = {}
    for size in SIZES:
        c = configure(microbatch=size, global_batch=SEQUENCES, **MODEL)
        plan = make_plan(c)
        trainers[size] = trainer_of(c, plan, SingleRank(plan.mesh))
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}
    for step in range(1, rounds + 2):
        for size, trainer in trainers.items():
            begin = time.process_time()
            trainer.step(step)
            seconds[size].append(time.process_time() - begin)
    took = {size: median(times[1:]) for size, times in seconds.items()}
    piped = {size: (SEQUENCES / size + STAGES - 1) * t * size / SEQUENCES / STAGES for size, t in took.items()}
    print(f"{'b':>3} {'step (s)':>9} {'speed':>6} {'8 stages (s)':>13} {'of the best':>12}")
    for size in SIZES:
        print(f"{size:>3} {took[size]:>9.3f} {took[1] / took[size]:>6.2f} {piped[size]:>13.3f} "
              f"{piped[size] / min(piped.values()):>12.2f}")  # fmt: skip


if __name__ == "__main__":
    main()

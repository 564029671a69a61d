"""Holding every step's state in host memory, with copies at peers, beside the step: 4 gloo processes on this machine.

    python benchmarks/memory_snapshot.py [--steps 8] [--nodes 2] [--apart]

Prints per plan what the fullest worker holds and gets from peers per snapshot, and medians over the steps of the
slowest worker's time in each; beside it CPU time, which other work on the machine hardly changes, and that of copying
as many bytes once, flat: what holding cannot fall below. The state does not grow with the batch: the share falls as a
step gets longer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from benchmarks.step_time import SIZES  # noqa: E402
from platform.checkpoint.snapshots import MemoryMap  # noqa: E402
from platform.config.fields import Config  # noqa: E402
from platform.predict.make_plan import make_plan  # noqa: E402
from platform.train.training_state import RankTrainingState, list_state_tensors  # noqa: E402
from tests.harness.memories import opened, take  # noqa: E402
from tests.harness.oracle import configure, trainer_of  # noqa: E402
from tests.harness.pool import Pool  # noqa: E402

RANKS = 4
PLANS: dict[str, dict[str, Any]] = {
    "data 4": {"data": 4, "microbatch": 1},
    "data 4, zero 1": {"data": 4, "microbatch": 1, "zero": 1},
    "data 4, zero 3": {"data": 4, "microbatch": 1, "zero": 3},
    "1d, t 2, data 2": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "microbatch": 2},
    "2d": {"tensor": "2d", "axes": {"r": 2, "c": 2}, "microbatch": 4},
}


def config(name: str) -> Config:
    model, batch = SIZES["gpt_small"]
    c = configure(**PLANS[name], precision="fp32", global_batch=batch)
    c.model = model
    return c


def measure(job: tuple[Config, list[int], int, bool], plan, communicator) -> list[tuple[float, ...]]:
    """Seconds of every step, and of holding it; CPU seconds of both, and of a flat copy of the state."""
    torch.set_num_threads(1)
    c, domains, steps, shared = job
    trainer = trainer_of(c, plan, communicator)
    state = RankTrainingState(trainer)
    memory = opened(state.held, domains, communicator, shared)
    trainer.step(1)
    flat = torch.ones(sum(block.tensor.nbytes for block in state.live_blocks()), dtype=torch.uint8)
    flat_copy = torch.zeros_like(flat)
    out: list[tuple[float, ...]] = []
    for step in range(2, steps + 5):  # the first three warm up, and make both buffers
        communicator.barrier()
        begin = time.perf_counter(), time.process_time()
        trainer.step(step)
        communicator.barrier()
        stepped = time.perf_counter(), time.process_time()
        take(memory, step, state.live_blocks(), state.read_values(), communicator.transfer)
        held = time.perf_counter(), time.process_time()
        flat_copy.copy_(flat)
        copied = time.process_time() - held[1]
        walls, cores = zip(
            *((b - a for a, b in zip(*pair, strict=True)) for pair in ((begin, stepped), (stepped, held))), strict=True
        )
        out.append((*walls, *cores, copied))
    return out[3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=1, choices=[1, 2, 4], help="that the ranks are said to run on")
    parser.add_argument("--apart", action="store_true", help="as where the ranks of a node cannot share memory")
    arguments = parser.parse_args()
    domains = [rank * arguments.nodes // RANKS for rank in range(RANKS)]
    pool = Pool()
    print(f"gpt_small, fp32, {RANKS} ranks said to be on {arguments.nodes} node(s), {os.cpu_count()} cores")
    print(
        "| plan | own state (MB) | from peers (MB) | step (ms) | hold (ms) | hold / step |"
        " CPU ms: step | hold | flat copy |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in PLANS:
        c = config(name)
        plan = make_plan(c)
        state = list_state_tensors(plan, ["exp_avg", "exp_avg_sq"])
        held = MemoryMap(state, domains, not arguments.apart)
        own = max(sum(part.nbytes for part in held.parts_to_snapshot(rank)) for rank in range(RANKS)) / 1e6
        from_peers = max(sum(c.nbytes for c in held.copies if c.receiver == rank) for rank in range(RANKS)) / 1e6
        ranks = pool.run(measure, (c, domains, arguments.steps, not arguments.apart), plan)
        slowest = [
            [max(times) for times in zip(*(rank[k] for rank in ranks), strict=True)] for k in range(len(ranks[0]))
        ]
        step, hold, *cores = (1000 * statistics.median(times) for times in zip(*slowest, strict=True))
        busy = " | ".join(f"{number:.1f}" for number in cores)
        print(
            f"| {name} | {own:.1f} | {from_peers:.1f} | {step:.0f} | {hold:.1f} | {100 * hold / step:.1f} % | {busy} |",
            flush=True,
        )
    pool.close()


if __name__ == "__main__":
    main()

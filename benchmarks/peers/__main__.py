"""Step times of ours and of other systems, stepped in turn in one launch per row; prints a table for RESULTS.md.

    OMP_NUM_THREADS=1 python -m benchmarks.peers [--rows ddp zero3_fsdp2 ...] [--compile] [--pairs 25]

Every row starts processes of its own, two for most, which build both systems with the same initial weights and feed
both the same batches (4 batches of random tokens that recur). Steps alternate A, B, B, A, a barrier before each. The
ratio is the median of the paired ratios of the slowest rank's time, ours / peer, with a bootstrap interval of 95 %.
CPU seconds are those of the processes, all ranks together, per step. Memory is how much the resident set of the
fullest rank grows while a system is built and stepped three times, each system in a launch of its own in which malloc
returns what is freed. Losses are means over the ranks: ours of the first and the last step, and the largest relative
difference in any step; a row whose losses part ends the command with status 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.peers import environment, ray_train  # noqa: E402
from benchmarks.peers.pairs import OURS, PEER, Comparison, Job, alternate, compare, peak_bytes  # noqa: E402
from benchmarks.peers.rows import ROWS, Row, compiling, configured  # noqa: E402
from platform.predict.make_plan import make_plan  # noqa: E402
from tests.harness.pool import Pool  # noqa: E402

PATIENCE = 3600.0  # seconds for one launch
# Largest relative difference of the two losses of a step. DDP and DDP from weights 1e-7 apart part by 8e-3 within 130
# steps, where the loss falls fastest.
APART = 1e-2

DEFAULT = [name for name in ROWS if name != "ray_train"]
COLUMNS = (
    "row", "peer", "ours (ms)", "peer (ms)", "ratio", "95 %", "goal", "CPU s ours, peer", "ratio", "MB ours, peer",
    "loss", "apart",
)  # fmt: skip


def launch(work, job: Job) -> list:
    """Run `work` on the processes of a pool of its own, one per rank of the job's plan."""
    plan = make_plan(job.config)
    if job.peer.startswith("ray_train:"):
        return ray_train.launch(work, job, plan)
    pool = Pool(plan.mesh.world_size, PATIENCE)
    try:
        return pool.run(work, job, plan)
    finally:
        pool.close()


def verdict(ratio: float, goal: float | None) -> str:
    return "-" if goal is None else f"<= {goal:.2f}: {'met' if ratio <= goal else 'not met'}"


def line(name: str, row: Row, comparison: Comparison, memory: list[int]) -> str:
    """Return a row of the table."""
    ours, theirs = (1000 * seconds for seconds in comparison.seconds)
    low, high = comparison.interval
    cpu_verdict = "" if row.cpu_goal is None else f" ({verdict(comparison.cpu_ratio, row.cpu_goal)})"
    cpu = f"{comparison.cpu_ratio:.3f}{cpu_verdict}"
    sizes = ", ".join(f"{size / 1e6:.0f}" for size in memory) or "-"
    cells = [name, row.peer.partition(":")[2], f"{ours:.1f}", f"{theirs:.1f}", f"**{comparison.ratio:.3f}**",
             f"{low:.3f} to {high:.3f}", verdict(comparison.ratio, row.goal),
             f"{comparison.cpu[0]:.3f}, {comparison.cpu[1]:.3f}", cpu, sizes,
             f"{comparison.losses[0]:.2f} to {comparison.losses[1]:.3f}", f"{comparison.apart:.0e}"]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=DEFAULT, choices=ROWS, metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--ray", action="store_true", help="Ray Train's DDP too: started by Ray, under one of its own")
    parser.add_argument("--compile", action="store_true", help="both sides compiled; else both eager")
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--warmup", type=int, default=5, help="steps of each before the first pair")
    parser.add_argument("--steps", type=int, default=0, help="of each in all, instead of --pairs")
    parser.add_argument("--no-memory", action="store_true", help="without the two launches that measure it")
    args = parser.parse_args()
    pairs = max(args.steps - args.warmup, 1) if args.steps else args.pairs
    print(f"{'compiled' if args.compile else 'eager'}, {pairs} pairs, load {os.getloadavg()[0]:.1f}\n")
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|", flush=True)
    parted = []
    for name in [*args.rows, *(["ray_train"] if args.ray and "ray_train" not in args.rows else [])]:
        row = ROWS[name]
        config = configured(row, args.warmup + pairs)
        if why := (row.package and environment.install(row.package)) or (args.compile and compiling(config)):
            print(f"| {name} | {row.peer.partition(':')[2]} | {why} |", flush=True)
            continue
        job = Job(config, row.peer, args.compile, args.warmup, pairs)
        comparison = compare(launch(alternate, job))
        alone = [] if args.no_memory else [replace(job, alone=system, warmup=3) for system in (OURS, PEER)]
        memory = [max(launch(peak_bytes, one)) for one in alone]
        print(line(name, row, comparison, memory), flush=True)
        parted += [name] if not comparison.apart <= APART else []
    if parted:
        print(f"\nlosses part by more than {APART:.0e}: {', '.join(parted)}")
    return 1 if parted else 0


if __name__ == "__main__":
    sys.exit(main())

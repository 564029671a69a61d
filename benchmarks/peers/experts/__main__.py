"""A layer of experts, forward and backward, beside megatron-core's and a plain PyTorch one; prints a table.

    OMP_NUM_THREADS=1 python -m benchmarks.peers.experts [--sizes mixtral deepseek ...] [--capacities 0 1.25]
        [--peers plain megatron ...] [--pairs 25]

Two processes, of which each has its own tokens and half of the experts, build both layers with the same weights, tokens
and gradient of the output; outputs and all gradients are compared first, and a row that parts by more than rounding
ends the command with status 1. Steps alternate A, B, B, A, a barrier before each. The ratio is the median of the paired
ratios of the slowest rank's time, ours / peer, with a bootstrap interval of 95 %; `CPU`: that of all ranks' CPU
seconds. Memory is how much the resident set of the fullest rank grows while a layer is built and stepped three times,
in a launch of its own. `sent`: MB that all ranks' all-to-alls send to others in one step, ours, the peer's, and of the
rows that must be sent. The processes keep the memory that they free, as our workers do.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.peers import environment  # noqa: E402
from benchmarks.peers.experts.layer import Size, configured  # noqa: E402
from benchmarks.peers.experts.turns import PEERS, Found, Job, alternate, peak_bytes  # noqa: E402
from benchmarks.peers.pairs import OURS, PEER, compare  # noqa: E402
from platform.predict.make_plan import make_plan  # noqa: E402
from tests.harness.pool import Pool  # noqa: E402

PATIENCE = 3600.0  # seconds for one launch
APART = 1e-5  # largest difference of an output or gradient, relative to its largest element: rounding in fp32
GOAL = 0.97

SIZES = {
    "mixtral": Size(256, 8, 2, 896, tokens=1024),
    "mixtral wide": Size(1024, 8, 2, 3584, tokens=512),
    "deepseek": Size(256, 64, 8, 64, shared=1, tokens=1024),
    "deepseek wide": Size(1024, 64, 8, 256, shared=1, tokens=512),
}
COLUMNS = ("layer", "capacity", "peer", "ours (ms)", "peer (ms)", "ratio", "95 %", "goal", "CPU", "MB ours, peer",
           "sent (MB) ours, peer, floor", "apart")  # fmt: skip


def launch(work, job: Job) -> list:
    """Run `work` on two processes of their own."""
    pool = Pool(2, PATIENCE)
    try:
        return pool.run(work, job, make_plan(configured(job.size)))
    finally:
        pool.close()


def line(name: str, job: Job, ranks: list[Found], memory: list[int]) -> str:
    """Return a row of the table."""
    comparison = compare([rank.seen for rank in ranks])
    ours, theirs = (1000 * seconds for seconds in comparison.seconds)
    sent = [sum(of_ranks) / 1e6 for of_ranks in zip(*(rank.sent for rank in ranks), strict=True)]
    cells = [name, f"{job.size.capacity or 'none'}", job.peer, f"{ours:.1f}", f"{theirs:.1f}",
             f"**{comparison.ratio:.3f}**", "{:.3f} to {:.3f}".format(*comparison.interval),
             "met" if comparison.ratio <= GOAL else "not met", f"{comparison.cpu_ratio:.3f}",
             ", ".join(f"{size / 1e6:.0f}" for size in memory) or "-",
             ", ".join(f"{mb:.2f}" for mb in sent), f"{max(rank.apart for rank in ranks):.0e}"]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES, metavar="NAME", help=", ".join(SIZES))
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS, metavar="NAME", help=", ".join(PEERS))
    parser.add_argument("--capacities", nargs="+", type=float, default=[0.0, 1.25], help="0: every token is computed")
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--warmup", type=int, default=3, help="steps of each before the first pair")
    parser.add_argument("--no-memory", action="store_true", help="without the two launches that measure it")
    args = parser.parse_args()
    print(f"{args.pairs} pairs, load {os.getloadavg()[0]:.1f}; goal: ratio <= {GOAL}\n")
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|", flush=True)
    parted = []
    for name in args.sizes:
        for capacity in args.capacities:
            for peer in args.peers:
                if "padded" in peer and not capacity:
                    continue
                if "megatron" in peer and (why := environment.install("megatron-core")):
                    print(f"| {name} | {capacity or 'none'} | {peer} | {why} |", flush=True)
                    continue
                job = Job(replace(SIZES[name], capacity=capacity), peer, args.warmup, args.pairs)
                ranks = launch(alternate, job)
                alone = [] if args.no_memory else [replace(job, alone=system, warmup=3) for system in (OURS, PEER)]
                print(line(name, job, ranks, [max(launch(peak_bytes, one)) for one in alone]), flush=True)
                parted += [f"{name} beside {peer}"] if not max(rank.apart for rank in ranks) <= APART else []
    if parted:
        print(f"\noutputs or gradients part by more than {APART:.0e}: {', '.join(parted)}")
    return 1 if parted else 0


if __name__ == "__main__":
    sys.exit(main())

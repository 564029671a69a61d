"""A Transformer block whose length two ranks share, beside torch's ring attention and plain PyTorch; prints a table.

    OMP_NUM_THREADS=1 python -m benchmarks.peers.contexts [--sizes grouped every] [--kinds gather heads ring]
        [--peers gathered pieces torch_allgather torch_alltoall] [--pairs 25]

Both processes build both blocks with the same weights, tokens and gradient of the output; outputs and all gradients of
both ranks together are compared first, and a row that parts by more than rounding ends the command with status 1. Steps
alternate A, B, B, A, a barrier before each. The ratio is the median of the paired ratios of the slowest rank's time,
ours / peer, with a bootstrap interval of 95 %; `CPU`: that of all ranks' CPU seconds. Memory is how much the resident
set of the fullest rank grows while a block is built and stepped three times, in a launch of its own. `sent`: MB that
all ranks send to others in one step, ours, the peer's, and what our kind must send. Sums of weights' gradients over the
ranks, alike for all, are left out of all columns.

megatron-core cannot take part: without Transformer Engine its attention refuses `context_parallel_size` above 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.peers.contexts.block import RANKS, Size, configured  # noqa: E402
from benchmarks.peers.contexts.plain import WAYS  # noqa: E402
from benchmarks.peers.contexts.turns import Found, Job, alternate, peak_bytes  # noqa: E402
from benchmarks.peers.pairs import OURS, PEER, compare  # noqa: E402
from platform.predict.make_plan import make_plan  # noqa: E402
from tests.harness.pool import Pool  # noqa: E402

PATIENCE = 3600.0  # seconds for one launch
APART = 1e-5  # largest difference of an output or gradient, relative to its largest element: rounding in fp32
GOAL = 0.95

SIZES = {"grouped": Size(256, 8, 2, 512, length=2048), "every": Size(256, 8, 8, 512, length=2048)}
KINDS = ("gather", "heads", "ring")
COLUMNS = ("key heads", "ours", "peer", "ours (ms)", "peer (ms)", "ratio", "95 %", "goal", "CPU", "MB ours, peer",
           "sent (MB) ours, peer, floor", "apart")  # fmt: skip


def launch(work, job: Job) -> list:
    """Run `work` on two processes of their own."""
    pool = Pool(RANKS, PATIENCE)
    try:
        return pool.run(work, job, make_plan(configured(job.size)))
    finally:
        pool.close()


def line(job: Job, ranks: list[Found], memory: list[int]) -> str:
    """Return a row of the table."""
    comparison, size = compare([rank.seen for rank in ranks]), job.size
    sent = [*(sum(of_ranks) for of_ranks in zip(*(rank.sent for rank in ranks), strict=True)), ranks[0].floor]
    cells = [f"{size.kv_heads} of {size.heads}", size.kind, job.peer, *(f"{1000 * s:.1f}" for s in comparison.seconds),
             f"**{comparison.ratio:.3f}**", "{:.3f} to {:.3f}".format(*comparison.interval),
             "met" if comparison.ratio <= GOAL else "not met", f"{comparison.cpu_ratio:.3f}",
             ", ".join(f"{n / 1e6:.0f}" for n in memory) or "-", ", ".join(f"{n / 1e6:.2f}" for n in sent),
             f"{max(rank.apart for rank in ranks):.0e}"]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--peers", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--warmup", type=int, default=3, help="steps of each before the first pair")
    parser.add_argument("--no-memory", action="store_true", help="without the launches that measure it")
    args = parser.parse_args()
    print(f"{args.pairs} pairs, load {os.getloadavg()[0]:.1f}; goal: ratio <= {GOAL}\n")
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|", flush=True)
    parted, grew = [], dict[tuple, int]()
    for name in args.sizes:
        for kind in args.kinds:
            for peer in args.peers:
                job = Job(replace(SIZES[name], kind=kind), peer, args.warmup, args.pairs)
                ranks = launch(alternate, job)
                systems = [] if args.no_memory else [(OURS, (name, OURS, kind)), (PEER, (name, PEER, peer))]
                for system, key in systems:
                    if key not in grew:
                        grew[key] = max(launch(peak_bytes, replace(job, alone=system, warmup=3)))
                print(line(job, ranks, [grew[key] for _, key in systems]), flush=True)
                parted += [f"{name}, {kind} beside {peer}"] if not max(rank.apart for rank in ranks) <= APART else []
    if parted:
        print(f"\noutputs or gradients part by more than {APART:.0e}: {'; '.join(parted)}")
    return 1 if parted else 0


if __name__ == "__main__":
    sys.exit(main())

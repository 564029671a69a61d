"""What forming a generation costs on many GPUs, on a machine without one: `python -m tests.benchmarks.forming`.

Prints for each size the collectives of the whole world that NCCL's groups take, one after the other, as they are made
now and as one for each group; a rank's communicators; the seconds in which one worker plans the run and lists its
groups; and the bytes that a rank of the group in host memory reads in the store.
"""

from __future__ import annotations

import time
from typing import Any

from platform.cluster.crew.base.job import GLOO_ENVIRONMENT
from platform.launch import compose
from platform.parallel.communicator import torch_distributed
from platform.parallel.communicator.torch_distributed import ProcessGroups
from platform.plan.core.step_collectives import communicators, process_groups
from platform.planning.make_plan import make_plan
from tests.parallel.communicator.test_forming import SIZES, CountedDist, bytes_per_rank


def row(ranks: int) -> list[Any]:
    """Return the cells of a world of so many ranks: of gpt175b, or of the trillion parameters."""
    config = compose(["+experiment=gpt175b", *SIZES[ranks]])
    start = time.process_time()
    plan = make_plan(config)
    planned = time.process_time() - start
    start = time.process_time()
    axes = process_groups(plan)
    torch_distributed.dist = dist = CountedDist()  # type: ignore[assignment]
    groups = ProcessGroups(plan.mesh, 0, axes, neighbours=plan.neighbours)
    listed = time.process_time() - start
    own = {tuple(plan.mesh.groups(a)) for a in axes} - {tuple(plan.mesh.groups(plan.mesh.ordered(plan.mesh.axes)))}
    before = 1 + sum(map(len, own)) + 2 * len(plan.neighbours) * (ranks // plan.stages)
    mine = sum(communicators(plan, groups.coordinates["stage"]))
    return [f"{ranks:,}", f"{before:,}", dist.calls, mine, f"{planned:.2f}", f"{listed:.2f}"]


def main() -> None:
    """Print both tables."""
    print("| ranks | a call for each group | calls | communicators of a rank | plans (CPU s) | lists groups (CPU s) |")
    print("|---|---|---|---|---|---|")
    for ranks in SIZES:
        print(f"| {' | '.join(map(str, row(ranks)))} |", flush=True)
    print("\n| ranks | bytes a rank reads in the store, with records | with numbers |\n|---|---|---|")
    for ranks in (16, 32, 64):
        off = {name: "0" for name in GLOO_ENVIRONMENT}
        print(f"| {ranks} | {bytes_per_rank(ranks, off):,} | {bytes_per_rank(ranks, GLOO_ENVIRONMENT):,} |", flush=True)


if __name__ == "__main__":
    main()

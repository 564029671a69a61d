"""What forming a generation costs on many GPUs, on a machine without one: `python -m benchmarks.forming`.

Prints for each size the collectives of the whole world that NCCL's groups take, one after the other, as they are made
now and as one for each group; a rank's communicators; the seconds in which one worker plans the run and lists its
groups; and what the group in host memory takes: bytes that all ranks move through the store, and the most sockets of a
process, as a full mesh with gloo's records of connections, with ranks in their place, and along the tree. The figures
are those of `planned`, which are compared here with what 8 to 128 ranks, each a thread, really take. The last table
has the connections of a rank beside those of the tree: to keep copies of snapshots, and in a turn of a restore.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from platform.checkpoint.blocks import Piece, list_written_parts
from platform.checkpoint.moves import World, assign_readers
from platform.checkpoint.snapshots import MemoryMap
from platform.launch import compose_config
from platform.plan.step_collectives import count_communicators, process_groups
from platform.predict.make_plan import make_plan
from platform.predict.recovery_price import NODE
from platform.runtime import host_memory
from platform.runtime import process_groups as torch_distributed
from platform.runtime.host_memory import find_tree_relatives
from platform.runtime.process_groups import ProcessGroups
from platform.train.training_state import list_state_tensors
from tests.runtime.communicator.test_forming import SIZES, CountedDist, counted, planned


def row(ranks: int) -> list[Any]:
    """Return the cells of a world of so many ranks: of gpt175b, or of the trillion parameters."""
    config = compose_config(["+experiment=gpt175b", *SIZES[ranks]])
    start = time.process_time()
    plan = make_plan(config)
    planned = time.process_time() - start
    start = time.process_time()
    axes = process_groups(plan)
    torch_distributed.dist = host_memory.dist = dist = CountedDist()  # type: ignore[assignment]
    groups = ProcessGroups(plan.mesh, 0, axes, neighbours=plan.neighbour_stages)
    listed = time.process_time() - start
    own = {tuple(plan.mesh.list_groups(a)) for a in axes} - {
        tuple(plan.mesh.list_groups(plan.mesh.order_axes(plan.mesh.axes)))
    }
    before = 1 + sum(map(len, own)) + 2 * len(plan.neighbour_stages) * (ranks // plan.num_stages)
    mine = sum(count_communicators(plan)[groups.coordinates["stage"]])
    return [f"{ranks:,}", f"{before:,}", dist.calls, mine, f"{planned:.2f}", f"{listed:.2f}"]


def main() -> None:
    """Print the tables."""
    print("| ranks | a call for each group | calls | communicators of a rank | plans (CPU s) | lists groups (CPU s) |")
    print("|---|---|---|---|---|---|")
    for ranks in SIZES:
        print(f"| {' | '.join(map(str, row(ranks)))} |", flush=True)
    print("\n| ranks | bytes in the store: records | numbers | tree | most sockets of a process: full mesh | tree |")
    print("|---|---|---|---|---|---|")
    for ranks in (8, 32, *SIZES):
        tree, full = planned("tree", ranks), planned("full", ranks)
        if ranks <= 128:
            assert (counted("tree", ranks), counted("full", min(ranks, 64))) == (tree, planned("full", min(ranks, 64)))
        records = full.read + full.written + NUMBER * ranks**2 * (ranks + 1)
        most = 1 + max(len(find_tree_relatives(rank, ranks).peer_ranks) for rank in range(ranks))
        cells = records, full.read + full.written, tree.read + tree.written, ranks, most
        print(f"| {ranks:,} | {' | '.join(f'{cell:,}' for cell in cells)} |", flush=True)
    print("\n| ranks | most peers of a rank, for snapshots | in a turn of a restore |\n|---|---|---|")
    for ranks in SIZES:
        print(f"| {ranks:,} | {' | '.join(map(str, peers(ranks)))} |", flush=True)


def peers(ranks: int) -> tuple[int, int]:
    """Return the most peers of a rank, in the memory of other nodes and in a turn in which all read a checkpoint."""
    held = list_state_tensors(
        make_plan(compose_config(["+experiment=gpt175b", *SIZES[ranks]])), ["exp_avg", "exp_avg_sq"]
    )
    copies = MemoryMap(held, [rank // NODE for rank in range(ranks)], shared=True).copies
    wanted = [
        Piece(s.tensor.name, s.tensor.dtype, s.box, None)
        for rank in range(ranks)
        for s in list_written_parts(held, rank)
    ]
    holders = {tensor.name: tensor.holders.items() for tensor in held}
    turns = (
        (
            (sender, receiver)
            for sender, pieces in enumerate(readers)
            for piece in pieces
            for box, owners in holders[piece.name]
            if piece.box.intersect_box(box)
            for receiver in owners
        )
        for readers in assign_readers(wanted, held, World(0, ranks))
    )
    return most_peers((copy.sender, copy.receiver) for copy in copies), max(map(most_peers, turns))


def most_peers(pairs: Iterable[tuple[int, int]]) -> int:
    """Return the most ranks that one has in common pairs with, itself left out."""
    partners: dict[int, set[int]] = defaultdict(set)
    for a, b in pairs:
        partners[a].add(b)
        partners[b].add(a)
    return max((len(others - {one}) for one, others in partners.items()), default=0)


NUMBER = 8  # bytes of a connection in gloo's records


if __name__ == "__main__":
    main()

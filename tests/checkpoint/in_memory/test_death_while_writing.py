"""What a process leaves in shared memory that is killed while it takes snapshots: whole steps, and nothing else that
counts."""

from __future__ import annotations

import random
import time
from itertools import count
from multiprocessing.connection import Connection

import pytest
import torch

from platform.checkpoint.blocks import Block, Box, HeldTensor
from platform.checkpoint.snapshots import MemoryMap, RankSnapshots, SharedMemory, Snapshot
from tests.harness import warm
from tests.harness.memories import take

SHAPE, TENSORS = (1 << 10, 1 << 10), 4
STATE = [HeldTensor(f"w{i}", "float32", SHAPE, {Box.whole_tensor(SHAPE): (0,)}) for i in range(TENSORS)]


def held() -> MemoryMap:
    return MemoryMap(STATE, ["node", "node"], shared=True)


def blocks(step: int) -> list[Block]:
    return [Block(tensor.name, Box.whole_tensor(SHAPE), torch.full(SHAPE, float(step))) for tensor in STATE]


def write(pipe: Connection, says: bool) -> None:
    """Take one snapshot after the other. `says`: a snapshot says that it is being written to."""
    if not says:
        Snapshot.mark_incomplete = lambda self: None
    memory = SharedMemory.create()
    mine = RankSnapshots(held(), 0, {0: memory})
    pipe.send(memory.address)
    for step in count(1):
        take(mine, step, blocks(step), {"step": step}, lambda sent, received: None)
        if step == 2:
            pipe.send("both are there")


def left_behind(says: bool = True) -> list[Snapshot]:
    """The two snapshots in the memory of a process that is killed at a random moment."""
    ours, theirs = warm.CONTEXT.Pipe()
    warm.start()
    writer = warm.CONTEXT.Process(target=write, args=(theirs, says), daemon=True)
    writer.start()
    memory = SharedMemory.open_address(ours.recv())
    assert memory and ours.recv() == "both are there"
    time.sleep(random.uniform(0.0, 0.1))
    writer.kill()
    writer.join()
    return list(RankSnapshots(held(), 1, {0: memory})._iterate_mate_snapshots(0))


def torn(snapshots: list[Snapshot]) -> int:
    """How many of them say that they are whole, and are not."""
    wrong = 0
    for snapshot in snapshots:
        if (step := snapshot.step) is not None:
            numbers = snapshot.own_buffer.data.view(torch.float32)
            wrong += not (snapshot.values == {"step": step} and bool((numbers == step).all()))
    return wrong


def test_nothing_torn_is_trusted():
    incomplete = 0
    for _ in range(40):
        snapshots = left_behind()
        whole = [snapshot for snapshot in snapshots if snapshot.step is not None]
        assert whole and torn(snapshots) == 0, "the step before is whole, whenever it dies"
        assert len({snapshot.step for snapshot in whole}) == len(whole)
        incomplete += len(snapshots) - len(whole)
        if incomplete:
            return
    assert incomplete, "it died while it wrote"


def test_negative_control_what_does_not_say_that_it_is_written_to_is_found_torn():
    assert any(torn(left_behind(says=False)) for _ in range(25))


def test_who_lacks_the_step_is_not_read():
    """A rank that has died before it completed a step, and one that nobody distrusts though it has none."""
    one, other = SharedMemory.create(), SharedMemory.create()
    mine, mate = (RankSnapshots(held(), rank, {0: one, 1: other}) for rank in (0, 1))
    take(mine, 1, blocks(1), {}, lambda sent, received: None)
    with pytest.raises(RuntimeError, match="rank 1 holds no snapshot of step 1"):
        mine.open_node_snapshot(1)
    take(mate, 1, blocks(1), {}, lambda sent, received: None)
    mine.open_node_snapshot(1)

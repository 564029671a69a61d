"""What any job holds in memory, the survivors of a failure pass to any other job, bit by bit, without storage."""

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from platform.checkpoint.blocks import Block, JoinedBlocks, join_chains
from platform.checkpoint.memory_recovery import (
    find_surviving_chains,
    is_recoverable,
    list_unrecoverable_tensors,
    map_keepers,
    recover_state,
)
from platform.checkpoint.moves import World
from platform.checkpoint.snapshots import MemoryMap, NodeSnapshot, RankSnapshots, SharedMemory, open_node_memories
from platform.plan.layout import Mesh
from platform.runtime.communicator import SingleRank, all_gather_values
from tests.checkpoint.in_memory.test_peers import SHAPES
from tests.harness.memories import opened, take
from tests.harness.storage_job import Job, values
from tests.harness.threads import run_threads

DOMAINS = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Small tensors are cut as large ones are."""
    monkeypatch.setattr("platform.checkpoint.memory_recovery.LARGEST_BLOCK", 64)
    monkeypatch.setattr("platform.checkpoint.blocks.LARGEST_ROW", 16)


def on_all(world_size: int, work) -> list:
    mesh = Mesh.arrange_axes({"data": world_size})
    return [work(SingleRank(mesh))] if world_size == 1 else run_threads(mesh, work)


def hold(jobs: list[Job], nodes: list[int], shared: bool = False, divided: bool = True) -> list[RankSnapshots]:
    """Job k is the state at step k."""

    def work(communicator) -> RankSnapshots:
        memory = opened(jobs[0].state, nodes, communicator, shared, divided)
        for step, job in enumerate(jobs):
            blocks = job.blocks(communicator.rank)
            take(memory, step, blocks, {"step": step}, communicator.transfer)
            for block in blocks:
                block.tensor.zero_()  # what is held does not change with it
        return memory

    return on_all(jobs[0].world_size, work)


def left(held: MemoryMap, seats: dict[int, int]) -> list[JoinedBlocks]:
    return find_surviving_chains(held.chains, held.copies, held.map_readers(seats))


def pass_to(
    job: Job, survived: list[JoinedBlocks], snapshots: dict[int, NodeSnapshot], budget: int
) -> list[list[Block]]:
    def work(communicator) -> list[Block]:
        rank = communicator.rank
        blocks = job.blocks(rank, empty=True)
        read = snapshots[rank].read_part if rank in snapshots else None
        all_gather = partial(all_gather_values, communicator)
        recover_state(
            survived, read, job.state, blocks, World(rank, job.world_size, all_gather, communicator.exchange, budget)
        )
        return blocks

    return on_all(job.world_size, work)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    nodes=DOMAINS,
    new=st.integers(1, 6),
    budget=st.integers(16, 3000),
    how=st.sampled_from([(False, False), (True, False), (True, True)]),
)
def test_any_tiling_to_any_other_after_the_loss_of_a_domain(seed, nodes, new, budget, how):
    """Where memory is shared, all but one rank of the other nodes may be lost as well."""
    draw = np.random.default_rng(seed)
    tensors, old = values(SHAPES, seed % 1000), len(nodes)
    before = Job.random(tensors, old, draw)
    memories = hold([before], nodes, *how)
    held = memories[0].held
    domains = nodes if len(set(nodes)) > 1 else list(held.memories)
    gone = draw.choice(domains) if len(set(domains)) > 1 else None
    alive = [rank for rank in range(old) if domains[rank] != gone]
    if how[0]:
        first = [rank for rank in alive if rank == nodes.index(nodes[rank])]
        alive = first + [rank for rank in alive if rank not in first and draw.random() < 0.5]
    alive = alive[:new]
    if list_unrecoverable_tensors(held, alive):
        assert len({held.memories[rank] for rank in range(old) if domains[rank] != gone}) > new  # too few seats
        return
    seats = dict(zip(alive, draw.permutation(new).tolist(), strict=False))
    after = Job.random(tensors, new, draw)
    after.check(
        pass_to(after, left(held, seats), {seats[rank]: memories[rank].open_node_snapshot(0) for rank in alive}, budget)
    )


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), nodes=st.lists(st.integers(0, 2), min_size=2, max_size=6), shared=st.booleans())
def test_whoevers_memory_is_distrusted_nothing_is_lost(seed, nodes, shared):
    """Also where one node's ranks share memory: what only the damaged rank holds, as ZeRO's shards, has a copy."""
    draw = np.random.default_rng(seed)
    tensors, world = values(SHAPES, seed % 1000), len(nodes)
    before = Job.random(tensors, world, draw)
    memories = hold([before], nodes, shared, divided=False)
    held, wrong = memories[0].held, int(draw.integers(world))
    assert list_unrecoverable_tensors(held, range(world), [wrong]) == []
    assert is_recoverable(map_keepers(held, [wrong]), {m for rank, m in enumerate(held.memories) if rank != wrong})
    survived = find_surviving_chains(
        held.chains, held.copies, held.map_readers({rank: rank for rank in range(world)}, [wrong])
    )
    after = Job.random(tensors, world, draw)
    snapshots = {
        rank: memory.open_node_snapshot(0, [wrong]) for rank, memory in enumerate(memories) if rank != wrong or shared
    }
    after.check(pass_to(after, survived, snapshots, 1 << 20))


@pytest.mark.parametrize("shared", [False, True])
def test_the_last_two_steps_are_held(shared):
    jobs = [Job.whole(values({"w": (8, 8)}, step), 2) for step in range(4)]
    memories = hold(jobs, [0, 0], shared)
    assert [memory.complete_steps for memory in memories] == [[2, 3]] * 2
    for step in (2, 3):
        snapshots = {rank: memory.open_node_snapshot(step) for rank, memory in enumerate(memories)}
        assert snapshots[0].values == {"step": step}
        jobs[step].check(pass_to(jobs[step], join_chains(jobs[step].state), snapshots, 1 << 20))


def test_what_fails_while_it_is_held_leaves_the_step_before():
    """Twice in a row: the torn one is written to again, never the whole one."""
    jobs = [Job.whole(values({"w": (8, 8)}, step), 1) for step in range(3)]
    memory = hold(jobs[:2], [0])[0]

    def fail(sent, received):
        raise ConnectionError

    for _ in range(2):
        with pytest.raises(ConnectionError):
            take(memory, 2, jobs[2].blocks(0), {}, fail)
        assert memory.complete_steps == [1]
    jobs[1].check(pass_to(jobs[1], join_chains(jobs[1].state), {0: memory.open_node_snapshot(1)}, 1 << 20))
    memory.keep_only_step(1)
    take(memory, 2, jobs[2].blocks(0), {}, SingleRank(Mesh.arrange_axes({"data": 1})).transfer)
    assert memory.complete_steps == [1, 2]


def test_rounds_are_bounded_and_senders_even():
    """Three of four replicas survive, and a fresh rank gets everything: a third from each, 1 KiB at a time."""
    tensors = values({f"w{i}": (16, 8) for i in range(9)})
    job = Job.whole(tensors, 4)
    memories = hold([job], [0, 1, 2, 3])
    survived = left(memories[0].held, {0: 0, 1: 1, 3: 2})
    snapshots = {new: memories[old].open_node_snapshot(0) for new, old in enumerate((0, 1, 3))}
    got: list[list[int]] = []

    def work(communicator) -> list[Block]:
        def exchange(sent, received):
            communicator.exchange(sent, received)
            if communicator.rank == 3:
                sizes = {peer: len(message) for peer, message in received}
                got.append([sizes.get(peer, 0) for peer in range(4)])

        rank, blocks = communicator.rank, job.blocks(communicator.rank, empty=True)
        read = snapshots[rank].read_part if rank in snapshots else None
        all_gather = partial(all_gather_values, communicator)
        recover_state(survived, read, job.state, blocks, World(rank, 4, all_gather, exchange, budget=256))
        return blocks

    job.check(on_all(4, work))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    sums = np.array(got).sum(0)
    assert len(got) == -(-4 * total // 1024) and max(map(sum, got)) <= 1024 + 4 * 80
    assert all(abs(s - total / 3) <= 16 for s in sums[:3]) and sums[3] == 0


@pytest.mark.parametrize(("dtype", "extent"), list(product([torch.float64, torch.bfloat16, torch.int64], [(3, 5), ()])))
def test_bytes_are_those_of_the_type(dtype, extent):
    tensors = {"odd": torch.arange(7).to(torch.bfloat16), "w": torch.ones(extent, dtype=dtype) * 3}
    job = Job.whole(tensors)
    job.check(pass_to(job, join_chains(job.state), {0: hold([job], [0])[0].open_node_snapshot(0)}, 1 << 20))


def test_negative_control_without_the_copies_nothing_can_be_recovered():
    tensors = values(SHAPES)
    job = Job.random(tensors, 4, np.random.default_rng(5))
    seats = {0: 0, 2: 1, 3: 2}
    memories = hold([job], [0, 1, 2, 3])
    held = memories[0].held
    snapshots = {seats[rank]: memories[rank].open_node_snapshot(0) for rank in seats}
    after = Job.whole(tensors, 3)
    after.check(pass_to(after, left(held, seats), snapshots, 1 << 20))
    held.copies = []
    assert list_unrecoverable_tensors(held, [0, 2, 3])
    with pytest.raises(AssertionError):
        after.check(pass_to(after, left(held, seats), snapshots, 1 << 20))


def test_ranks_that_cannot_find_each_other_s_memory_do_not_share_it():
    """Another process of that number, one that is gone, a file that is another: nothing of it is opened."""
    memory, other = SharedMemory.create(), SharedMemory.create()
    process, number, device, inode = memory.address
    assert SharedMemory.open_address(memory.address).address[2:] == [device, inode]
    for wrong in ([process, 1, device, inode], [process, other.address[1], device, inode], [1 << 22, 3, device, inode]):
        assert SharedMemory.open_address(wrong) is None
    nodes = ["a", "a", "b"]
    gathered = [[memory.address, [1 << 22, 3, 0, 0], other.address], [False, True, True]]
    assert open_node_memories(memory, nodes, 0, lambda mine: gathered.pop(0)) is None
    gathered = [[memory.address, other.address, [1 << 22, 3, 0, 0]], [True, True, True]]
    assert list(open_node_memories(memory, nodes, 0, lambda mine: gathered.pop(0))) == [0, 1], (
        "nobody opens another node's"
    )

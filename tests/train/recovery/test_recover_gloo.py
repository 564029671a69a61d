"""State in memory on real processes: gloo carries the copies, and what survivors pass on."""

from __future__ import annotations

import pytest
import torch

from platform.checkpoint.snapshots import RankSnapshots
from platform.config.fields import Config
from platform.predict.make_plan import make_plan
from platform.train.state_recovery import Formation, MemorySource, find_source
from platform.train.training_state import RankTrainingState
from tests.harness.memories import opened, take
from tests.harness.oracle import trainer_of
from tests.harness.seats import seated
from tests.train.recovery.test_resume import config

HELD: dict[str, RankSnapshots] = {}  # of a process of the pool; outlives a generation


def first(case: tuple[Config, list[str], bool], plan, communicator) -> tuple[list[float], list[int], int]:
    """Three steps, the first two held: their losses, the steps held, and how many parts were sent to peers."""
    torch.set_num_threads(1)
    c, domains, shared = case
    trainer = trainer_of(c, plan, communicator)
    state = RankTrainingState(trainer)
    HELD["memory"] = memory = opened(state.held, domains, communicator, shared)
    numbers = []
    for step in (1, 2, 3):
        numbers.append(trainer.step(step).loss)
        moved = dict(communicator.moved)
        if step < 3:
            take(memory, step, state.live_blocks(), state.read_values(), communicator.transfer)
        assert dict(communicator.moved) == moved, "copies at peers are no part of the step's communication"
    return numbers, memory.complete_steps, sum(len(parts) for parts in memory._sent.values())


def second(case: tuple[Config, MemorySource], plan, communicator) -> float:
    torch.set_num_threads(1)
    c, source = case
    memory = HELD.pop("memory", None)
    trainer = trainer_of(c, plan, communicator)
    continues = communicator.rank in source.new_rank_by_old.values()
    held = memory.held if memory and continues else source.formed.build_memory_map()
    RankTrainingState(trainer).recover_state(
        source.list_surviving_chains(held), memory.open_node_snapshot(2) if memory and continues else None
    )
    return trainer.step(3).loss


@pytest.mark.parametrize(
    ("old", "new", "gone", "shared"),
    [
        ("1d, data 2, zero 3", "interleaved, v = 2", {1}, False),
        ("1d, data 2, zero 3", "1f1b, zero 1", {1, 2, 3}, True),
        ("1f1b, zero 1", "data 3, zero 1", {2, 3}, True),
    ],
)
def test_gloo_carries_the_copies_where_memory_is_not_shared(pool, old, new, gone, shared):
    plans = {name: make_plan(config(name)) for name in (old, new)}
    members, size = list(range(plans[old].mesh.world_size)), plans[new].mesh.world_size
    domains = [f"node {rank // 2}" for rank in members] if len(gone) == 2 else ["node"] * len(members)
    parts = pool.run(first, (config(old), domains, shared), plans[old])
    assert all(steps == [1, 2] for _, steps, _ in parts)
    assert any(sent for _, _, sent in parts) == (not shared or len(gone) == 2)
    formed = {1: Formation(config(old), None, domains, members, ["exp_avg", "exp_avg_sq"], shared)}
    source, _ = find_source({1: 2}, formed, [member for member in members if member not in gone], size)
    assert source and not source.gathered
    source = seated(source, sorted(gone), size)
    assert source.seats == list(
        range(size)
    )  # the pool's processes keep their ranks; those that are gone come back with nothing
    for loss in pool.run(second, (config(new), source), plans[new]):
        assert loss == pytest.approx(parts[0][0][2], rel=1e-10, abs=0)

"""Two steps, the loss of workers, and two more steps under another plan out of the survivors' memory: what four steps
in one go give."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from platform.checkpoint.blocks import Block
from platform.checkpoint.snapshots import RankSnapshots
from platform.plan.layout import Mesh
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import Communicator, SingleRank
from platform.train import rank_parameters as weights
from platform.train.state_recovery import Formation, MemorySource, find_source
from platform.train.training_state import RankTrainingState
from tests.harness.memories import opened, take
from tests.harness.oracle import trainer_of
from tests.harness.pairwise import cover, product
from tests.harness.seats import seated
from tests.harness.threads import run_threads
from tests.train.recovery.test_resume import FACTORED, NAMES, ROUTED, ROUTES, config, moments
from tests.train.recovery.test_resume import copies as live_copies
from tests.train.recovery.test_resume import whole as assemble

NODES = {"one node": 1, "two nodes": 2}
SHARED = ["shared", "apart"]  # the memory of a node's ranks
FACTORS: dict[str, list[Any]] = {
    "old": NAMES,
    "new": NAMES,
    "nodes": list(NODES),
    "memory": SHARED,
    "lost": ["first", "last", "nobody"],
}
SIZES = {name: make_plan(config(name)).mesh.world_size for name in (*NAMES, *FACTORED, *ROUTED)}


def domains(name: str, nodes: str) -> list[str]:
    return [f"node {rank * NODES[nodes] // SIZES[name]}" for rank in range(SIZES[name])]


def lost(case: dict[str, Any]) -> set[int]:
    """Old ranks: those of the first or the last failure domain."""
    if case["lost"] == "nobody":
        return set()
    homes = domains(case["old"], case["nodes"])
    homes = homes if len(set(homes)) > 1 else [str(rank) for rank in range(len(homes))]
    return {rank for rank, home in enumerate(homes) if home == homes[0 if case["lost"] == "first" else -1]}


def legal(case: dict[str, Any]) -> bool:
    return len(lost(case)) < SIZES[case["old"]]


CASES = product(FACTORS, legal)
COVER = cover(product({**FACTORS, "old": NAMES[2:5], "new": NAMES[6:9]}, legal))
SAME = [case for case in CASES if case["old"] == case["new"] and case["lost"] != "nobody"]


class Undisturbed(NamedTuple):
    """A rank's four steps: loss and gradient norm, blocks after the second and the fourth, and what it held, by nodes
    and whether they share memory, when the third began."""

    numbers: list[tuple[float, float]]
    after: list[list[Block]]
    memories: dict[tuple[str, str], RankSnapshots]


def ranks(name: str, work, fresh: bool = True) -> list:
    c = config(name)
    plan = make_plan(c)

    def one(communicator: Communicator):
        torch.set_num_threads(1)
        return work(trainer_of(c, plan, communicator, fresh=fresh), communicator)

    return [one(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else run_threads(plan.mesh, one)


def numbers(trainer, step: int) -> tuple[float, float]:
    report = trainer.step(step)
    return report.loss, report.grad_norm


@cache
def undisturbed(name: str) -> list[Undisturbed]:
    def work(trainer, communicator) -> Undisturbed:
        state, history, after = RankTrainingState(trainer), [], []
        memories = {
            (nodes, shared): opened(state.held, domains(name, nodes), communicator, shared == "shared")
            for nodes in NODES
            for shared in SHARED
        }
        for step in (1, 2, 3, 4):
            history.append(numbers(trainer, step))
            if step < 3:
                for memory in memories.values():
                    take(memory, step, state.live_blocks(), state.read_values(), communicator.transfer)
            if step % 2 == 0:
                after.append(live_copies(state))
        return Undisturbed(history, after, memories)

    return ranks(name, work)


def source_of(case: dict[str, Any]) -> MemorySource:
    """What they recover from. Members are numbered by old rank, fresh ones from 100."""
    before, size = undisturbed(case["old"]), SIZES[case["new"]]
    members = list(range(len(before)))
    homes = domains(case["old"], case["nodes"])
    shared = case["memory"] == "shared"
    formed = {0: Formation(config(case["old"]), None, homes, members, moments(case["old"]), shared)}
    assert all(one.memories[case["nodes"], case["memory"]].complete_steps == [1, 2] for one in before)
    source, reasons = find_source({0: 2}, formed, [m for m in members if m not in lost(case)], size)
    assert source and source.step == 2 and not reasons
    return seated(source, list(range(100, 100 + size)), size)


def gather(source: MemorySource, memories: list[RankSnapshots]) -> None:
    """Survivors without a seat pass on what only they have."""
    _, handed = source.plan_handovers(memories[0].held)

    def work(communicator) -> None:
        memory = memories[source.gathered[communicator.rank]]
        memory.exchange_handovers(handed, source.step, communicator.rank, communicator.transfer)

    run_threads(Mesh.arrange_axes({"data": len(source.gathered)}), work)


def recovered(case: dict[str, Any], forget: str = "") -> bool:
    """Returns whether survivors without a seat had to pass on what they have. `forget`: a kind of tensor that is lost
    on the way."""
    source = source_of(case)
    before = undisturbed(case["old"])
    kept = [one.memories[case["nodes"], case["memory"]] for one in before]
    if source.gathered:
        gather(source, kept)
    memories = {new: kept[source.seats[new]] for new in source.new_rank_by_old.values()}
    survived = source.list_surviving_chains(kept[0].held)

    def work(trainer, communicator):
        state = RankTrainingState(trainer)
        memory = memories.get(communicator.rank)
        state.recover_state(survived, memory.open_node_snapshot(source.step) if memory else None)
        start, values = live_copies(state), state.read_values()
        for block in state.live_blocks():
            if block.name.split(".")[0] == forget:
                block.tensor.zero_()
        return start, values, [numbers(trainer, step) for step in (3, 4)], live_copies(state)

    def undefined(plan, communicator, p, seed, out):
        assert seed is None, "what is recovered is not initialised before"
        out.fill_(torch.nan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "initialise", undefined)
        parts = ranks(case["new"], work, fresh=False)
    shapes = {held.name: held.shape for held in kept[0].held.state}
    assert {name.split(".")[0] for name in shapes} == {"model", *moments(case["old"])}
    found_, wanted = (assemble(blocks, shapes) for blocks in ([p[0] for p in parts], [u.after[0] for u in before]))
    assert all(torch.equal(found_[name], wanted[name]) for name in shapes)
    found_, wanted = (assemble(blocks, shapes) for blocks in ([p[3] for p in parts], [u.after[1] for u in before]))
    for name in shapes:
        bound = 1e-10 * wanted[name].abs().max() + (1e-10 * 1e-2 if name.startswith("model.") else 1e-14)
        assert (found_[name] - wanted[name]).abs().max() <= bound, name
    for _, values, have, _ in parts:
        assert values == {"optimizer": {"step": 2.0}}
        for mine, theirs in zip(have, before[0].numbers[2:], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-10, abs=0)
    if case["old"] == case["new"]:
        for part, uninterrupted in zip(parts, before, strict=True):
            assert part[2] == uninterrupted.numbers[2:]
            assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(part[3], uninterrupted.after[1], strict=True))
    return bool(source.gathered)


def test_survivors_go_on_under_another_plan(record_count):
    gathered = [recovered(case) for case in COVER]
    assert 0 < sum(gathered) < len(gathered) / 2
    record_count("training continued out of memory", len(COVER), len(CASES))


@pytest.mark.parametrize("nodes", ["two nodes", pytest.param("one node", marks=pytest.mark.full)])
def test_statistics_of_rows_and_columns_survive(nodes):
    old, new = FACTORED[1], FACTORED[2]
    recovered({"old": old, "new": new, "nodes": nodes, "memory": "apart", "lost": "first"})


@pytest.mark.parametrize(("old", "new"), ROUTES, ids=map(" -> ".join, ROUTES))
def test_lost_experts_come_back(old, new):
    recovered({"old": old, "new": new, "nodes": "two nodes", "memory": "apart", "lost": "first"})


@pytest.mark.parametrize("case", SAME[::18], ids=lambda case: " ".join(case.values()))
def test_a_fresh_worker_takes_the_place_of_a_lost_one_bit_by_bit(case):
    assert not recovered(case)


@pytest.mark.parametrize("forget", ["model", "exp_avg", "exp_avg_sq"])
def test_negative_control_what_is_forgotten_shows(forget):
    with pytest.raises(AssertionError):
        recovered({"old": "dsp", "new": "serial", "nodes": "one node", "memory": "apart", "lost": "first"}, forget)


@pytest.mark.full
@pytest.mark.parametrize("old", NAMES)
def test_every_loss_of_every_plan_to_every_other(old):
    for case in CASES:
        if case["old"] == old:
            recovered(case)

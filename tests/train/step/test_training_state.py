"""A rank's state as blocks: found once, and again when the optimizer keeps another tensor."""

from __future__ import annotations

import pytest
import torch

from platform.checkpoint.blocks import join_chains
from platform.checkpoint.buffer import HostBuffer
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from platform.train.training_state import RankTrainingState
from tests.harness.memories import opened, take
from tests.harness.oracle import MODELS, configure, trainer_of
from tests.harness.threads import run_threads


def test_snapshots_follow_what_an_optimizer_puts_in_a_moment_s_place():
    plan = make_plan(c := configure(layers=1))
    trainer = trainer_of(c, plan, SingleRank(plan.mesh))
    state = RankTrainingState(trainer)
    memory = opened(state.held, [""], trainer.communicator)
    trainer.step(1)
    first = state.live_blocks()
    for step in (2, 3, 4):  # both buffers, and one of them again
        trainer.step(step)
        if step == 4:
            for kept in trainer.optimizer.state.values():
                kept["exp_avg"] = kept["exp_avg"] * 2
        assert (state.live_blocks() is first) == (step < 4)
        take(memory, step, state.live_blocks(), state.read_values(), trainer.communicator.transfer)
    for name, w in trainer.weights.own_masters.items():
        moments = trainer.optimizer.state[trainer.weights.updated[name][0]].items()
        parts = {k: trainer.weights.part_of_parameter(name, x) for k, x in moments if x.dim()}
        wanted = {"model": w.detach(), **parts}
        for kind in ("model", "exp_avg", "exp_avg_sq"):
            [(part, at, end)] = [
                place for place in memory.find_snapshot(4).own_buffer.places if place[0].tensor.name == f"{kind}.{name}"
            ]
            held = memory.find_snapshot(4).own_buffer.data[at:end].view(torch.float64).view(part.box.extent)
            assert torch.equal(held, wanted[kind][tuple(map(slice, part.box.extent))]), (kind, name)


@pytest.mark.parametrize("plan", [{}, {"data": 2, "zero": 1}, {"data": 2, "zero": 3, "tensor": "1d", "axes": {"t": 2}}])
def test_neighbours_in_memory_are_copied_together(plan):
    """Tens of copies for hundreds of parts, into the same places as each by itself."""
    c = configure(**{**MODELS["gpt"], **plan, "layers": 6})
    planned = make_plan(c)

    def work(communicator):
        trainer = trainer_of(c, planned, communicator)
        state = RankTrainingState(trainer)
        trainer.step(1)
        parts = [part for chain in join_chains(state.held, communicator.rank) for part in chain.blocks]
        together, apart = (HostBuffer.build_aligned(parts) for _ in range(2))
        together.fill_parts(state.live_blocks())
        for part, at, end in apart.places:  # none has a neighbour
            alone = HostBuffer([part])
            alone.fill_parts(state.live_blocks())
            apart.data[at:end] = alone.data
        assert torch.equal(together.data, apart.data)
        return len(parts), len(state.live_blocks().view_stretches(together.places)), len(trainer.weights.buckets)

    for parts, stretches, buckets in run_threads(planned.mesh, work):
        assert 2 * stretches < parts, f"{buckets} buckets"

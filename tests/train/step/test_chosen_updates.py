"""Frozen parameters and averaged weights: which updates change what, under several plans."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from platform.optimizer.optimizers import count_states_per_element
from platform.predict.footprint import weight_bytes
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from platform.train.training_state import RankTrainingState
from tests.harness.oracle import assemble, configure, trainer_of, validation_loss
from tests.harness.threads import run_threads

STEPS, DECAY = 3, 0.75
FROZEN = ["embedding", "layers.0.*"]
PLANS = {
    "1d, data 2, zero 1": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "zero": 1},
    "3d, zero 3": {"tensor": "3d", "axes": {"x": 2, "z": 2}, "data": 2, "zero": 3},
    "1d_sp, stages": {"tensor": "1d_sp", "axes": {"t": 2}, "pipeline": "1f1b", "stages": 2, "data": 2},
}


@dataclass
class Taken:
    """What a rank has: master copies before the first step and after each, averages, gradients of the first step."""

    rank: int
    masters: list[dict[str, Tensor]]
    averages: dict[str, Tensor]
    gradients: dict[str, Tensor]
    norm: float
    kept: int  # bytes of optimizer state and averages
    planned: int


def steps(c, freeze=(), ema=0.0):
    """Take the steps on all ranks; return the plan and what each has."""
    c.train.freeze, c.train.ema, c.optimizer.clip = list(freeze), ema, 0.0
    plan = make_plan(c)

    def on_rank(communicator):
        torch.set_num_threads(1)
        trainer = trainer_of(c, plan, communicator)
        own = [{n: w.detach().clone() for n, w in trainer.weights.master.items()}]
        gradients: dict[str, Tensor] = {}

        def keep():
            gradients.update((n, g.clone()) for n, g in trainer.weights.gradients.items())
            return {}

        norm = trainer.step(1, verify=keep).grad_norm
        for step in range(1, STEPS + 1):
            if step > 1:
                trainer.step(step)
            own.append({n: w.detach().clone() for n, w in trainer.weights.master.items()})
        state = RankTrainingState(trainer)
        kept = sum(b.tensor.nbytes for b in state.live_blocks() if not b.name.startswith("model."))
        planned = weight_bytes(trainer.stage, count_states_per_element(c), communicator.coordinates)["optimizer"]
        averages = own[-1] | trainer.weights.averages
        return Taken(communicator.rank, own, averages, gradients, norm, kept, planned)

    ranks = [on_rank(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else run_threads(plan.mesh, on_rank)
    return plan, ranks


def after(plan, ranks, step: int) -> dict[str, Tensor]:
    return assemble(plan, ranks, lambda rank: rank.masters[step])


@pytest.fixture(scope="module")
def alone():
    """One process that trains everything, and keeps no averages."""
    return steps(configure(tied=False))


@pytest.mark.parametrize("name", ["serial", *PLANS])
def test_frozen_parameters_stay_and_do_not_count(alone, name):
    how = PLANS.get(name, {})
    plan, ranks = steps(configure(tied=False, **how), freeze=FROZEN)
    frozen = set(plan.frozen)
    assert {"embedding"} < frozen < {p.name for p in plan.parameters}
    before, last, first = after(plan, ranks, 0), after(plan, ranks, STEPS), after(plan, ranks, 1)
    assert {n for n in before if torch.equal(before[n], last[n])} == frozen
    trained = after(*alone, 1)
    for name in before.keys() - frozen:
        torch.testing.assert_close(first[name], trained[name], rtol=1e-9, atol=1e-11)
    gradients = assemble(*alone, lambda rank: rank.gradients)
    norm = sum(float(g.square().sum()) for n, g in gradients.items() if n not in frozen) ** 0.5
    assert [rank.norm for rank in ranks] == pytest.approx([norm] * len(ranks), rel=1e-9)
    assert alone[1][0].norm > 1.1 * norm, "what is frozen has a gradient that would count"
    assert all(rank.kept <= rank.planned for rank in ranks), "no moments of what is frozen"


@pytest.mark.parametrize("name", ["serial", *PLANS])
def test_averages_follow_the_updates(alone, name):
    plan, ranks = steps(configure(tied=False, **PLANS.get(name, {})), ema=DECAY)
    averages = assemble(plan, ranks, lambda rank: rank.averages)
    history = [after(*alone, step) for step in range(STEPS + 1)]
    for name, average in history[0].items():
        wanted = average
        for step in range(1, STEPS + 1):
            wanted = DECAY * wanted + (1 - DECAY) * history[step][name]
        torch.testing.assert_close(averages[name], wanted, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(averages["embedding"], history[STEPS]["embedding"], rtol=1e-3, atol=1e-6)
    assert all(rank.kept <= rank.planned for rank in ranks)
    if not plan.sharded:  # else a shard ends with padding
        assert all(rank.kept == rank.planned for rank in ranks)


def test_averages_take_the_weights_place_and_leave_it_as_it_was():
    c = configure(tensor="1d", axes={"t": 2}, data=2, zero=1)
    c.train.ema = DECAY
    plan = make_plan(c)

    def on_rank(communicator):
        trainer = trainer_of(c, plan, communicator)
        trainer.step(1)
        weights = trainer.weights
        weights.wait_for_gathers()  # the step's gathers of updated shards run under the next pass
        master, compute = ({n: w.detach().clone() for n, w in v.items()} for v in (weights.master, weights.compute))
        c.eval.batches = 1
        usual = validation_loss(trainer)
        with weights.use_averages():
            assert any(not torch.equal(w, weights.master[n]) for n, w in master.items() if w.numel())
            other = validation_loss(trainer)
        assert all(torch.equal(w, weights.master[n]) for n, w in master.items())
        assert all(torch.equal(w, weights.compute[n]) for n, w in compute.items())
        return usual, other, validation_loss(trainer)

    for usual, other, again in run_threads(plan.mesh, on_rank):
        assert usual == again != other

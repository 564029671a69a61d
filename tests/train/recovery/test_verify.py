"""Replicas are compared before an update: who disagrees is named, from the others or from what it wrote down itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from platform.config.fields import Config
from platform.predict.make_plan import make_plan
from platform.train.faults import Fault
from platform.train.replies import Damage, Differences, Dispute
from platform.train.state_recovery import compare_replicas, compute_checksum
from platform.train.training_state import RankTrainingState
from tests.harness.memories import opened, take
from tests.harness.oracle import MODELS, configure, trainer_of
from tests.harness.threads import run_threads

FLIPPED = 3  # the step at whose beginning the bit flips


def steps(c: Config, flipped: int | None = None, hold: bool = True, spoil=None) -> list[dict]:
    """Every rank's report of step 3, whose replicas are compared in every step; up to then they agree."""
    plan = make_plan(c)

    def work(communicator):
        torch.set_num_threads(1)
        trainer = trainer_of(c, plan, communicator)
        state = RankTrainingState(trainer)
        memory = opened(state.held, [""] * plan.mesh.world_size, communicator, divided=False)
        for step in range(1, FLIPPED + 1):
            before = memory.find_snapshot(step - 1) if step - 1 in memory.complete_steps else None
            fault = Fault(step, "flip", flipped) if step == FLIPPED and flipped == communicator.rank else None
            if step == FLIPPED and spoil:
                spoil(trainer)
            old = {n: w.detach().clone() for n, w in trainer.weights.master.items()}
            report = trainer.step(step, fault=fault, verify=lambda b=before: compare_replicas(trainer, state, b))
            if step < FLIPPED:
                assert not report.skipped, report
            if hold:
                take(memory, step, state.live_blocks(), state.read_values(), communicator.transfer)
        changed = {n for n, w in trainer.weights.master.items() if not torch.equal(w, old[n])}
        return report, changed

    return run_threads(plan.mesh, work)


MORE = {
    "1d": configure("1d", {"t": 2}, data=2, **MODELS["llama"]),
    "2d": configure("2d", {"r": 2, "c": 2}),
    "2p5d": configure("2p5d", {"d": 2, "r": 1, "c": 2}),
    "csub": configure("1d", {"t": 2}, branch="dsp_csub", branch_axes={"g": 2}, data=2),
    "3d": configure("3d", {"x": 2, "y": 2, "z": 2}),
}
PLANS = {
    "data 3": configure(data=3, microbatch=2),
    "1d_sp": configure("1d_sp", {"t": 2}, data=2, dropout=0.1),
    "tied stages": configure(data=2, pipeline="zb_h1", stages=2, microbatch=2),
    "zero 1": configure(data=3, zero=1, microbatch=2),
    "experts": configure(data=3, microbatch=2, zero=1, **MODELS["experts"], router_bias=True, balance_rate=0.3),
    "bf16": configure("1d", {"t": 2}, data=2, precision="bf16"),
}


@pytest.mark.parametrize("name", [*PLANS, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_replicas_agree(name):
    reports = steps((PLANS | MORE)[name])
    assert not any(r.differences or r.skipped for r, _ in reports)


@pytest.mark.parametrize(("name", "tensor"), [("data 3", "model"), ("zero 1", "compute")])
def test_the_majority_names_the_rank(name, tensor):
    for report, changed in steps(PLANS[name], flipped=1, hold=False):
        assert report.differences == Differences([Damage(1, f"{tensor}.embedding")])
        assert report.skipped and changed <= {"embedding"}  # by the flip alone


def test_a_state_that_differs_is_named():
    """No gradient corrects the bias of a router, so that a rank would choose other experts ever after."""

    def spoil(trainer):
        if trainer.communicator.rank == 1:
            trainer.weights.states["layers.0.mlp.choice_bias"].add_(1)

    for report, _ in steps(PLANS["experts"], hold=False, spoil=spoil):
        assert report.differences == Differences([Damage(1, "model.layers.0.mlp.choice_bias")])


@pytest.mark.parametrize(
    ("c", "kind"),
    [
        (configure(data=2), "model"),
        (configure("1d", {"t": 2}, data=2, precision="fp32"), "model"),
        (configure(data=2, precision="bf16"), "compute"),
        (configure(data=2, zero=1), "compute"),
        (configure(data=2, zero=1, precision="bf16"), "compute"),
    ],
    ids=["fp64", "fp32", "bf16", "zero 1", "zero 1 bf16"],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_the_one_that_contradicts_its_own_record(c, kind, rank):
    for report, _ in steps(c, flipped=rank):
        assert report.differences == Differences([Damage(rank, f"{kind}.embedding")])


def test_of_two_without_a_record_nobody_is_named():
    for report, _ in steps(configure(data=2), flipped=1, hold=False):
        assert report.differences == Differences(undecided=[Dispute([0, 1], "model.embedding")])
        assert report.skipped


def test_moments_count():
    def spoil(trainer):
        if trainer.communicator.rank == 2:
            state = trainer.optimizer.state[trainer.weights.updated["norm.gain"][0]]
            trainer.weights.part_of_parameter("norm.gain", state["exp_avg_sq"]).view(-1)[3] += 1e-9

    for report, _ in steps(PLANS["data 3"], spoil=spoil):
        assert report.differences.damaged == [Damage(2, "exp_avg_sq.norm.gain")]


@given(st.integers(1, 200_000), st.data())
def test_every_flipped_bit_changes_the_checksum(elements, data):
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    x = torch.arange(elements).to(dtype)
    before = compute_checksum(x).item()
    raw = x.view(torch.uint8)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert compute_checksum(x).item() != before

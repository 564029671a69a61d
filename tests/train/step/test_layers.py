"""Gradient norms and activations by layer: those of one process under every plan, padding left out."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from platform.plan.chunks import layer_of_parameter
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from platform.runtime.parallel_ops import ActivationWatch
from platform.train.step_report import ReportCombiner
from tests.harness.oracle import configure, trainer_of
from tests.harness.threads import run_threads

ODD = {"global_batch": 7, "microbatch": 2}  # the last microbatches are partly padding
PLANS = {
    "1d, zero 1": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "zero": 1},
    "1d_sp, stages, recomputed": {"tensor": "1d_sp", "axes": {"t": 2}, "pipeline": "1f1b", "stages": 2},
    "3d, zero 3": {"tensor": "3d", "axes": {"x": 2, "y": 2}, "data": 2, "zero": 3},
    "interleaved": {"pipeline": "interleaved", "stages": 2, "chunks": 2, "layers": 4, "data": 2},
}


def report(recompute: str = "none", **how):
    """The combined report of a step with layers, and rank 0's gradients if it is alone."""
    c = configure(recompute=recompute, **{"layers": 4, **how}, **ODD)
    c.monitor.layers = 1
    plan = make_plan(c)

    def on_rank(communicator):
        trainer = trainer_of(c, plan, communicator)
        gradients: dict[str, torch.Tensor] = {}

        def keep():
            gradients.update((n, g.clone()) for n, g in trainer.weights.gradients.items())
            return {}

        mine = trainer.step(1, verify=keep)
        return ReportCombiner(plan, communicator, 0.0, layers=1).combine_reports(mine), gradients

    ranks = [on_rank(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else run_threads(plan.mesh, on_rank)
    return ranks[0]


@pytest.fixture(scope="module")
def alone():
    return report()


def test_gradients_make_up_the_whole_norm(alone):
    statistics, gradients = alone
    assert set(statistics.layer_gradients) == {"embedding", "position", *(f"layers.{i}" for i in range(4)), "norm"}
    for layer, norm in statistics.layer_gradients.items():
        squares = sum(float(g.square().sum()) for n, g in gradients.items() if layer_of_parameter(n) == layer)
        assert norm == pytest.approx(squares**0.5, rel=1e-9)
    assert sum(n * n for n in statistics.layer_gradients.values()) == pytest.approx(statistics.grad_norm**2, rel=1e-9)


def test_activations_are_root_mean_squares_of_the_sequences_alone(alone, monkeypatch):
    seen = defaultdict(list)

    def see(self, name, x, spec):
        assert spec.dims[1] == "batch"
        seen[name].append(x[:, : self.sequences].detach())

    monkeypatch.setattr(ActivationWatch, "add_squares", see)
    report()
    rms = {name: torch.cat(blocks, 1).square().mean().sqrt().item() for name, blocks in seen.items()}
    assert torch.cat(seen["layers.3"], 1).shape == (16, 7, 32)
    assert alone[0].layer_activations == {f"layers.{i}": pytest.approx(rms[f"layers.{i}"]) for i in range(4)}


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_gives_the_same(alone, name):
    statistics, _ = report(recompute="full" if "recomputed" in name else "none", **PLANS[name])
    for ours, theirs in (
        (statistics.layer_gradients, alone[0].layer_gradients),
        (statistics.layer_activations, alone[0].layer_activations),
    ):
        assert ours == {layer: pytest.approx(size, rel=1e-9) for layer, size in theirs.items()}


@pytest.mark.parametrize("kind", ["encoder", "encoder_decoder"])
def test_a_padded_token_counts_alike_whether_the_table_is_split_or_whole(kind):
    alone, split = (report(kind=kind, layers=2, **how)[0] for how in ({}, {"tensor": "1d", "axes": {"t": 2}}))
    assert alone.layer_activations
    for layer, size in alone.layer_activations.items():
        assert split.layer_activations[layer] == pytest.approx(size, rel=1e-9)


def test_nothing_is_recorded_unless_it_is_asked_for():
    c = configure()
    c.monitor.layers = 2
    plan = make_plan(c)
    trainer = trainer_of(c, plan, SingleRank(plan.mesh))
    combiner = ReportCombiner(plan, trainer.communicator, 0.0, layers=2)
    kept = [bool(combiner.combine_reports(trainer.step(step)).layer_gradients) for step in (1, 2, 3)]
    assert kept == [False, True, False]

"""The weights of a run: the same in every layout, and what each precision keeps of the numbers."""

from __future__ import annotations

import pytest
import torch

from platform.predict.make_plan import make_plan
from tests.harness.oracle import MODELS, Result, assemble, configure, run, serial

LAYOUTS = {
    "1d": ("1d", {"t": 4}),
    "3d": ("3d", {"x": 2, "y": 2, "z": 2}),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_initial_weights_are_those_of_one_process(layout, precision):
    """Bit for bit, in the precision of the master copies; tests/harness/oracle.py compares those of fp64 everywhere."""
    from platform.train.rank_parameters import DTYPES, RankWeights
    from tests.harness.threads import run_threads

    c = configure(*LAYOUTS[layout], precision=precision, **MODELS["llama"])
    plan = make_plan(c)
    low, high = DTYPES[precision]

    def blocks(communicator):
        weights = RankWeights(plan, communicator, c.seed)
        assert {w.dtype for w in weights.master.values()} == {high}
        assert {w.dtype for w in weights.compute.values()} == {low}
        assert all(torch.equal(weights.compute[n], w.to(low)) for n, w in weights.master.items())
        values = {n: w.detach() for n, w in weights.master.items()}
        return Result(communicator.rank, 0, 0, {}, values, {}, [], {}, [])

    initial = assemble(plan, run_threads(plan.mesh, blocks), lambda r: r.initial)
    for name, value in serial(c).initial.items():
        assert torch.equal(initial[name], value.to(high).double()), name


def test_initial_weights_are_those_that_the_model_declares():
    c = configure(layers=2, d_model=64, vocab=500, length=64, tied=False)
    initial = run(c)[1][0].initial
    assert initial["layers.0.mlp.up"].std() == pytest.approx(0.02, rel=0.05)
    assert initial["layers.0.mlp.down"].std() == pytest.approx(0.02 / 2, rel=0.05)  # sqrt(2 x 2 layers)
    assert (initial["norm.gain"] == 1).all() and not initial["layers.1.attention.output_bias"].any()
    assert not torch.equal(initial["embedding"], initial["head"])
    assert not torch.equal(initial["layers.0.mlp.up"], initial["layers.1.mlp.up"])
    c.seed = 1
    assert not torch.equal(run(c)[1][0].initial["embedding"], initial["embedding"])


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_a_lower_precision_trains_alike(precision, tolerance):
    exact = serial(configure())
    _, (lower,) = run(configure(precision=precision))
    assert lower.losses == pytest.approx(exact.losses, rel=tolerance)
    assert lower.losses[0] != exact.losses[0]
    assert lower.grad_norm == pytest.approx(exact.grad_norm, rel=tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_gradients_agree_between_layouts(layout):
    """Within what rounding to 8 bits leaves; summed in the master's precision over microbatches, which differ here."""
    _, (one,) = run(configure(precision="bf16", microbatch=8))
    c = configure(*LAYOUTS[layout], precision="bf16")
    plan, results = run(c)
    gradients = assemble_alike(plan, results)
    largest = max(g.abs().max().item() for g in one.gradients.values())
    for name, value in gradients.items():
        expected = one.gradients[name].double()
        error = (value - expected).norm().item()
        assert error <= 3e-2 * expected.norm().item() + 1e-3 * largest, (name, error, expected.norm().item())
    assert results[0].losses == pytest.approx(one.losses, rel=1e-2)


def assemble_alike(plan, results):
    """Whole gradients; replicas are equal as far as bf16 goes, so that the first one stands for all."""
    first = {}
    for r in results:
        for p in plan.parameters:
            where = tuple(plan.locate_block(p, plan.mesh.rank_coordinates(r.rank)))
            r.gradients[p.name] = first.setdefault((p.name, where), r.gradients[p.name])
    return assemble(plan, results, lambda r: r.gradients)

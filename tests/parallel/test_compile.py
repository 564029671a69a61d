"""A model traces through torch.compile without a graph break, collectives included, and computes the same."""

from __future__ import annotations

import pytest
import torch

from platform.planning.make_plan import make_plan
from tests.harness.oracle import MODELS, configure, trainer_of


def eager_and_compiled(c, plan, communicator):
    """Difference of the loss, whether gradients agree (those of a parameter with several uses are summed in another
    order), and whether the compiled pass counted the same bytes."""
    trainer = trainer_of(c, plan, communicator)
    inputs = trainer.load("train", 0)

    def loss_and_gradients(forward):
        communicator.moved.clear()
        loss = forward(trainer.ops, inputs)
        loss.backward()
        trainer.weights.receive(trainer.weights.finish())
        out = trainer.weights.gradients
        trainer.weights.refresh()
        return loss.detach(), out, dict(communicator.moved)

    compiled = torch.compile(trainer.model.forward, fullgraph=True, backend="eager")
    loss, gradients, moved = loss_and_gradients(trainer.model.forward)
    loss_and_gradients(compiled)  # traces
    loss2, gradients2, moved2 = loss_and_gradients(compiled)
    worst = max((gradients[n] - gradients2[n]).abs().max().item() for n in gradients)
    largest = max(g.abs().max().item() for g in gradients.values())
    return abs(loss - loss2).item(), worst <= 1e-14 * largest, moved == moved2


@pytest.mark.parametrize(
    "model", ["gpt", "t5", *(pytest.param(m, marks=pytest.mark.full) for m in ("llama", "bert", "original"))]
)
def test_one_process(model):
    from platform.parallel.communicator.base import SingleRank

    c = configure(**MODELS[model])
    plan = make_plan(c)
    assert eager_and_compiled(c, plan, SingleRank(plan.mesh)) == (0.0, True, True)


SCHEMES = [
    ("1d_sp", {"t": 2}, "none", 0),
    pytest.param("3d", {"x": 1, "y": 2, "z": 2}, "none", 0, marks=pytest.mark.full),
    pytest.param("serial", {}, "none", 1, marks=pytest.mark.full),
    pytest.param("serial", {}, "dsp_csub", 0, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("scheme", "axes", "branch", "zero"), SCHEMES, ids=str)
def test_with_collectives(scheme, axes, branch, zero, pool):
    branch_axes = {} if branch == "none" else {"g": 2}
    c = configure(scheme, axes, branch=branch, branch_axes=branch_axes, data=2 if zero else 1, zero=zero, layers=1)
    plan = make_plan(c)
    assert set(pool.run(eager_and_compiled, c, plan)) == {(0.0, True, True)}

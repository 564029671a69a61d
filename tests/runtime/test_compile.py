"""A model traces through torch.compile without a graph break, collectives included, and computes the same."""

from __future__ import annotations

import pytest
import torch

from platform.predict.make_plan import make_plan
from tests.harness.oracle import MODELS, configure, trainer_of


def eager_and_compiled(c, plan, communicator):
    """The loss and the gradients that differ, by name, and whether the compiled pass counted the same bytes."""
    trainer = trainer_of(c, plan, communicator)
    inputs = trainer.passes.load_input_blocks("train", 0)
    trainer.ops.residency = None  # a pass begins and ends it outside of the model that is traced

    def loss_and_gradients(forward):
        communicator.moved.clear()
        loss = forward(trainer.ops, inputs)
        loss.backward()
        trainer.weights.set_gradients(trainer.weights.finish_reductions())
        out = trainer.weights.gradients
        trainer.weights.refresh_copies()
        return loss.detach(), out, dict(communicator.moved)

    compiled = torch.compile(trainer.passes.model.forward, fullgraph=True, backend="eager", dynamic=False)
    loss, gradients, moved = loss_and_gradients(trainer.passes.model.forward)
    loss_and_gradients(compiled)  # traces
    loss2, gradients2, moved2 = loss_and_gradients(compiled)
    return differing({"loss": loss}, {"loss": loss2}) + differing(gradients, gradients2), moved == moved2


def differing(gradients, others):
    """Names of the tensors, gradients or the loss, that are not, to rounding, those of the same name among `others`:
    each is measured by its own largest element, as that of another layer may be 1e5 times as large. The true gradient
    of a key bias is zero: what is computed is rounding of what the query bias sums, and is measured by that."""
    assert gradients.keys() == others.keys()
    largest = {n: g.abs().max() for n, g in gradients.items()}
    bounds = {n: 1e-14 * max(g, largest.get(n.replace("key_bias", "query_bias"), g)) for n, g in largest.items()}
    return [n for n, g in gradients.items() if not (g - others[n]).abs().max() <= bounds[n]]


@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_negative_control_a_small_gradient_is_wrong(wrong):
    """By the largest gradient of the model it would be right."""
    gradients = {"large": torch.ones(3), "small": torch.full((3,), 1e-12)}
    assert differing(gradients, {n: g.clone() for n, g in gradients.items()}) == []
    assert differing(gradients, gradients | {"small": wrong * gradients["small"]}) == ["small"]


@pytest.mark.parametrize(
    "model", ["gpt", *(pytest.param(m, marks=pytest.mark.full) for m in ("t5", "llama", "bert", "original"))]
)
def test_one_process(model):
    from platform.runtime.communicator import SingleRank

    c = configure(**MODELS[model])
    plan = make_plan(c)
    assert eager_and_compiled(c, plan, SingleRank(plan.mesh)) == ([], True)


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
    assert pool.run(eager_and_compiled, c, plan) == [([], True)] * plan.mesh.world_size

"""The gradient's norm is a sum in fp64 of whatever the gradients are: large, tiny, many, whole or in parts."""

from __future__ import annotations

from math import sqrt

import pytest
import torch

from platform.parallel.communicator.base import SingleRank
from platform.parallel.sharding import gradients
from platform.planning.make_plan import make_plan
from tests.harness.oracle import configure, trainer_of
from tests.harness.threads import run_threads

LAYOUTS = {
    "serial": ("serial", {}, {}),
    "1d": ("1d", {"t": 4}, {}),
    "3d": ("3d", {"x": 1, "y": 2, "z": 2}, {}),
    "zero 1": ("serial", {}, {"data": 3, "zero": 1}),
    "zero 3": ("1d", {"t": 2}, {"data": 2, "zero": 3}),
}


def norm_of(layout: str, scale: float, vocab: int, precision: str) -> tuple[float, float]:
    """The norm of gradients that are drawn for whole tensors, in a layout and in fp64 without one."""
    scheme, axes, more = LAYOUTS[layout]
    c = configure(scheme, axes, layers=1, vocab=vocab, precision=precision, **more)
    plan = make_plan(c)
    whole = {}
    for i, p in enumerate(plan.parameters):
        draw = torch.Generator().manual_seed(i)
        whole[p.name] = torch.randn(plan.global_shape(p), generator=draw).mul_(scale)

    def squares(communicator):
        mine = {}
        for p in plan.parameters:
            padding = [n for d, k in zip(p.dims, plan.global_shape(p), strict=True)
                       for n in (plan.planner.sizes_of(p)[d] - k, 0)][::-1]  # fmt: skip
            where = tuple(slice(o, o + n) for o, n in plan.block(p, communicator.coordinates))
            block = torch.nn.functional.pad(whole[p.name], padding)[where].flatten()
            start, stop = plan.shard_range(p, communicator.coordinates)
            mine[p.name] = block[start:stop].clone()
        return gradients.squared_norm(plan, communicator, mine).item()

    found = [squares(SingleRank(plan.mesh))] if plan.mesh.size == 1 else run_threads(plan.mesh, squares)
    return sqrt(sum(found)), sqrt(sum(g.double().square().sum().item() for g in whole.values()))


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_norm_is_exact_in_every_layout(layout, scale):
    found, exact = norm_of(layout, scale, 9_001, "fp32")
    assert found == pytest.approx(exact, rel=1e-12, abs=0)


def test_clipping_follows():
    """Gradients whose squares fp32 cannot hold are clipped to the norm that was asked for."""
    c = configure(precision="fp32", layers=1)
    plan = make_plan(c)
    trainer = trainer_of(c, plan, SingleRank(plan.mesh))
    gradient = {n: torch.full_like(w, 1e25, requires_grad=False) for n, w in trainer.weights.master.items()}
    for n, w in trainer.weights.master.items():
        w.grad = gradient[n].clone()
    norm = sqrt(gradients.squared_norm(plan, trainer.communicator, trainer.weights.gradients).item())
    after = {}
    trainer.optimizer.register_step_pre_hook(
        lambda *_: after.update({n: g.double() for n, g in trainer.weights.gradients.items()})
    )
    trainer._update(norm, 1e-3)
    assert sqrt(sum(g.square().sum().item() for g in after.values())) == pytest.approx(c.optimizer.clip, rel=1e-5)

"""The gradient's norm is right whatever the gradients are: large, tiny, many, whole or in parts."""

from __future__ import annotations

from math import inf, nan, sqrt

import pytest
import torch

from platform.plan.chunks import SQUARED_AT_ONCE
from platform.plan.step_collectives import grad_norm_slices
from platform.predict.make_plan import make_plan
from platform.runtime import flat_buffers
from platform.runtime.communicator import SingleRank
from platform.train.rank_parameters import DTYPES
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
    """The norm of gradients that are drawn for whole tensors, in a layout and in fp64 without one. What lies beyond the
    parameters in a shard is NaN."""
    scheme, axes, more = LAYOUTS[layout]
    c = configure(scheme, axes, layers=1, vocab=vocab, precision=precision, **more)
    plan = make_plan(c)
    whole, dtype = {}, DTYPES[precision][1]
    for i, p in enumerate(plan.parameters):
        draw = torch.Generator().manual_seed(i)
        whole[p.name] = torch.randn(plan.global_shape(p), generator=draw, dtype=dtype).mul_(scale)

    def flat(bucket, communicator):
        out = torch.full((bucket.elements,), torch.nan, dtype=dtype)
        for p in bucket.parameters:
            padding = [n for d, k in zip(p.dims, plan.global_shape(p), strict=True)
                       for n in (plan.planner.tensor_sizes(p)[d] - k, 0)][::-1]  # fmt: skip
            where = tuple(slice(o, o + n) for o, n in plan.locate_block(p, communicator.coordinates))
            block = torch.nn.functional.pad(whole[p.name], padding)[where].flatten()
            out[slice(*bucket.parameter_ranges[p.name])] = block
        return out.view(bucket.shards, -1)[communicator.group_index(bucket.sharded)].clone()

    def squares(communicator):
        mine = {bucket.parameters[0].name: flat(bucket, communicator) for bucket in plan.buckets}
        return flat_buffers.local_squared_norm(
            communicator, grad_norm_slices(plan, communicator.coordinates), mine
        ).item()

    sums = [squares(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else run_threads(plan.mesh, squares)
    return sqrt(sum(sums)), sqrt(sum(g.double().square().sum().item() for g in whole.values()))


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_the_norm_is_exact_in_every_layout(precision, layout, scale):
    """Of short stretches in fp32 too, and of long ones whose squares fp32 cannot hold."""
    vocab = 9_001 if precision == "fp64" or scale != 1.0 else 61
    norm, exact = norm_of(layout, scale, vocab, precision)
    assert norm == pytest.approx(exact, rel=1e-12, abs=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_stretches_are_summed_in_rows(layout, monkeypatch):
    """To far more digits than fp32 has in one sum: a row that holds a whole stretch is the control."""
    norm, exact = norm_of(layout, 1.0, 9_001, "fp32")
    assert norm == pytest.approx(exact, rel=2e-8, abs=0)
    assert norm != pytest.approx(exact, rel=1e-12, abs=0)
    monkeypatch.setattr(flat_buffers, "ROW", 1 << 16)
    assert norm_of(layout, 1.0, 9_001, "fp32")[0] != pytest.approx(exact, rel=2e-8, abs=0)


@pytest.mark.parametrize("few", [1e25, 1e-25, inf, nan, 0.0])
def test_a_stretch_may_mix_all_sizes(few):
    """Few numbers among many whose squares fp32 can hold, among zeros, and at the end of a stretch."""
    for rest in (1.0, 0.0):
        x = torch.full((2 * SQUARED_AT_ONCE + 7,), rest)
        x[[3, 1000, -1]] = few
        squared = flat_buffers.local_squared_norm(
            SingleRank(make_plan(configure()).mesh), {"x": [slice(0, len(x))]}, {"x": x}
        )
        assert squared.dtype == torch.float64
        assert squared.item() == pytest.approx(x.double().square().sum().item(), rel=1e-7, abs=0, nan_ok=True)


def test_clipping_follows():
    """Gradients whose squares fp32 cannot hold are clipped to the norm that was asked for."""
    c = configure(precision="fp32", layers=1)
    plan = make_plan(c)
    trainer = trainer_of(c, plan, SingleRank(plan.mesh))
    gradient = {n: torch.full_like(w, 1e25, requires_grad=False) for n, w in trainer.weights.master.items()}
    for updated in trainer.weights.updated_tensors.values():
        updated.grad = torch.full_like(updated, 1e25, requires_grad=False)
    norm = 1e25 * sqrt(sum(g.numel() for g in gradient.values()))
    after = {}
    trainer.optimizer.register_step_post_hook(
        lambda *_: after.update({n: g.double() for n, g in trainer.weights.gradients.items()})
    )
    trainer._update_weights(norm, 1e-3)
    assert sqrt(sum(g.square().sum().item() for g in after.values())) == pytest.approx(c.optimizer.clip, rel=1e-5)


@pytest.mark.parametrize("known_late", [False, True])
def test_a_norm_that_fp32_does_not_hold_leaves_no_gradient(known_late):
    """Whether the host knows the norm or the device alone does: the step is that of gradients of 0."""
    c = configure(precision="fp32", layers=1)
    plan, weights = make_plan(c), []
    for gradient, norm in ((1e38, 1e39), (0.0, 0.0)):
        trainer = trainer_of(c, plan, SingleRank(plan.mesh))
        for updated in trainer.weights.updated_tensors.values():
            updated.grad = torch.full_like(updated, gradient, requires_grad=False)
        trainer._update_weights(torch.tensor(norm, dtype=torch.float64) if known_late else norm, 1e-3)
        weights.append({n: w.detach().clone() for n, w in trainer.weights.master.items()})
    assert all(torch.equal(w, weights[1][n]) for n, w in weights[0].items())


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_a_gpu_squares_in_fp64(scale, monkeypatch):
    """By the calls that a GPU gets, on tensors of the CPU; a norm in fp32 is the control."""
    parts = [torch.randn(n) * scale for n in (70_001, 1, 300)]
    exact = sum(x.double().square().sum().item() for x in parts)
    assert flat_buffers._sum_squares_at_once(parts).item() == pytest.approx(exact, rel=1e-12, abs=0)
    norm = torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda x, order, dtype: [y.double() for y in norm(x, order)])
    assert flat_buffers._sum_squares_at_once(parts).item() != pytest.approx(exact, rel=1e-12, abs=0)

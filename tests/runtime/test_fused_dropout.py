"""Masks that attention's kernel draws itself: the same when a step is done again or recomputed, others elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from platform.plan.step_collectives import communication
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from platform.runtime.parallel_ops import PassPosition
from tests.harness.oracle import configure, counted, run, trainer_of


def configured(**more: Any):
    return configure(**{"dropout": 0.2, "fused_dropout": True, "layers": 1, **more})


def gradients(c) -> dict[str, torch.Tensor]:
    """Those of step 1, in one process."""
    return run(c)[1][0].gradients


def equal(a, b) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def close(a, b) -> bool:
    return all(torch.allclose(a[name], b[name], rtol=1e-9, atol=1e-12) for name in a)


def test_the_plan_keeps_the_fused_kernel():
    kinds = [{kind for kind, _ in make_plan(configured(fused_dropout=f)).operations} for f in (True, False)]
    assert "fused_attention" in kinds[0] and "softmax" not in kinds[0]
    assert "fused_attention" not in kinds[1] and "softmax" in kinds[1]


def test_a_step_done_again_and_recomputation_draw_the_same():
    first = gradients(configured())
    before = torch.random.get_rng_state()
    assert equal(first, gradients(configured()))
    assert torch.equal(torch.random.get_rng_state(), before)  # torch's own numbers are left as they were
    for recompute in ("selective", "full"):
        assert close(first, gradients(configured(recompute=recompute)))  # whose sums are taken in another order
    other = configured(dropout=0.21)
    assert not close(first, gradients(other))


def test_ranks_as_ever():
    """As many bytes as planned, and a step done again is equal, with heads and sequences split over ranks."""
    c = configured(tensor="1d", axes={"t": 2}, data=2, microbatch=2)
    (plan, first), (_, again) = run(c), run(c)
    assert counted(first) == communication(plan)
    assert all(equal(a.gradients, b.gradients) for a, b in zip(first, again, strict=True))


def test_masks_are_drawn_per_step_microbatch_and_block():
    """Of values that are all 1, attention gives the sum of its probabilities that are kept: 1 on the average."""
    c = configured(length=16, heads=8)
    plan = make_plan(c)
    ops = trainer_of(c, plan, SingleRank(plan.mesh)).ops
    (name,) = (name for kind, name in plan.operations if kind == "fused_attention")
    operation = plan.operations["fused_attention", name].operation
    types = *operation.inputs, *operation.outputs
    q, v = torch.zeros(16, 4, 8, 4, dtype=torch.float64), torch.ones(16, 4, 8, 4, dtype=torch.float64)

    def at(*position):
        ops.position = PassPosition(*position)
        return ops.fused_attention(name, q, q, v, *types, scale=1.0, causal=False)

    one = at(0, 1, 0)
    assert torch.equal(one, at(0, 1, 0)) and torch.equal(at(0, 1, 0, False), v)
    for other in ((1, 1, 0), (0, 2, 0), (0, 1, 4)):
        assert not torch.equal(one, at(*other))
    kept = torch.cat([at(0, step, 0)[..., 0] for step in range(20)])
    assert kept.mean().item() == pytest.approx(1, abs=6 * 0.5 / (kept.numel() * 16) ** 0.5)

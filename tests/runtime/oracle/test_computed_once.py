"""Recomputed blocks leave out their last product, whose value no gradient needs, and the collectives behind it."""

from __future__ import annotations

import pytest

from platform.plan.operations.pointwise import NormOp
from platform.plan.step_collectives import step_collectives
from platform.predict.make_plan import make_plan
from tests.harness.oracle import MODELS, configure, prove

SCHEMES = {
    "1d": ("1d", {"t": 2}), "1d_sp": ("1d_sp", {"t": 2}), "2d_gather": ("2d_gather", {"r": 2, "c": 2}),
    "3d": ("3d", {"x": 2, "y": 2, "z": 1}),
}  # fmt: skip


def launches(c, name: str) -> int:
    """Return how often a rank launches the collectives of a product's result in a microbatch's forward passes."""
    plan = make_plan(c)
    collectives = [
        (o, n) for place, o, n in step_collectives(plan) if place == f"project {name}" and o.phase == "forward"
    ]
    return sum(n for o, n in collectives if o.op in ("all_reduce", "reduce_scatter")) // plan.microbatches


@pytest.mark.parametrize("kind", ["llama", *(pytest.param(k, marks=pytest.mark.full) for k in ("t5", "experts"))])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_equals_one_process(kind, scheme):
    """Gradients and bytes; the result of attention, which the next norm reads, is completed twice, the block's once."""
    name, axes = SCHEMES[scheme]
    c = configure(name, axes, recompute="full", dropout=0.1 if kind == "llama" else 0.0, **MODELS[kind])
    plan, _ = prove(c)
    assert {o.operation.name.rpartition(".")[2] for o in plan.operations.values() if o.once} == {"down"}
    if kind == "llama" and scheme.startswith("1d"):
        assert launches(c, "layers.0.attention.output") == 2 and launches(c, "layers.0.mlp.down") == 1


@pytest.mark.parametrize(
    "more", [{"recompute": "none"}, {"recompute": "selective"}, {"mlp_chunks": 2}, {"tensor": "2d"}]
)
def test_nothing_is_left_out_elsewhere(more):
    """Nor of products in panels, and of layers in chunks, which are computed again wholly."""
    tensor = {"tensor": "1d", "axes": {"t": 2}} if "tensor" not in more else {"axes": {"r": 2, "c": 2}}
    plan = make_plan(configure(**{"recompute": "full", **MODELS["llama"], **tensor, **more}))
    assert not any(o.once for o in plan.operations.values())


def test_a_norm_needs_its_argument():
    """Blocks that end with a norm; and the negative control: a value that was left out is missed."""
    plan, _ = prove(configure("1d", {"t": 2}, recompute="full", **MODELS["bert"]))
    assert not any(o.once for o in plan.operations.values())


def test_negative_control_a_value_that_is_needed(monkeypatch):
    monkeypatch.setattr(NormOp, "needs_no_value", True)
    with pytest.raises(AssertionError):
        prove(configure("1d", {"t": 2}, recompute="full", **MODELS["bert"]))

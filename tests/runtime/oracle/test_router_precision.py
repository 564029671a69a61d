"""A router under 16-bit precisions: its scores are those of fp32, of the stream and of the weights in 16 bits."""

from __future__ import annotations

from collections import defaultdict
from threading import get_ident
from typing import Any

import pytest
import torch

from platform.plan.model_types import Parameter, Router, Spec
from platform.plan.operations.recorder import Recorder, Symbol
from platform.plan.scheme import ModelMistake, Scheme
from platform.plan.step_collectives import communication
from platform.predict.make_plan import make_plan
from platform.runtime import einsum, expert_rows
from platform.runtime.communicator import SingleRank
from platform.runtime.residency import Operands
from tests.harness.oracle import MODELS, configure, counted, run
from tests.harness.replay import replay

EXPERTS: dict[str, Any] = {**MODELS["experts"], "experts": 16, "layers": 1}
SCHEMES: dict[str, dict[str, Any]] = {
    "serial": {},
    "1d": {"tensor": "1d", "axes": {"t": 2}},
    "1d_sp": {"tensor": "1d_sp", "axes": {"t": 2}},
    "2d": {"tensor": "2d", "axes": {"r": 2, "c": 2}},
    "2d, again": {"tensor": "2d_gather", "axes": {"r": 2, "c": 2}, "gathered": "again"},
    "3d": {"tensor": "3d", "axes": {"x": 2, "y": 1, "z": 2}},
    "3d_literal": {"tensor": "3d_literal", "axes": {"x": 1, "y": 2, "z": 2}},
    "dsp": {"branch": "dsp", "branch_axes": {"g": 2}},
    "dsp_csub": {"branch": "dsp_csub", "branch_axes": {"g": 2}},
    "zb_h1": {"pipeline": "zb_h1", "stages": 2, "layers": 2, "microbatch": 2},
}


class Seen:
    """What each rank hands to the products of its router, and what it then routes by, in the first pass of a step."""

    def __init__(self, monkeypatch):
        self.products: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.routed: dict[int, list[tuple[torch.Tensor, ...]]] = defaultdict(list)
        compute, route = einsum.compute_einsums, expert_rows.route_tokens

        def einsums(coming, x, operands, *more, **options):
            if coming.group.has_wide_dtype:
                self.products.setdefault(coming.communicator.rank, (x.detach().clone(), operands[0].detach().clone()))
            return compute(coming, x, operands, *more, **options)

        def routed(scores, *more):
            routing = route(scores, *more)
            self.routed[get_ident()].append((scores.detach().clone(), routing[0].detach().clone()))
            return routing

        monkeypatch.setattr(einsum, "compute_einsums", einsums)
        monkeypatch.setattr(expert_rows, "route_tokens", routed)


def weights_of(c, scores: torch.Tensor) -> torch.Tensor:
    """A softmax router's weights [length, batch, experts] where no slot is missing."""
    best = scores.softmax(-1).topk(c.model.experts_per_token, -1)
    return torch.zeros_like(scores).scatter_(-1, best.indices, best.values / best.values.sum(-1, keepdim=True))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("axes", [{}, {"r": 1, "c": 2}], ids=["whole", "d_model split"])
def test_scores_and_weights_are_those_of_fp32(axes, precision, monkeypatch):
    """As of Megatron's moe_router_dtype=fp32: the stream and the weight that is trained in 16 bits, cast both."""
    model = {**EXPERTS, "experts": 128, "experts_per_token": 4, "length": 64, "capacity_factor": 0.0}
    c = configure("2d" if axes else "serial", axes, precision=precision, microbatch=8, **model)
    seen = Seen(monkeypatch)
    run(c)
    blocks = [seen.products[rank] for rank in sorted(seen.products)]
    assert len(blocks) == (2 if axes else 1) and {t.itemsize for pair in blocks for t in pair} == {2}
    exact = sum(x.double() @ w.double().t() for x, w in blocks)
    assert isinstance(exact, torch.Tensor)
    expected = weights_of(c, exact)
    rounded = sum((x @ w.t() for x, w in blocks[1:]), blocks[0][0] @ blocks[0][1].t())
    assert rounded.itemsize == 2
    for scores, weights in (passes[0] for passes in seen.routed.values()):
        assert scores.dtype == weights.dtype == torch.float32
        assert (scores - exact).abs().max() < 1e-6 * exact.abs().max()
        assert ((weights > 0) == (expected > 0)).all() and (weights - expected).abs().max() < 1e-6
    old = weights_of(c, rounded.double())
    assert ((old > 0) != (expected > 0)).any(), "negative control: scores in 16 bits choose other experts"
    assert (old - expected).abs().max() > 1e-4


@pytest.mark.parametrize(("scheme", "zero"), [(s, z) for s in SCHEMES for z in (0, 2, 3) if s != "dsp_csub" or not z])
def test_bytes_are_those_of_the_plan(scheme, zero):
    """Where a scheme splits d_model, or gathers scores of whole sequences, these move in fp32."""
    c = configure(**{"precision": "bf16", "data": 2, "microbatch": 4, "global_batch": 16, **EXPERTS,
                     **SCHEMES[scheme], "zero": zero})  # fmt: skip
    plan, results = run(c)
    assert counted(results) == communication(plan)
    assert replay([r.log for r in results]) is None


@pytest.mark.parametrize("scheme", ["2d", "1d_sp"])
def test_a_plan_says_in_which_type_scores_move(scheme):
    c = configure(**{"precision": "bf16", **EXPERTS, **SCHEMES[scheme]})
    plan = make_plan(c)
    of_scores = {
        "2d": (("project", "layers.0.mlp.router"), "forward", "all_reduce"),
        "1d_sp": (("route", "layers.0.mlp"), "forward", "all_gather"),
    }
    key, phase, op = of_scores[scheme]
    collectives = [x for x in plan.operations[key].collectives if (x.phase, x.op) == (phase, op)]
    assert [x.dtype for x in collectives] == ["accumulate"]


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_gradients_are_rounded_once(precision):
    """The product's way back is fp32 too: gradients of stream and weight are those of fp64, rounded to 16 bits."""
    c = configure(precision={torch.bfloat16: "bf16", torch.float16: "fp16"}[precision], **EXPERTS)
    plan = make_plan(c)
    (group,) = plan.operations["project", "layers.0.mlp.router"].groups
    assert group.has_wide_dtype
    draw = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(shape, generator=draw) for shape in ((16, 8, 32), (16, 32), (16, 8, 16)))
    x, w = x.to(precision).requires_grad_(), w.to(precision).requires_grad_()
    (scores,) = einsum.compute_einsums(Operands(SingleRank(plan.mesh), group), x, [w])
    assert scores.dtype == torch.float32
    scores.backward(g)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    (exact[0] @ exact[1].t()).backward(g.double())
    for t, e in zip((x, w), exact, strict=True):
        assert t.grad is not None and e.grad is not None and t.grad.dtype == precision
        bound = torch.finfo(precision).eps / 2 * e.grad.abs() + 1e-5
        assert ((t.grad.double() - e.grad).abs() <= bound).all()
    rounded = (g.to(precision) @ w).double()
    assert ((rounded - exact[0].grad).abs() > torch.finfo(precision).eps / 2 * exact[0].grad.abs() + 1e-5).any()


def test_other_operations_compute_in_the_compute_type():
    """A type of statistics is refused where an operation would not keep to it, and a router's scores without it."""
    rules, ops = Router("softmax", 1), Recorder(Scheme("serial", (), {}, {}))
    narrow, wide = (Spec.of("stream", "length batch experts", dtype=dtype) for dtype in ("compute", "accumulate"))
    with pytest.raises(ModelMistake, match=r"router's scores are \[length batch experts\] accumulate, unlike stream"):
        ops.route("layer", Symbol(narrow), narrow, "tokens", rules)
    router = Parameter("router", ("experts", "d_model"), "vector")
    (scores,) = ops.project(Symbol(narrow), narrow, (router,), (wide,))
    weights, _ = ops.route("layer", scores, wide, "tokens", rules)
    refused = r"of {} are in the compute type, unlike stream\[length batch experts\] accumulate"
    with pytest.raises(ModelMistake, match="inputs " + refused.format("reduce")):
        ops.reduce("layer", "sum", weights, wide, Spec.of("stream", "length batch"))
    with pytest.raises(ModelMistake, match="inputs " + refused.format("project")):
        ops.project(weights, wide, (Parameter("again", ("experts", "d_model"), "vector"),), (narrow,))


def test_what_may_be_partial_is_read_by_what_is_linear():
    ops, spec = Recorder(Scheme("serial", (), {}, {})), Spec("experts", ("experts", "slots"), open="value")
    with pytest.raises(
        ModelMistake, match=r"inputs of reduce are complete, unlike experts\[experts slots\] of open value"
    ):
        ops.reduce("layer", "max", Symbol(spec), spec, Spec.of("experts", "experts"))

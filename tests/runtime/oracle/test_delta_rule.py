"""Gated delta rules, their convolutions and the gates beside them: chunks against one token after another, and models
under every kind of plan against one process, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from platform.boundary.refusals import ConfigError
from platform.model import build_model
from platform.plan.plan_check import find_unsoundness
from platform.predict.footprint import count_saved_elements
from platform.predict.make_plan import make_plan
from platform.runtime import compilation, conversion, delta_chunks
from tests.harness.oracle import compare, configure, prove, run, serial
from tests.harness.plan_mutants import with_reductions
from tests.runtime import test_memory

NEXT: dict[str, Any] = {
    "kv_heads": 2, "norm": "rmsnorm_centred", "activation": "swiglu", "positions": "rope", "bias": False,
    "tied": False, "d_kv": 8, "rope_share": 0.5, "query_key_norm": True, "attention_gate": True, "linear_layers": [0],
    "linear_key_heads": 2, "linear_value_heads": 4, "linear_d_key": 6, "linear_d_value": 10, "linear_taps": 3,
}  # fmt: skip
ROUTED: dict[str, Any] = {"experts": 4, "shared_experts": 1, "shared_expert_gate": True, "expert_d_ff": 12}
PLANS: dict[str, dict[str, Any]] = {
    "1d_sp, stages": {"tensor": "1d_sp", "axes": {"t": 2}, "pipeline": "1f1b", "stages": 2, "recompute": "full"},
    "2d, documents": {"tensor": "2d", "axes": {"r": 2, "c": 2}, "within_documents": True},
    "experts, zero": {"data": 2, "zero": 3, "global_batch": 16, "experts_of": 2, **ROUTED},
    "dsp": {"branch": "dsp", "branch_axes": {"g": 2}, "microbatch": 4},
    "3d, experts": {"tensor": "3d", "axes": {"x": 2, "y": 1, "z": 2}, "capacity_factor": 0.0, **ROUTED},
    "every layer, interleaved": {"linear_layers": [0, 1, 2, 3], "layers": 4, "pipeline": "interleaved", "stages": 2,
                                 "chunks": 2, "bias": True, "attention_bias": "all"},
    "context, documents": {"context": 2, "within_documents": True},
    "contexts of heads, 1d": {"context": 4, "context_kind": "heads", "tensor": "1d", "axes": {"t": 2}, "heads": 8,
                              "kv_heads": 8, "linear_key_heads": 8, "linear_value_heads": 8, "within_documents": True},
    "ring, zero": {"context": 2, "context_kind": "ring", "data": 2, "zero": 3, "global_batch": 16},
    "nested, stages": {"context": 4, "context_kind": "nested", "context_heads": 2, "linear_key_heads": 4,
                       "kv_heads": 4, "pipeline": "1f1b", "stages": 2},
    "relative, a stage without attention": {"positions": "relative", "rope_share": 1.0, "linear_layers": [0, 1],
                                            "layers": 4, "pipeline": "1f1b", "stages": 2, "data": 2},
    "relative, no attention": {"positions": "relative", "rope_share": 1.0, "linear_layers": [0, 1], "tensor": "3d",
                               "axes": {"x": 2, "y": 1, "z": 2}, "layers": 2},
    "biases, 1d": {"tensor": "1d", "axes": {"t": 2}, "attention_bias": "qkv", "linear_value_heads": 2},
}  # fmt: skip


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """So that a sequence has several."""
    monkeypatch.setattr(delta_chunks, "CHUNK", 5)


@pytest.mark.parametrize("plan", [*[*PLANS][:4], *(pytest.param(p, marks=pytest.mark.full) for p in [*PLANS][4:])])
def test_equals_one_process(plan):
    prove(configure(**{**NEXT, **PLANS[plan]}))


@pytest.mark.full
def test_compiled_blocks_equal_one_process(monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    c = configure(**{**NEXT, **ROUTED})
    c.train.compile = "on"
    compare(c, *run(c), serial(c))


LENGTH, BATCH, KEYS, HEADS, D_KEY, D_VALUE = 13, 2, 2, 4, 3, 5
BEGINS = torch.tensor([[0] * 6 + [6] * 7, [0] * 1 + [1] * 3 + [4] * 1 + [5] * 8]).t()


def arguments() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = [(KEYS, D_KEY), (KEYS, D_KEY), (HEADS, D_VALUE), (HEADS,), (HEADS,)]
    tensors = [torch.randn(LENGTH, BATCH, *s, generator=draw, dtype=torch.float64) for s in shapes]
    return [x.requires_grad_() for x in (*tensors, *torch.randn(2, HEADS, generator=draw, dtype=torch.float64))]


def token_by_token(q, k, v, strength, decay, rate, shift, begins: Tensor | None) -> Tensor:
    """The rule as it is defined, one head of one sequence after another."""
    rows = []
    for b in range(BATCH):
        for h in range(HEADS):
            state, read = torch.zeros(D_KEY, D_VALUE, dtype=q.dtype), []
            for t in range(LENGTH):
                if begins is not None and begins[t, b] == t:
                    state = torch.zeros_like(state)
                query, key = (x[t, b, h // (HEADS // KEYS)] for x in (q, k))
                query, key = (x / (x @ x + 1e-6).sqrt() for x in (query, key))
                state = state * torch.exp(-rate[h].exp() * F.softplus(decay[t, b, h] + shift[h]))
                state = state + torch.outer(key, torch.sigmoid(strength[t, b, h]) * (v[t, b, h] - key @ state))
                read.append(query @ state / D_KEY**0.5)
            rows.append(torch.stack(read))
    return torch.stack(rows).view(BATCH, HEADS, LENGTH, D_VALUE).permute(2, 0, 1, 3)


@pytest.mark.parametrize("begins", [None, BEGINS], ids=["whole", "documents"])
def test_chunks_equal_one_token_after_another(begins):
    mine, theirs = arguments(), arguments()
    out, state = delta_chunks.apply_delta_rule(mine, delta_chunks.TokenPlaces(0, begins))
    expected = token_by_token(*theirs, begins)
    assert (out - expected).abs().max() < 1e-12
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    for x in (out, expected):
        (x * weights).sum().backward()
    for ours, other in zip(mine, theirs, strict=True):
        assert (ours.grad - other.grad).abs().max() < 1e-12 * max(1, other.grad.abs().max())
    with torch.no_grad():  # in two passes, the second from the state of the first
        parts = [[*(x[at] for x in mine[:5]), *mine[5:]] for at in (slice(7), slice(7, None))]
        places = [
            delta_chunks.TokenPlaces(f, None if begins is None else begins[f : f + n]) for f, n in ((0, 7), (7, 6))
        ]
        first, before = delta_chunks.apply_delta_rule(parts[0], places[0])
        second, after = delta_chunks.apply_delta_rule(parts[1], places[1], before)
        assert (torch.cat((first, second)) - out).abs().max() < 1e-12
        assert (after - state).abs().max() < 1e-12


@pytest.mark.parametrize("begins", [None, BEGINS], ids=["whole", "documents"])
def test_a_convolution_equals_one_token_after_another(begins):
    x, taps = arguments()[2], torch.randn(HEADS, D_VALUE, 4, dtype=torch.float64)
    out = delta_chunks.convolve(x, taps, x.new_zeros(3, BATCH, HEADS, D_VALUE), delta_chunks.TokenPlaces(0, begins))
    for t in range(LENGTH):
        for b in range(BATCH):
            first = 0 if begins is None else int(begins[t, b])
            read = [taps[..., 3 - back] * x[t - back, b] for back in range(4) if t - back >= first]
            assert (out[t, b] - F.silu(torch.stack(read).sum(0))).abs().max() < 1e-12


def test_what_is_kept_for_the_backward_pass_is_metered(monkeypatch):
    monkeypatch.setitem(test_memory.MODELS, "next", {**NEXT, **ROUTED})
    test_memory.test_saved_for_backward(("1d_sp", {"t": 2}, "next"))
    test_memory.test_bytes_in_16_bits("3d", {"x": 1, "y": 2, "z": 1}, "next")


def test_heads_that_ranks_cannot_share_are_refused_by_their_key():
    c = configure(**{**NEXT, "linear_value_heads": 6, "tensor": "1d", "axes": {"t": 4}})
    with pytest.raises(ConfigError) as error:
        make_plan(c)
    assert any(line.startswith("model.linear_key_heads=2 is not divisible by") for line in error.value.violations)
    assert any(line.startswith("model.linear_value_heads=6 is not divisible") for line in error.value.violations)


def test_a_layout_that_splits_what_a_rule_needs_whole_is_refused():
    c = configure(**NEXT, tensor="layout", axes={"a": 2}, rules={"length": ["a"]})
    with pytest.raises(ConfigError, match=r"in convolve layers\.0\.delta\.query_taps, length is split over a"):
        make_plan(c)


def test_heads_in_blocks_that_differ_are_refused():
    """Where attention's heads are cut by groups of two, a rank would have other heads of keys than of values."""
    c = configure(**{**NEXT, "heads": 6, "kv_heads": 3, "d_model": 36, "tensor": "1d", "axes": {"t": 2}})
    c.tensor.uneven = True
    with pytest.raises(ConfigError, match=r"in convolve \S+, t would not give each rank as many heads"):
        make_plan(c)


@pytest.mark.parametrize("name", ["rate", "query_taps"])
@pytest.mark.parametrize(
    ("axis", "plan"), [("r", {"tensor": "2d", "axes": {"r": 2, "c": 2}}), ("context", {"context": 2})]
)
def test_a_gradient_that_is_not_summed_is_found(name, axis, plan):
    plan = make_plan(configure(**NEXT, **plan))
    assert not find_unsoundness(plan) and plan.reductions[f"layers.0.delta.{name}"] == (axis,)
    (line,) = find_unsoundness(with_reductions(plan, f"layers.0.delta.{name}", lambda axes: ()))
    assert f"gradient of layers.0.delta.{name} is partial over {axis}, and never summed there" in line


def test_contexts_exchange_length_for_heads():
    """Each activation moves by one all-to-all, and the result by one back; heads that ranks cannot share are refused.
    A run that mixes up the pieces of a sequence has another loss."""
    plan = make_plan(configure(**NEXT, context=2, context_kind="gather"))
    moved = [o for (kind, name), o in plan.operations.items() if kind == "relayout" and ".delta." in name]
    assert len(moved) == 6 and {(c.op, c.axes) for o in moved for c in o.collectives} == {("all_to_all", ("context",))}
    with pytest.raises(ConfigError) as error:
        make_plan(configure(**NEXT, context=4))
    assert any("model.linear_key_heads=2 is not divisible by parallel.context=4" in x for x in error.value.violations)


def test_pieces_out_of_order_are_seen(monkeypatch):
    """A rank that reads the parts of a sequence as they come has another loss."""
    monkeypatch.setattr(conversion, "undo_zigzag", lambda x, *_: x)
    c = configure(**NEXT, context=2)
    with pytest.raises(AssertionError):
        compare(c, *run(c), serial(c))


def test_what_is_kept_under_a_context_is_metered():
    c = configure(**NEXT, context=2)
    plan, counts = test_memory.measured(c)
    assert {*counts} == {count_saved_elements(plan, build_model(c.model)).total_elements}

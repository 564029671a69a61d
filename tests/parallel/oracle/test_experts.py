"""Experts, split in every way, against one process; and that against plain PyTorch, token by token (fp64)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from platform.planning.make_plan import make_plan
from tests.harness import oracle
from tests.harness.oracle import MODELS, Tokens, compare, configure, prove, run, serial, with_operations
from tests.harness.pairwise import cover, product
from tests.harness.reference_experts import loss_of
from tests.harness.suite import suite
from tests.parallel.oracle import test_models

EXPERTS: dict[str, Any] = MODELS["experts"] | {"shared_experts": 0}
KINDS: dict[str, dict[str, Any]] = {
    "shared": MODELS["experts"],
    "sigmoid": {**EXPERTS, "router": "sigmoid", "router_scale": 2.5, "capacity_factor": 1.25},
    "all tokens": {**MODELS["llama"], **EXPERTS, "router_normalised": False, "capacity_factor": 0.0,
                   "query_key_norm": True, "query_key_norm_over": "heads"},
    "one of four": {**EXPERTS, "experts_per_token": 1, "router_normalised": False, "capacity_factor": 0.75},
    "every second layer": {**EXPERTS, "experts_every": 2},
    "first dense": {**MODELS["latent"], **MODELS["experts"], "dense_layers": [0], "router": "sigmoid"},
    "groups": {**EXPERTS, "experts": 8, "router": "sigmoid", "router_groups": 4, "router_groups_kept": 2,
               "router_group_best": 2, "experts_per_token": 3},
    "both ways": {**MODELS["bert"], **EXPERTS},
}  # fmt: skip
SCHEMES = {
    **test_models.SCHEMES,
    "2p5d": ("2p5d", {"d": 2, "r": 1, "c": 2}),
    "3d fsdp": ("3d", {"x": 2, "y": 1, "z": 1}),
}


def configured(kind: str = "shared", experts: int = 1, **more: Any):
    return configure(**{**KINDS[kind], **more}, experts_of=experts)


PLAIN = {"norm": "rmsnorm", "bias": False, "length": 8, "d_model": 16, "heads": 4, "d_ff": 20}


class Padded(Tokens):
    """Sequences that end early, in padding."""

    def sample(self, draw):
        found = super().sample(draw)
        end = draw.integers(1, self.model.length + 1)
        for name in ("tokens", "labels"):
            found[name] = np.where(np.arange(self.model.length) < end, found[name], -1)
        return found


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "both ways"])
def test_equals_plain_pytorch(kind, padded, monkeypatch):
    """Loss, auxiliary losses and every gradient, the router's too."""
    positions = {"positions": "learned", "tied": True, "kv_heads": 0, "query_key_norm": False}
    activation = "swiglu" if kind == "all tokens" else "gelu"
    c = configured(kind, **{**PLAIN, **positions, "activation": activation, "global_batch": 4})
    if padded:
        monkeypatch.setattr(oracle, "Tokens", Padded)
    _, (ours,) = run(c)
    batch = (Padded if padded else Tokens)(c).batch("train", 0, 4)
    weights = {n: w.clone().requires_grad_() for n, w in ours.initial.items()}
    tokens, labels = (torch.from_numpy(batch[name]) for name in ("tokens", "labels"))
    loss, more, dropped = loss_of(c.model, weights, tokens, labels)
    loss.backward()
    assert ours.loss == pytest.approx(loss.item(), rel=1e-12)
    assert more.item() > 0.05 and (padded or bool(dropped) == (c.model.capacity_factor > 0))
    chose, took = np.split(np.array(ours.routed), 2)
    assert (chose - took).sum() == dropped
    for name, w in weights.items():
        assert w.grad is not None and w.grad.abs().max() > 1e-6, f"{name} does not matter"
        assert torch.allclose(ours.gradients[name], w.grad, rtol=1e-9, atol=1e-13), name


FACTORS = {
    "kind": list(KINDS),
    "scheme": list(SCHEMES),
    "split": [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)],  # replicas, of which so many share the experts
    "zero": [0, 1, 2, 3],
    "recompute": ["none", "selective", "full"],
    "branch": ["none", "dsp", "dsp_slice", "dsp_csub"],
}


def legal(case) -> bool:
    data, experts = case["split"]
    ranks = data * (1 if case["branch"] == "none" else 2)
    for n in SCHEMES[case["scheme"]][1].values():
        ranks *= n
    return ranks <= 8 and not (case["zero"] and case["branch"] == "dsp_csub")


CASES = product(FACTORS, legal)


@suite("oracle of experts (threads)", CASES, cover(CASES))
def test_equals_one_process(case):
    data, experts = case["split"]
    c = configured(
        case["kind"],
        experts,
        tensor=SCHEMES[case["scheme"]][0],
        axes=SCHEMES[case["scheme"]][1],
        data=data,
        zero=case["zero"],
        recompute=case["recompute"],
        branch=case["branch"],
        branch_axes={} if case["branch"] == "none" else {"g": 2},
        microbatch=4,
        global_batch=16,
    )
    prove(c)


STAGES = {
    "gpipe": ("gpipe", 2, 1),
    "1f1b": ("1f1b", 2, 1),
    "interleaved": ("interleaved", 2, 2),
    "zb_h1": ("zb_h1", 2, 1),
}
PIPED = {
    "schedule": list(STAGES),
    "kind": ["shared", "sigmoid", "every second layer"],
    "scheme": ["serial", "1d_sp"],
    "split": [(1, 1), (2, 2)],
    "zero": [0, 3],
    "recompute": ["none", "full"],
}
PIPELINES = product(PIPED, lambda case: True)


@suite("oracle of experts in pipelines (threads)", PIPELINES)
def test_in_a_pipeline(case):
    """The tokens' losses flow beside the stream."""
    kind, stages, chunks = STAGES[case["schedule"]]
    data, experts = case["split"]
    tensor, axes = SCHEMES[case["scheme"]]
    more = {"pipeline": kind, "stages": stages, "chunks": chunks, "recompute": case["recompute"], "zero": case["zero"]}
    c = configured(case["kind"], experts, tensor=tensor, axes=axes, data=data, microbatch=2, layers=4, **more)
    plan, _ = prove(c)
    assert ["auxiliary" in dict(chunk.sends) for chunk in plan.chunks][-2]


@pytest.mark.parametrize("data", [3, 6])
def test_replicas_with_unequal_numbers_of_sequences(data):
    """Sequences of padding add nothing to the loss of uneven load, and take nobody's slot."""
    prove(configured("shared", 2 if data == 6 else 1, data=data, microbatch=1, global_batch=8))


def test_experts_on_an_axis_of_a_scheme():
    """Expert parallelism over tensor ranks is a line of a table: no key of its own."""
    c = configured("shared", tensor="1d", axes={"t": 2}, data=2)
    c.tensor.regions["experts"] = {"experts": ["t"]}
    c.tensor.parameters = {
        "vector": {},
        "in": {"heads": ["t"], "d_ff": ["t"], "vocab": ["t"], "experts": ["t"]},
        "out": {"heads": ["t"], "d_ff": ["t"], "experts": ["t"]},
    }
    with pytest.raises(Exception, match="axis t would split both d_ff and experts"):
        make_plan(c)
    c.tensor.regions["mlp"] = {}
    for role in ("in", "out"):
        del c.tensor.parameters[role]["d_ff"]
    plan, _ = prove(c)
    assert plan.local_shape(next(p for p in plan.parameters if p.name.endswith("experts.up")))[0] == 2


def test_only_the_way_there_and_back_is_an_all_to_all():
    plan = make_plan(configured("sigmoid", 2, data=2))
    found = {
        (kind, c.phase): c.elements
        for (kind, name), o in plan.operations.items()
        for c in o.collectives
        if name.startswith("layers.0") and c.op == "all_to_all"
    }
    slots = 16 * 2 * 5 // 4 // 4
    assert set(found.values()) == {4 * 4 * slots * 32}  # experts x sequences x slots x d_model
    assert set(found) == {(kind, phase) for kind in ("dispatch", "combine") for phase in ("forward", "backward")}


SUMS = {  # scheme, sizes of axes, branch -> the sums over ranks of what experts make, and of their tokens' gradient
    ("1d", "t", "none"): "all_reduce",
    ("1d_sp", "t", "none"): "reduce_scatter",
    ("3d", "y", "none"): "reduce_scatter",
    ("serial", "g", "dsp"): "reduce_scatter",
    ("serial", "g", "dsp_csub"): "reduce",
}


@pytest.mark.parametrize("case", SUMS, ids=" ".join)
def test_sums_over_ranks_are_of_tokens(case):
    """Never of slots, which are more: dispatch and combine are linear, so that sums can wait for the smaller tensor."""
    scheme, axis, branch = case
    axes, more = ({}, {"branch": branch, "branch_axes": {"g": 2}}) if axis == "g" else ({axis: 2}, {})
    c = configured("sigmoid", tensor=scheme, axes=axes, **more)
    plan = make_plan(c)
    summing = [(kind, name.removeprefix("layers.0.mlp"), c.op, c.phase, c.elements)
               for (kind, name), o in plan.operations.items() for c in o.collectives
               if name.startswith("layers.0.mlp") and c.op in ("all_reduce", "reduce_scatter", "reduce")]  # fmt: skip
    tokens = plan.sizes["length"] * plan.sizes["batch"] * plan.sizes["d_model"]
    ways = {("combine", "forward"), ("dispatch", "backward")}
    assert {(k, "", SUMS[case], phase, tokens) for k, phase in ways} <= {*summing}
    assert not [found for found in summing if ".experts." in found[1]]


def test_negative_control_a_sum_that_nobody_takes():
    """Where the tokens' gradient stays partial over the ranks that split d_ff, the oracle must fail."""
    c = configured("sigmoid", tensor="1d", axes={"t": 2})
    plan, key = make_plan(c), ("dispatch", "layers.0.mlp")
    enter, *rest = plan.operations[key].conversions
    assert [s.op for s in enter.backward] == ["all_reduce"]
    broken = replace(plan.operations[key], conversions=(replace(enter, backward=()), *rest))
    with pytest.raises(AssertionError, match="gradient of|replicas of"):
        compare(c, *run(c, with_operations(plan, {**plan.operations, key: broken})), serial(c))


def test_the_same_tokens_are_dropped_under_every_plan():
    """A capacity counts in one sequence, never in what a rank happens to have."""
    sizes = [make_plan(configured("shared", e, data=d)).sizes["slots"] for d, e in ((1, 1), (2, 1), (4, 4))]
    assert set(sizes) == {8}


def test_negative_control_a_router_of_a_part():
    """Where the gradient of weights stays partial over a split d_model, the oracle must fail."""
    c = configured("shared", tensor="2d_gather", axes={"r": 1, "c": 2})
    plan = make_plan(c)
    key = "combine", "layers.0.mlp"
    enter_y, enter_weights, leave = plan.operations[key].conversions
    assert [s.op for s in enter_weights.backward] == ["all_reduce"]
    partial = replace(enter_weights, backward=())
    broken = {**plan.operations, key: replace(plan.operations[key], conversions=(enter_y, partial, leave))}
    with pytest.raises(AssertionError, match="gradient of|replicas of"):
        compare(c, *run(c, with_operations(plan, broken)), serial(c))


def test_negative_control_gradients_of_other_experts():
    """Where experts' gradients are summed over the ranks that share the experts, the oracle must fail."""
    c = configured("shared", 2, data=2)
    plan = make_plan(c)
    up = "layers.0.mlp.experts.up"
    assert plan.reductions[up] == () and plan.reductions["layers.0.mlp.router"] == ("expert",)
    with pytest.raises(AssertionError, match=f"gradient of {up}"):
        compare(c, *run(c, replace(plan, reductions={**plan.reductions, up: ("expert",)})), serial(c))


SHARDED = {  # replicas, how many share the experts, parallel.zero_group -> axes that shard most, and experts
    (4, 4, 0): (("expert",), ()),
    (4, 2, 0): (("data", "expert"), ("data",)),
    (8, 2, 4): (("zero", "expert"), ("zero",)),
    (8, 2, 2): (("expert",), ()),
}


@pytest.mark.parametrize("split", SHARDED)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_shards_each_tensor_over_its_replicas(zero, split):
    """Attention, router and shared experts have more replicas than an expert has."""
    data, experts, group = split
    c = configured("shared", experts, data=data, zero=zero, microbatch=2, global_batch=16)
    c.parallel.zero_group = group
    plan, _ = prove(c)
    assert {b.sharded for b in plan.buckets} == {*SHARDED[split]}
    for name, bucket in plan.bucket_of.items():
        assert bucket.sharded == SHARDED[split][".mlp.experts." in name], name
        assert bucket.shards == plan.mesh.extent(bucket.sharded) and bucket.zero == (zero if bucket.sharded else 0)


def test_negative_control_norms_of_a_rank_s_own_heads():
    """Where a norm of all heads together takes those of one rank for all, the oracle must fail."""
    c = configured("all tokens", tensor="1d", axes={"t": 2})
    plan = make_plan(c)
    key = "norm", "layers.0.attention.key_norm.gain"
    assert plan.operations[key].over == ("t",)
    alone = replace(plan.operations[key], over=(), collectives=())
    with pytest.raises(AssertionError):
        compare(c, *run(c, with_operations(plan, {**plan.operations, key: alone})), serial(c))


def test_one_rank_needs_no_collective():
    operations = make_plan(configured("shared")).operations
    assert [key for key, o in operations.items() if o.collectives] == []

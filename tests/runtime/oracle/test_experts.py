"""Experts, split in every way, against one process; and that against plain PyTorch, token by token (fp64)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from platform.plan.plan_data import plan_summary
from platform.plan.step_collectives import step_collectives
from platform.predict.make_plan import make_plan
from platform.runtime import expert_rows
from platform.runtime.communicator import SingleRank
from platform.train import trainer
from platform.train.replies import Differences
from tests.harness import oracle
from tests.harness.oracle import MODELS, Tokens, compare, configure, prove, run, serial, trainer_of, with_operations
from tests.harness.pairwise import cover, product
from tests.harness.reference_experts import loss_of, settled
from tests.harness.suite import suite
from tests.runtime.oracle import test_models

EXPERTS: dict[str, Any] = MODELS["experts"] | {"shared_experts": 0}
# as DeepSeek-V3; the second step chooses others, by the bias that the first leaves
BIASED = {"experts": 8, "experts_per_token": 3, "router": "sigmoid", "router_scale": 2.5, "router_groups": 4,
          "router_groups_kept": 2, "router_group_best": 2, "router_bias": True, "balance_rate": 0.3}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "shared": MODELS["experts"],
    "biased": {**EXPERTS, **BIASED, "capacity_factor": 1.25},
    "all tokens": {**MODELS["llama"], **EXPERTS, "router_normalised": False, "capacity_factor": 0.0,
                   "query_key_norm": True, "query_key_norm_over": "heads"},
    "one of four": {**EXPERTS, "experts_per_token": 1, "router_normalised": False, "capacity_factor": 0.75,
                    "router_jitter": 0.2},
    "every second layer": {**EXPERTS, "experts_every": 2, "router": "sigmoid", "balance_over": "batch"},
    "first dense": {**MODELS["latent"], **MODELS["experts"], "dense_layers": [0], "router": "sigmoid"},
    "gpt_oss": MODELS["gpt_oss"],
    "both ways": {**MODELS["bert"], **EXPERTS},
    "both stacks": {**MODELS["t5"], **EXPERTS},
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
        arrays = super().sample(draw)
        end = draw.integers(1, self.model.length + 1)
        for name in ("tokens", "labels"):
            arrays[name] = np.where(np.arange(self.model.length) < end, arrays[name], -1)
        return arrays


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("both ways", "both stacks", "first dense")])
def test_equals_plain_pytorch(kind, padded, monkeypatch):
    """Loss, auxiliary losses and every gradient, the router's too."""
    positions = {"positions": "learned", "tied": True, "kv_heads": 0, "query_key_norm": False, "window": 0}
    activation = {"all tokens": "swiglu", "gpt_oss": "swiglu_clamped"}.get(kind, "gelu")
    none = {"attention_bias": "none", "activation": activation, "global_batch": 4}
    c = configured(kind, **{**PLAIN, **positions, **none})
    if padded:
        monkeypatch.setattr(oracle, "Tokens", Padded)
    _, (ours,) = run(c)
    batch = (Padded if padded else Tokens)(c).batch("train", 0, 4)
    weights = {n: w.clone().requires_grad_() for n, w in ours.initial.items()}
    tokens, labels = (torch.from_numpy(batch[name]) for name in ("tokens", "labels"))
    states = {n: torch.tensor(1.0 if n.endswith(".load") else 0.0).expand(c.model.experts) for n in ours.states}
    loss, more, dropped, loads = loss_of(c.model, weights | states, tokens, labels)
    loss.backward()
    assert ours.loss == pytest.approx(loss.item(), rel=1e-12)
    assert more.item() > 0.05 and (padded or bool(dropped) == (c.model.capacity_factor > 0))
    chose, took = np.split(np.array(ours.routed), 2)
    assert (chose - took).sum() == dropped
    for name, w in weights.items():
        assert w.grad is not None and w.grad.abs().max() > 1e-6, f"{name} does not matter"
        assert torch.allclose(ours.gradients[name], w.grad, rtol=1e-9, atol=1e-13), name


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_states_equal_plain_pytorch(padded, monkeypatch):
    """Step by step: what a step chose moves the bias, and is the load in the loss of the next."""
    more = {"positions": "learned", "tied": True, "kv_heads": 0, "balance_over": "batch", "global_batch": 4}
    c = configured("biased", **{**PLAIN, **more, "microbatch": 2})
    corpus = (Padded if padded else Tokens)(c)
    one = trainer_of(c, plan := make_plan(c), SingleRank(plan.mesh), corpus)
    states = {n: s.clone() for n, s in one.weights.states.items()}
    moved = 0
    for step in range(1, 5):
        weights = {n: w.detach().clone().requires_grad_() for n, w in one.weights.master.items()}
        gradients: dict[str, torch.Tensor] = {}

        def keep(kept=gradients):
            kept.update((n, g.clone()) for n, g in one.weights.gradients.items())
            return Differences()

        report = one.step(step, verify=keep)
        batch = corpus.batch("train", 4 * (step - 1), 4 * step)
        tokens, labels = (torch.from_numpy(batch[name]) for name in ("tokens", "labels"))
        reference = loss_of(c.model, weights | states, tokens, labels)
        reference.loss.backward()
        assert report.loss == pytest.approx(reference.loss.item(), rel=1e-12)
        for name, w in weights.items():
            assert torch.allclose(gradients[name], w.grad, rtol=1e-9, atol=1e-13), name
        free = {**states, **{n: torch.zeros_like(s) for n, s in states.items() if n.endswith("choice_bias")}}
        moved += int(loss_of(c.model, weights | free, tokens, labels).loss != reference.loss)
        states |= settled(c.model, states, reference.loads)
        assert states.keys() == one.weights.states.keys()
        for name, state in one.weights.states.items():
            assert torch.allclose(state, states[name].double(), rtol=1e-15, atol=1e-15), name
    assert moved >= 2, "negative control: the bias chooses others"


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
        tensor_experts=case.get("tensor_experts", "split"),
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
    "kind": ["shared", "biased", "every second layer", "both stacks"],
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


SENT_IN_PARTS = ("1d", "1d_sp", "3d", "3d_literal")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_only_the_way_there_and_back_is_an_all_to_all(scheme):
    """Whatever else splits a batch: over the axis of experts a rank moves its slots, and nothing else; of slots that
    ranks along t or y have alike, each moves a part."""
    tensor, axes = SCHEMES[scheme]
    plan = make_plan(configured("shared", 2, tensor=tensor, axes=axes, data=2))
    elements = {
        (kind, c.op, c.phase): c.elements
        for (kind, name), o in plan.operations.items()
        for c in o.collectives
        if name.startswith("layers.0") and "expert" in c.axes
    }
    assert set(elements) == {(k, "all_to_all", way) for k in ("dispatch", "combine") for way in ("forward", "backward")}
    dispatched = plan.operations["dispatch", "layers.0.mlp"].operation.outputs[0]
    slots = 16 * 2 // 4
    whole = 4 * 8 * slots * 32  # experts x sequences x slots x d_model
    parts = plan.mesh.count_ranks(plan.scheme.regions["mlp"]["d_ff"]) if scheme in SENT_IN_PARTS else 1
    assert set(elements.values()) == {whole // plan.mesh.count_ranks(plan.layout(dispatched).axes) // parts}


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
    c = configured("biased", tensor=scheme, axes=axes, **more)
    plan = make_plan(c)
    summing = [(kind, name.removeprefix("layers.0.mlp"), c.op, c.phase, c.elements)
               for (kind, name), o in plan.operations.items() for c in o.collectives
               if name.startswith("layers.0.mlp") and c.op in ("all_reduce", "reduce_scatter", "reduce")]  # fmt: skip
    tokens = plan.sizes["length"] * plan.sizes["batch"] * plan.sizes["d_model"]
    ways = {("combine", "forward"), ("dispatch", "backward")}
    assert {(k, "", SUMS[case], phase, tokens) for k, phase in ways} <= {*summing}
    assert not [name for _, name, *_ in summing if ".experts." in name]


def test_negative_control_a_sum_that_nobody_takes():
    """Where the tokens' gradient stays partial over the ranks that split d_ff, the oracle must fail."""
    c = configured("biased", tensor="1d", axes={"t": 2})
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


def test_losses_of_a_source_count_as_the_labels_of_its_target(monkeypatch):
    """The mean over a source's tokens is a loss of each token of its target: what is added to the loss is computed here
    from what each router says of its own tokens."""
    c, routed, route = configured("both stacks", global_batch=4, microbatch=4), [], expert_rows.route_tokens

    def noted(scores, real, *more):
        weights, auxiliary, counts = route(scores, real, *more)
        routed.append((auxiliary.detach(), real))
        return weights, auxiliary, counts

    monkeypatch.setattr(expert_rows, "route_tokens", noted)
    _, (ours,) = run(c)
    monkeypatch.setattr(expert_rows, "route_tokens", route)
    c.model.balance_loss = c.model.z_loss = 0.0
    _, (without,) = run(c)
    labels = torch.from_numpy(Tokens(c).batch("train", 0, 4)["labels"]).t() >= 0  # [length, batch]
    of_first_step = routed[: 2 * c.model.layers]  # of the encoder's layers, then of the decoder's
    sources = sum(losses.sum(0) / real.sum(0) for losses, real in of_first_step[: c.model.layers])
    targets = sum((losses * labels).sum() for losses, _ in of_first_step[c.model.layers :])
    assert {len(losses) for losses, _ in of_first_step} == {c.model.source_length, c.model.length} == {8, 16}
    assert not all(real.all() for _, real in of_first_step) and not labels.all()
    added = ((sources * labels.sum(0)).sum() + targets) / labels.sum()
    assert ours.loss - without.loss == pytest.approx(added.item(), rel=1e-9) and added > 0.05


def test_negative_control_states_that_stay(monkeypatch):
    """Where a plan leaves the bias of experts as it was, the oracle must fail."""
    c = configured("biased", 2, data=2)
    expected = serial(c)
    monkeypatch.setattr(trainer, "update_router_states", lambda *_: None)
    with pytest.raises(AssertionError, match="choice_bias|final of"):
        compare(c, *run(c), expected)


def test_states_are_in_the_plan_and_cost_their_sum():
    """A row of fp64 numbers for each layer beside loss and norm: no collective of its own."""
    plan, bare = (make_plan(configured(kind, 2, data=2)) for kind in ("biased", "shared"))
    sums = [next(c for place, c, _ in step_collectives(p) if place == "loss and norm") for p in (plan, bare)]
    assert [c.elements for c in sums] == [2 + 2 * 8, 2]
    assert plan_summary(plan)["states"] == [{"name": f"layers.{i}.mlp.choice_bias", "shape": [8]} for i in (0, 1)]
    assert {p.name for p in plan.states} & plan.bucket_by_parameter.keys() == set()


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
    for name, bucket in plan.bucket_by_parameter.items():
        assert bucket.sharded == SHARDED[split][".mlp.experts." in name], name
        assert bucket.shards == plan.mesh.count_ranks(bucket.sharded) and bucket.zero == (zero if bucket.sharded else 0)


def test_negative_control_norms_of_a_rank_s_own_heads():
    """Where a norm of all heads together takes those of one rank for all, the oracle must fail."""
    c = configured("all tokens", tensor="1d", axes={"t": 2})
    plan = make_plan(c)
    key = "norm", "layers.0.attention.key_norm.gain"
    assert plan.operations[key].over == ("t",)
    alone = replace(plan.operations[key], over=(), collectives=())
    with pytest.raises(AssertionError):
        compare(c, *run(c, with_operations(plan, {**plan.operations, key: alone})), serial(c))


def test_negative_control_a_sink_on_every_rank():
    """Where each rank that has some of the keys adds a sink of its own, the oracle must fail."""
    c = configured("gpt_oss", rules={"memory_length": ["m"]}, tensor="layout", axes={"m": 2})
    plan = make_plan(c)
    key = "softmax", "layers.0.attention"
    assert plan.operations[key].over == ("m",) and plan.reductions["layers.0.attention.sink"] == ("m",)
    alone = {**plan.reductions, "layers.0.attention.sink": ()}
    with pytest.raises(AssertionError, match=r"attention\.sink"):
        compare(c, *run(c, replace(plan, reductions=alone)), serial(c))


def test_one_rank_needs_no_collective():
    operations = make_plan(configured("shared")).operations
    assert [key for key, o in operations.items() if o.collectives] == []

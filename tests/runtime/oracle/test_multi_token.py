"""Multi-token prediction (DeepSeek-V3): against its formula in plain PyTorch, and under every kind of plan against one
process in fp64."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import torch

from platform.data import streams
from platform.plan.operations import adapted
from platform.plan.plan_check import find_unsoundness
from platform.predict.make_plan import make_plan
from platform.train import stage_passes
from tests.harness import reference_multi_token
from tests.harness.oracle import MODELS, Tokens, compare, configure, prove, run, serial
from tests.harness.pairwise import cover, product
from tests.harness.suite import suite
from tests.runtime import test_memory
from tests.runtime.oracle import test_adapters, test_models
from tests.runtime.oracle.test_adapters import started  # noqa: F401  adapters that are not 0 at first

LLAMA: dict[str, Any] = {**MODELS["llama"], "layers": 1, "predict_ahead": 1, "predict_ahead_weight": 0.3}
KINDS: dict[str, dict[str, Any]] = {
    "one token": LLAMA,
    "two tokens, tied": {**LLAMA, "predict_ahead": 2, "tied": True, "vocab": 64},
    "documents": {**LLAMA, "predict_ahead": 2, "within_documents": True, "positions": "learned"},
    "latents and experts": {**LLAMA, **MODELS["latent"], **MODELS["experts"], "layers": 2, "dense_layers": [0],
                            "router": "sigmoid", "router_bias": True, "capacity_factor": 0.0, "norm": "rmsnorm"},
    "slots": {**LLAMA, **MODELS["experts"], "within_documents": True},
}  # fmt: skip
FACTORS = {
    "scheme": list(test_models.SCHEMES),
    "kind": list(KINDS),
    "data": [1, 2],
    "zero": [0, 1, 3],
    "context": [1, 2],
    "recompute": ["none", "selective", "full"],
    "pipeline": ["none", "1f1b", "zb_h1", "interleaved"],
    "branch": ["none", "dsp", "dsp_csub"],
    "dropout": [0.0, 0.2],
}


def legal(case) -> bool:
    g, stages = (1 if case["branch"] == "none" else 2), (1 if case["pipeline"] == "none" else 2)
    sharded = case["zero"] == 0 or (case["data"] > 1 and case["branch"] != "dsp_csub")
    tensor = prod(test_models.SCHEMES[case["scheme"]][1].values())
    alone = case["context"] == 1 or (g == 1 and tensor <= 2 and case["scheme"] in ("serial", "1d", "1d_sp"))
    units = case["pipeline"] != "interleaved" or case["kind"] != "one token"
    ranks = case["data"] * g * stages * tensor * case["context"]
    return ranks <= 8 and sharded and alone and units and not (case["zero"] == 3 and case["pipeline"] == "zb_h1")


CASES = product(FACTORS, legal)
PLAIN = {
    "scheme": ["1d_sp", "3d"],
    "kind": ["two tokens, tied", "latents and experts", "documents"],
    "branch": ["none"],
    "zero": [0, 3],
    "recompute": ["none", "full"],
    "dropout": [0.0],
}


@suite("oracle of multi-token prediction (threads)", CASES, cover(CASES, plain=PLAIN))
def test_equals_one_process(case):
    stages = 1 if case["pipeline"] == "none" else 2
    tensor, axes = test_models.SCHEMES[case["scheme"]]
    c = configure(
        tensor,
        axes,
        data=case["data"],
        zero=case["zero"],
        context=case["context"],
        recompute=case["recompute"],
        branch=case["branch"],
        branch_axes={} if case["branch"] == "none" else {"g": 2},
        pipeline=case["pipeline"],
        stages=stages,
        chunks=2 if case["pipeline"] == "interleaved" else 1,
        dropout=case["dropout"],
        microbatch=4 // stages,
        **KINDS[case["kind"]],
    )
    plan, _ = prove(c)
    assert not find_unsoundness(plan)


PLAIN_KINDS = {
    **{name: KINDS[name] for name in ("one token", "two tokens, tied", "documents")},
    "three tokens": {**LLAMA, "predict_ahead": 3, "d_kv": 8, "window": 5, "within_documents": True,
                     "embedding_scale": 3.0, "norm_eps": 1e-2, "logit_scale": 0.5},
    "experts": {**LLAMA, **MODELS["experts"], "capacity_factor": 0.0, "balance_loss": 0.0, "z_loss": 0.0,
                "within_documents": True},
}  # fmt: skip


def compare_with_formula(kind: str) -> None:
    """Loss and gradients of one process against the paper's formula. Raises AssertionError."""
    c = configure(length=8, global_batch=4, **PLAIN_KINDS[kind])
    _, (ours,) = run(c)
    batch = Tokens(c).batch("train", 0, c.train.global_batch)
    weights = {n: w.clone().requires_grad_() for n, w in ours.initial.items()}
    data = {name: torch.from_numpy(rows) for name, rows in batch.items()}
    total, _ = reference_multi_token.loss(c.model, weights, data)
    total.backward()
    assert ours.loss == pytest.approx(total.item(), rel=1e-12)
    largest = max(w.grad.abs().max() for w in weights.values())
    for name, w in weights.items():
        assert w.grad.abs().max() > 1e-9, f"{name} does not matter"
        error = (ours.gradients[name] - w.grad).abs().max()
        assert error <= 1e-10 * w.grad.abs().max() + 1e-13 * largest, f"gradient of {name}: {error:.1e}"


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_equals_the_formula(kind):
    compare_with_formula(kind)


def test_a_sequence_shorter_than_its_depths_has_no_labels_ahead():
    tokens = np.arange(3)[:, None]
    ahead = streams.read_ahead({"tokens": tokens, "labels": tokens}, 2, False)
    assert len(ahead) == 4 and all(np.array_equal(rows, -np.ones((3, 1))) for rows in ahead.values())


def shifted(change):
    """`read_ahead` as another author might have written it."""
    return lambda sequences, depth, apart: change(streams.read_ahead(sequences, depth, apart), sequences, depth)


def label_of_the_next_token(ahead, sequences, depth):
    return ahead | {f"labels_ahead_{k}": np.where(ahead[f"labels_ahead_{k}"] < 0, -1, sequences["labels"])
                   for k in range(1, depth + 1)}  # fmt: skip


def embedding_of_the_token_itself(ahead, sequences, depth):
    return ahead | {f"tokens_ahead_{k}": np.where(ahead[f"tokens_ahead_{k}"] < 0, -1, sequences["tokens"])
                   for k in range(1, depth + 1)}  # fmt: skip


def beyond_the_document(ahead, sequences, depth):
    return streams.read_ahead(sequences, depth, False)


def the_sequence_goes_around(ahead, sequences, depth):
    return ahead | {f"{n}_ahead_{k}": np.roll(sequences[n], -k, 1) for n in ("tokens", "labels")
                   for k in range(1, depth + 1)}  # fmt: skip


WRONG = [label_of_the_next_token, embedding_of_the_token_itself, beyond_the_document, the_sequence_goes_around]


@pytest.mark.parametrize("change", WRONG, ids=lambda f: f.__name__)
def test_negative_control_another_shift(change, monkeypatch):
    """Labels shifted by one wrong, the embedding of the wrong token, a border of documents ignored: not the formula."""
    monkeypatch.setattr(stage_passes, "read_ahead", shifted(change))
    with pytest.raises(AssertionError):
        compare_with_formula("documents")


def test_negative_control_a_mean_over_rows_that_do_not_count(monkeypatch):
    """The divisor is that of the head's loss: a module's weighs less than it should."""
    count = stage_passes.StagePasses.count_labels_ahead
    monkeypatch.setattr(stage_passes.StagePasses, "count_labels_ahead", lambda *of: [8 * 4 for _ in count(*of)])
    with pytest.raises(AssertionError):
        compare_with_formula("documents")


def test_negative_control_an_embedding_whose_last_stage_is_not_asked(monkeypatch):
    """The first stage embeds tokens, the last one those further on: where their gradients are not added, it fails."""
    c = configure(pipeline="1f1b", stages=2, microbatch=2, **LLAMA)
    plan = make_plan(c)
    assert plan.stages_of["embedding"] == (0, 1) and plan.stages_of["head"] == (1,)
    monkeypatch.setattr("platform.train.trainer.sum_tied_gradients", lambda *_: None)
    with pytest.raises(AssertionError, match="gradient of embedding|replicas of embedding"):
        compare(c, *run(c), serial(c))


def test_modules_are_placed_by_cost():
    """A stage with a module and two heads has fewer layers; the module is a unit of its own."""
    sizes = {"layers": 6, "vocab": 512, "pipeline": "1f1b", "stages": 2, "microbatch": 2}
    plans = [make_plan(configure(**{**LLAMA, **sizes, "predict_ahead": n})) for n in (0, 1, 2)]
    assert [len(plan.chunks[0].units) for plan in plans] == [5, 7, 8]
    assert [plan.chunks[1].units[-2:] for plan in plans[1:]] == [("layers.6", "head"), ("layers.7", "head")]
    assert [name for name, _ in plans[2].chunks[1].receives] == ["stream", "layers.6"]


TUNED = {"kind": "lora", "rank": 3, "alpha": 8.0, "targets": ["attention.*", "mlp.*", "merge_*"]}
EVERYWHERE = {**TUNED, "targets": ["*"]}
TUNED_PLANS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "1d_sp, zero 3": ("latents and experts", TUNED, {"tensor": "1d_sp", "axes": {"t": 2}, "data": 2, "zero": 3}),
    "stages": ("documents", EVERYWHERE, {"pipeline": "zb_h1", "stages": 2, "microbatch": 2}),
    "stages, head everywhere": ("latents and experts", EVERYWHERE,
                                {"pipeline": "1f1b", "stages": 2, "microbatch": 2, "data": 2, "zero": 1}),
    "3d": ("two tokens, tied", TUNED, {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 2}}),
    "dropout": ("two tokens, tied", {**TUNED, "dropout": 0.25}, {"data": 2, "zero": 3, "recompute": "full"}),
    "contexts": ("documents", TUNED, {"context": 2, "data": 2, "zero": 3}),
    "4 bits": ("two tokens, tied", {**TUNED, "kind": "qlora"},
               {"pipeline": "1f1b", "stages": 2, "microbatch": 2, "data": 2, "zero": 3, "d_model": 64, "d_ff": 128}),
}  # fmt: skip
DRAWN = "1d_sp, zero 3", "stages"


@pytest.mark.parametrize("name", [n if n in DRAWN else pytest.param(n, marks=pytest.mark.full) for n in TUNED_PLANS])
def test_adapters_of_modules_equal_one_process(name, started):  # noqa: F811
    """Of their layers, of what merges their halves, and of tables that the modules use too."""
    kind, tune, how = TUNED_PLANS[name]
    plan, results = prove(test_adapters.tuned("llama", tune, **{**KINDS[kind], **how}))
    assert not find_unsoundness(plan)
    depth = KINDS[kind]["predict_ahead"]
    assert sum("merge_" in weight for weight in plan.adapters) == 2 * depth
    assert tune is not EVERYWHERE or {"head", "embedding"} <= plan.adapters.keys()
    assert all(g.any() for r in results for n, g in r.gradients.items() if g.numel() and "expert" not in n)


def test_negative_control_an_adapter_at_one_use_of_the_head_alone(monkeypatch, started):  # noqa: F811
    """As where an adapter is of a module's head and the model's own does without it."""
    c = test_adapters.tuned("llama", {**TUNED, "targets": ["head"]}, **LLAMA)
    expected, real = serial(c), adapted._multiply_adapters
    monkeypatch.setattr(adapted, "_multiply_adapters", lambda *of: real(*of) if of[-1] else [None] * len(of[3]))
    with pytest.raises(AssertionError):
        compare(c, *run(c), expected)


METERED = {"serial": ("serial", {}), "1d_sp": ("1d_sp", {"t": 2}), "3d": ("3d", {"x": 1, "y": 2, "z": 2})}


@pytest.mark.parametrize("kind", ["two tokens, tied", "latents and experts", "slots"])
@pytest.mark.parametrize("scheme", METERED)
def test_what_is_kept_for_the_backward_pass_is_metered(scheme, kind, monkeypatch):
    more = {"capacity_factor": 4.0} if "experts" in KINDS[kind] else {}
    monkeypatch.setitem(test_memory.MODELS, "ahead", {**KINDS[kind], **more})
    test_memory.test_saved_for_backward((*METERED[scheme], "ahead"))
    test_memory.test_bytes_in_16_bits(*METERED[scheme], "ahead")

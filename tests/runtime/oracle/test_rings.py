"""Keys and values that go around the ranks of a context, under every scheme, against one process in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from platform.launch import compose_config
from platform.model import build_model
from platform.plan.plan_check import find_unsoundness
from platform.plan.scheme import NESTED as KINDS_OF_NESTED
from platform.plan.step_collectives import communication
from platform.predict.footprint import count_saved_elements
from platform.predict.make_plan import make_plan
from platform.runtime import panels
from tests.harness.card import alone, shrunk
from tests.harness.oracle import MODELS, configure, prove
from tests.harness.plan_mutants import with_operations
from tests.harness.suite import suite
from tests.runtime.test_memory import measured

NESTED = {"context": 4, "context_kind": "nested_ring", "context_heads": 2}
# name -> (attentions that go around, how the model is trained)
RINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (2, {"context": 4, **MODELS["llama"]}),
    "t5": (6, {"context": 2, **MODELS["t5"]}),
    "bert": (2, {"context": 3, "length": 15, **MODELS["bert"]}),
    "gpt_oss, zero 3": (2, {"context": 2, "data": 2, "zero": 3, "microbatch": 2, **MODELS["gpt_oss"]}),
    "modern, 1d_sp": (2, {"context": 2, "tensor": "1d_sp", "axes": {"t": 2}, **MODELS["modern"]}),
    "shared keys, 1d": (2, {"context": 2, "tensor": "1d", "axes": {"t": 2}, **MODELS["llama"], "kv_heads": 1}),
    "latent, 1f1b": (2, {"context": 2, "pipeline": "1f1b", "stages": 2, "microbatch": 2, **MODELS["latent"]}),
    "documents, dsp": (1, {"context": 2, "branch": "dsp", "branch_axes": {"g": 2}, **MODELS["packed_gpt"]}),
    "straight": (2, {"context": 4}),
    "pieces, gpt_oss": (2, {"context": 4, "context_pieces": 4, **MODELS["gpt_oss"]}),
    "selective": (2, {"context": 3, "length": 15, "recompute": "selective"}),
    "nested, llama": (2, {**NESTED, **MODELS["llama"]}),
    "nested, gpt_oss": (2, {**NESTED, **MODELS["gpt_oss"], "recompute": "full"}),
    "pieces, nested, documents": (1, {**NESTED, "context_pieces": 4, **MODELS["packed_gpt"]}),
    "nested, documents, zero 3": (1, {**NESTED, "data": 2, "zero": 3, "microbatch": 2, **MODELS["packed_gpt"]}),
    "dropout": (0, {"context": 2, "dropout": 0.2}),  # whose masks are drawn where keys are gathered
}
CASES = [{"ring": name} for name in RINGS]


def configured(name: str):
    c = configure(**{"context_kind": "ring", **RINGS[name][1]})
    c.parallel.context_balance = name != "straight"
    return c


@suite("rings", CASES, CASES)
def test_equals_one_process(case):
    plan, _ = prove(configured(case["ring"]))
    assert sum(kind == "ring_attention" for kind, _ in plan.operations) == RINGS[case["ring"]][0]
    assert find_unsoundness(plan) == []
    assert plan.scheme.zigzag == ("" if case["ring"] == "straight" or plan.sizes["length"] % 2 else "context")
    assert plan.scheme.rounds == (2 if case["ring"].startswith("pieces") else 1)


@pytest.mark.parametrize("name", ["llama", "latent, 1f1b", "modern, 1d_sp"])
def test_what_is_kept_is_what_the_plan_says(name):
    c = configured(name)
    c.pipeline.kind, c.pipeline.stages = "none", 1
    plan, saved = measured(c)
    assert set(saved) == {count_saved_elements(plan, build_model(c.model)).total_elements}


def test_bytes():
    """Two layers' keys and values, [16 4 32] in fp64 of two microbatches: all of them go n - 1 times around, and once
    more, and so do their gradients."""
    for n in (2, 4):
        nbytes = communication(make_plan(configure(context=n, context_kind="ring")))
        assert nbytes["rotate/context"] == 3 * (n - 1) * 2 * 2 * 2 * (16 * 4 * 32 * 8)
        assert set(nbytes) == {"rotate/context", "all_reduce/context"}


def test_negative_control_keys_of_another_rank(monkeypatch):
    """Of two ranks that pass on their heads, each takes the other's keys for its own."""
    in_turn = panels._iterate_panels
    monkeypatch.setattr(
        panels, "_iterate_panels", lambda *arguments: ((1 - i, k, v) for i, k, v in in_turn(*arguments))
    )
    with pytest.raises(AssertionError):
        prove(configured("nested, llama"))


def test_bytes_between_nodes():
    """Of two ranks that exchange heads, each passes its heads on: together as many bytes as a ring of two."""
    gathered, around = (communication(make_plan(configure(**{**NESTED, "context_kind": k}))) for k in KINDS_OF_NESTED)
    assert around["rotate/context"] == 3 * 2 * 2 * 2 * (16 * 4 * 32 * 8)
    assert gathered.pop("all_to_all/exchange") == around.pop("all_to_all/exchange")
    assert around["rotate/context"] * 2 == 3 * (gathered["all_gather/context"] + gathered["reduce_scatter/context"])


def test_a_rotation_that_is_missing_is_seen():
    plan = make_plan(configured("llama"))
    less = with_operations(plan, "ring_attention", "*", lambda o: replace(o, collectives=o.collectives[1:]))
    assert any("rotate" in line for line in find_unsoundness(less))


@pytest.mark.parametrize(("kernel", "documents"), [("auto", False), ("math", False), ("auto", True)])
def test_on_a_card_a_step_reads_its_device_once(kernel, documents):
    """Messages in one operation of the group, and CUDA's kernels, which take what they are given. Where documents begin
    is read on the host."""
    c = shrunk(compose_config(["+experiment=gpt_quick", "parallel.data=1", "tensor=serial", "precision=bf16"]))
    c.data.document_mask = c.model.within_documents = documents
    c.parallel.context, c.parallel.context_kind, c.train.attention_kernel = 2, "ring", kernel
    reads: list[int] = []
    with alone(c, 1, reads) as trainer:
        trainer.step(1)
    assert reads == [2] and any(kind == "ring_attention" for kind, _ in trainer.plan.operations)

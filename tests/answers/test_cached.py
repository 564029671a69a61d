"""What is written through a cache is what uncached forward passes give: every scheme, pipeline and kind of model."""

from __future__ import annotations

from functools import cache
from math import prod

import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.plan.operations.attention import RememberOp
from platform.predict.make_plan import make_plan
from platform.train.generator import PaddedTexts
from platform.train.replies import Choice
from tests.answers.cached import logits_seen, say, some_texts, uncached, whole_weights
from tests.harness.oracle import MODELS, configure
from tests.harness.pairwise import cover, product
from tests.harness.suite import suite
from tests.runtime.oracle.test_delta_rule import NEXT
from tests.runtime.oracle.test_words import WORDS

TOKENS = 6
LAYOUT = {"batch": ["rows"], "heads": ["cols"], "d_ff": ["cols"], "vocab": ["cols"]}
SEQUENCE = {"length": ["rows"], "heads": ["cols"], "d_ff": ["cols"], "vocab": ["cols"]}
MEMORY = {"length": ["rows"], "memory_length": ["cols"], "d_ff": ["cols"]}
SCHEMES = {
    "serial": ("serial", {}, None),
    "1d": ("1d", {"t": 2}, None),
    "1d t4": ("1d", {"t": 4}, None),
    "1d_sp": ("1d_sp", {"t": 2}, None),
    "1d_sp t4": ("1d_sp", {"t": 4}, None),
    "2d": ("2d", {"r": 2, "c": 2}, None),
    "2d_gather": ("2d_gather", {"r": 2, "c": 2}, None),
    "2p5d": ("2p5d", {"d": 2, "r": 1, "c": 2}, None),
    "3d": ("3d", {"x": 1, "y": 2, "z": 2}, None),
    "3d 2,2,2": ("3d", {"x": 2, "y": 2, "z": 2}, None),
    "3d_literal": ("3d_literal", {"x": 2, "y": 1, "z": 2}, None),
    "mesh_tf_data": ("mesh_tf_data", {"all": 2}, None),
    "mesh_tf_model": ("mesh_tf_model", {"all": 2}, None),
    "mesh_tf_2d": ("mesh_tf_2d", {"rows": 2, "cols": 2}, None),
    "mesh_tf_3d": ("mesh_tf_3d", {"rows": 1, "cols": 2, "planes": 2}, None),
    "mesh_tf_empty": ("mesh_tf_empty", {"all": 2}, None),
    "layout": ("layout", {"rows": 2, "cols": 2}, LAYOUT),
    "layout sequence": ("layout", {"rows": 2, "cols": 2}, SEQUENCE),
    "layout memory": ("layout", {"rows": 2, "cols": 2}, MEMORY),
}
OTHERS = {
    "gpt": {},
    "gpt_untied": {"tied": False, "vocab": 64},
    "llama": MODELS["llama"],
    "modern": MODELS["modern"],
    "latent": MODELS["latent"],
    "gemma": {**MODELS["llama"], **WORDS["around a layer"], "d_kv": 8, "rope_share": 0.5},
    "soft caps": {**MODELS["llama"], **WORDS["soft caps"]},
    "other heads": {**MODELS["llama"], **WORDS["other heads see all"]},
    "side by side": {**MODELS["llama"], "parallel_residual": True, "no_rope_layers": [1]},
    "sinusoidal": {"positions": "sinusoidal", "window": 4, "attention_sinks": True, "tied": False},
    "t5": {**MODELS["t5"], "tied": False},
    "original": {**MODELS["original"], "tied": False},
    "learned_pair": {"kind": "encoder_decoder", "tied": False},
}
SMALL = {"layers": 2, "length": 32}
FACTORS = {
    "model": list(OTHERS),
    "scheme": list(SCHEMES),
    "branch": ["none", "dsp", "dsp_slice", "dsp_csub"],
    "data": [1, 2],
    "zero": [0, 1, 3],
    "pipeline": [("none", 1, 1), ("1f1b", 2, 1), ("interleaved", 2, 2)],
}


def build(case):
    tensor, axes, rules = SCHEMES[case["scheme"]]
    kind, stages, chunks = case["pipeline"]
    return configure(
        tensor,
        axes,
        rules=rules,
        branch=case["branch"],
        branch_axes={} if case["branch"] == "none" else {"g": 2},
        data=case["data"],
        zero=case["zero"],
        microbatch=8,
        global_batch=16,
        pipeline=kind,
        stages=stages,
        chunks=chunks,
        **{**OTHERS[case["model"]], **SMALL},
    )


@cache
def plannable(scheme: str, branch: str, pipeline: tuple) -> bool:
    shared = {"scheme": scheme, "branch": branch, "pipeline": pipeline, "data": 1, "zero": 0, "model": "gpt"}
    try:
        make_plan(build(shared))
    except ConfigError:
        return False
    return True


def ranks(case) -> int:
    g = 1 if case["branch"] == "none" else 2
    return prod(SCHEMES[case["scheme"]][1].values()) * g * case["data"] * case["pipeline"][1]


def legal(case) -> bool:
    if ranks(case) > 8:
        return False
    if case["zero"] and (case["data"] == 1 or case["branch"] == "dsp_csub"):
        return False
    return plannable(case["scheme"], case["branch"], case["pipeline"])


CASES = product(FACTORS, legal)
PLAIN = {  # whose words are those of the others, too
    "model": ["modern", "t5"],
    "scheme": ["1d_sp", "3d"],
    "branch": ["none", "dsp"],
    "zero": [0, 3],
}
COVER = cover(CASES, plain=PLAIN, cost=lambda case: ranks(case) ** 0.5)


@suite("cached generation (threads)", CASES, COVER)
def test_equals_uncached(case):
    examine(build(case))


_written: dict[str, tuple] = {}


def expected(c, texts):
    """What one process writes without a cache, its logits [texts, vocab] before each token, and the scores."""
    key = repr((c.model, texts))
    if key not in _written and (c.model.kv_latent or c.model.activation == "swiglu_clamped"):
        one = configure(precision=c.precision)  # which plain functions do not know: one process with a cache
        one.model, one.seed = c.model, c.seed
        (said,) = say(one, texts, TOKENS, Choice(c.model.vocab))
        scores = [s.log_probability for s in said.scored]
        _written[key] = [w.ids for w in said.written], torch.stack(logits_seen([said], len(texts.ids))), scores
    if key not in _written:
        w, rows, seen, scores = whole_weights(c), [], [], []
        for number, ids in enumerate(texts.ids):
            source = texts.sources[number] if texts.sources else []
            now, logits = list(ids), []
            for _ in range(TOKENS):
                logits.append(uncached(c, w, now, source)[-1])
                now.append(int(logits[-1].argmax()))
            rows.append(now[len(ids) :])
            seen.append(torch.stack(logits))
            scores.append(sum(float(x.log_softmax(-1)[i]) for x, i in zip(logits, rows[-1], strict=True)))
        _written[key] = rows, torch.stack(seen, 1), scores
    return _written[key]


def examine(c):
    """Every rank has the tokens of uncached passes, and the logits are theirs to 1e-10."""
    texts = some_texts(c)
    rows, logits, scores = expected(c, texts)
    assert c.model.tied or len({i for row in rows for i in row}) > 3, "the weights make the likeliest token change"
    said = say(c, texts, TOKENS, Choice(c.model.vocab))
    for i, actual in enumerate(logits_seen(said, len(texts.ids))):
        error = (actual - logits[i]).abs().max() / logits[i].abs().max()
        assert error <= 1e-10, f"logits before token {i}: {error:.1e}"
    for s in said:
        assert [w.ids for w in s.written] == rows
        for actual, want in zip(s.scored, scores, strict=True):
            assert abs(actual.log_probability - want) <= 1e-9 * abs(want) + 1e-9 and actual.greedy


OF_DELTA_RULES = {
    "alone": {},
    "1d_sp, stages": {"tensor": "1d_sp", "axes": {"t": 2}, "pipeline": "1f1b", "stages": 2},
    "2d, zero": {"tensor": "2d", "axes": {"r": 1, "c": 2}, "data": 2, "zero": 3},
    "context": {"context": 2},
}


@pytest.mark.parametrize("name", OF_DELTA_RULES)
def test_delta_rules_go_on_from_their_states(name):
    examine(configure(microbatch=8, global_batch=16, **{**NEXT, **SMALL}, **OF_DELTA_RULES[name]))


OF_EXPERTS = {
    "alone": {},
    "shared": {"data": 2, "experts_of": 2},
    "shared, 1d_sp": {"tensor": "1d_sp", "axes": {"t": 2}, "data": 2, "experts_of": 2},
    "shared, stages, zero": {"pipeline": "1f1b", "stages": 2, "data": 4, "experts_of": 2, "zero": 3},
    "shared, biased": {"data": 2, "experts_of": 2, "router_bias": True, "router": "sigmoid", "balance_over": "batch"},
}


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_experts_drop_no_token_of_an_answer(name):
    """Whatever the capacity in training: a pass has as many slots as tokens."""
    sizes = {"microbatch": 8, "global_batch": 16, **MODELS["experts"], **SMALL, "capacity_factor": 0.25, "tied": False}
    examine(configure(**sizes, **OF_EXPERTS[name]))


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_experts_without_a_capacity_answer(name):
    sizes = {"microbatch": 8, "global_batch": 16, **MODELS["experts"], **SMALL, "capacity_factor": 0.0, "tied": False}
    examine(configure(**sizes, **OF_EXPERTS[name]))


def test_experts_of_both_stacks_drop_none_either():
    sizes = {
        **MODELS["t5"],
        "microbatch": 8,
        "global_batch": 16,
        **MODELS["experts"],
        "capacity_factor": 0.25,
        "activation": "gelu",
    }
    examine(configure("1d_sp", {"t": 2}, data=2, experts_of=2, **{**sizes, **SMALL, "tied": False}))


def test_negative_control_padding_is_seen(monkeypatch):
    """If attention sees the padding in front of short texts, the oracle must fail."""
    seen = lambda batch, tokens, offset: {**data(batch, tokens, offset), "begins": torch.zeros_like(tokens)}  # noqa: E731
    data = PaddedTexts.build_data
    monkeypatch.setattr(PaddedTexts, "build_data", seen)
    with pytest.raises(AssertionError, match="logits before token 0"):
        examine(configure(**OTHERS["gpt_untied"], **SMALL))


def test_negative_control_a_pass_is_forgotten(monkeypatch):
    """If a pass leaves nothing in the cache, the next one must give other logits."""

    def remember(self, ops, name, k, v, *types):
        return whole(self, ops, name, k * (ops.offset != 16), v, *types)

    whole = RememberOp.run_on_blocks
    monkeypatch.setattr(RememberOp, "run_on_blocks", remember)
    with pytest.raises(AssertionError, match="logits before token"):
        examine(configure("1d", {"t": 2}, **OTHERS["llama"], **SMALL))

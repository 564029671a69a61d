"""Inputs of products that are made again for the gradients of weights, not kept: norms and functions of elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from platform.model import build_model, forget_models
from platform.plan import operation_plan
from platform.predict.footprint import count_saved_elements
from platform.predict.make_plan import make_plan
from platform.runtime import recompute
from tests.harness.oracle import MODELS, configure, prove, serial
from tests.runtime.test_memory import measured

SP = {"tensor": "1d_sp", "axes": {"t": 2}}
EXPERTS = {"data": 2, "experts_of": 2}
CASES: dict[str, dict[str, Any]] = {
    "llama serial": {},
    "llama 1d": {"tensor": "1d", "axes": {"t": 2}},
    "llama 1d_sp keep": {**SP, "gathered": "keep"},
    "llama 1d_sp again": {**SP, "gathered": "again"},
    "llama 2d": {"tensor": "2d", "axes": {"r": 2, "c": 2}},
    "modern 2d_gather again": {"tensor": "2d_gather", "axes": {"r": 2, "c": 2}, "gathered": "again"},
    "llama 3d again": {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 1}, "gathered": "again"},
    "gpt 1d": {"tensor": "1d", "axes": {"t": 2}, "dropout": 0.1},
    "bert 1d_sp again": {**SP, "gathered": "again"},
    "t5 1d": {"tensor": "1d", "axes": {"t": 2}},
    "latent 1d_sp again": {**SP, "gathered": "again"},
    "gpt_oss 1d_sp again": {**SP, **EXPERTS, "gathered": "again"},
    "experts 1d": {"tensor": "1d", "axes": {"t": 2}, **EXPERTS},
    "bert serial": {"data": 2, "zero": 3},
    "llama chunks": {"mlp_chunks": 2},
    "llama recomputed": {"recompute": "selective"},
}
KEEPS_ALL = {"llama 2d"}  # whose operands come in panels


@pytest.fixture
def rebuild(monkeypatch):
    """Function after which plans make inputs again, of models from a `width` on."""

    def set_least_width(width: int = 0) -> None:
        forget_models()  # of which recordings say what is made again
        monkeypatch.setattr(operation_plan, "REBUILT_FROM", width)

    yield set_least_width
    forget_models()


@pytest.fixture
def prove_rebuilt(rebuild):
    """Function that proves a configuration against one process that keeps its inputs."""

    def run_both(c):
        serial(c)
        rebuild()
        return prove(c)

    return run_both


def config_of(case: str):
    return configure(**{**MODELS[case.split()[0]], **CASES[case]})


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(case, prove_rebuilt):
    """Gradients and bytes of those that keep the inputs."""
    plan, _ = prove_rebuilt(config_of(case))
    rebuilt = any(o.rebuilds_input(group) for o in plan.operations.values() for group in o.groups)
    assert rebuilt == (case not in KEEPS_ALL)


@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_is_what_the_plan_says(case, rebuild):
    c, kept = config_of(case), []
    for width in (0, 1000):
        rebuild(width)
        plan, saved = measured(c)
        kept.append(max(saved))
        if "gpt_oss" not in case:  # whose rows are as routed
            assert set(saved) == {count_saved_elements(plan, build_model(c.model), c.model.dropout).total_elements}
    assert kept[0] <= kept[1] and (kept[0] < kept[1]) == (case not in KEEPS_ALL)


@pytest.mark.parametrize("stages", ["1f1b", "zb_h1", "interleaved"])
@pytest.mark.parametrize("model", ["bert", "llama"])
def test_stages(model, stages, prove_rebuilt):
    """Also where a norm comes from the stage before, and where weight gradients come later than those of inputs."""
    more = {"chunks": 2} if stages == "interleaved" else {}
    prove_rebuilt(configure(pipeline=stages, stages=2, microbatch=2, **{**MODELS[model], "layers": 4}, **more))


def test_no_block_that_is_computed_again(rebuild):
    """There only one is in memory at a time."""
    rebuild()
    plan = make_plan(configure(recompute="full", **MODELS["llama"]))
    assert not any("made_by" in dict(o.operation.attributes) for o in plan.operations.values())


def test_narrow_models_keep_all():
    plan = make_plan(configure(**MODELS["llama"]))
    assert not any("made_by" in dict(o.operation.attributes) for o in plan.operations.values())


def test_negative_control_another_value_is_seen(monkeypatch, prove_rebuilt):
    find = recompute.find_rebuild
    wrong = lambda x: (r := find(x)) and r._replace(compute=lambda *a, f=r.compute: 1.001 * f(*a))  # noqa: E731
    monkeypatch.setattr(recompute, "find_rebuild", wrong)
    with pytest.raises(AssertionError, match="gradient of layers"):
        prove_rebuilt(config_of("llama 1d"))


def test_nothing_is_noted_without_gradients():
    with torch.no_grad():
        assert recompute.find_rebuild(recompute.note_rebuild(torch.ones(2), torch.exp, torch.zeros(2))) is None

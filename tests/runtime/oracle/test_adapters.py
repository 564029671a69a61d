"""Adapters under every plan: equal to one process, to PEFT's rule, and bytes as planned."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from platform.model import build_model, tuning
from platform.plan import adapters
from platform.plan.plan_check import find_unsoundness
from platform.predict.footprint import count_saved_elements
from platform.predict.make_plan import make_plan
from platform.train import rank_parameters
from tests.harness.held import check_stages
from tests.harness.oracle import MODELS, compare, configure, prove, run, serial, trainer_of
from tests.harness.threads import run_threads
from tests.runtime.test_memory import measured

full = pytest.mark.full
TUNE = {"kind": "lora", "rank": 4, "alpha": 8.0}
PLANS: dict[str, dict[str, Any]] = {
    "1d": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "zero": 1},
    "1d_sp": {"tensor": "1d_sp", "axes": {"t": 2}, "data": 2, "zero": 2},
    "2d": {"tensor": "2d", "axes": {"r": 2, "c": 2}},
    "2d_gather": {"tensor": "2d_gather", "axes": {"r": 2, "c": 2}},
    "2p5d": {"tensor": "2p5d", "axes": {"d": 2, "r": 2, "c": 2}},
    "3d_literal": {"tensor": "3d_literal", "axes": {"x": 2, "y": 2, "z": 2}},
    "3d": {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 2}},
    "3d, zero 3": {"tensor": "3d", "axes": {"x": 2, "z": 2}, "data": 2, "zero": 3},
    "contexts": {"context": 2, "data": 2, "zero": 3},
    "stages": {"pipeline": "zb_h1", "stages": 2, "microbatch": 2},
    "interleaved": {"pipeline": "interleaved", "stages": 2, "chunks": 2, "microbatch": 2, "layers": 4},
    "recomputed": {"tensor": "1d_sp", "axes": {"t": 2}, "recompute": "full", "mlp_chunks": 2},
    "gathered again": {"tensor": "3d", "axes": {"y": 2, "z": 2}, "gathered": "again"},
}
FEW = ("1d_sp", "2d", "3d, zero 3", "stages")


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """Adapters whose `up` is not 0 at first, as `down` would have no gradient."""

    def build(*arguments):
        built = adapters.build_adapters(*arguments)
        return {n: replace(a, up=replace(a.up, init="uniform", std=0.05)) for n, a in built.items()}

    monkeypatch.setattr(tuning, "build_adapters", build)


def tuned(model: str = "llama", tune: dict[str, Any] = TUNE, **how: Any):
    c = configure(**{**MODELS[model], **how})
    for key, value in tune.items():
        setattr(c.tune, key, value)
    return c


@pytest.mark.parametrize(
    "model",
    ["llama", pytest.param("gpt", marks=full), pytest.param("latent", marks=full), pytest.param("t5", marks=full)],
)
@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=full) for name in PLANS])
def test_equal_to_one_process(name, model):
    if model == "t5" and "context" in PLANS[name]:
        pytest.skip("no contexts of encoders")
    plan, results = prove(tuned(model, **PLANS[name]))
    assert not find_unsoundness(plan)
    check_stages(plan)
    of_adapters = {p.name for p in adapters.list_adapter_parameters(plan.adapters)}
    assert {p.name for p in plan.parameters} == of_adapters | plan.frozen
    assert all(g.any() for r in results for n, g in r.gradients.items() if g.numel())


@pytest.mark.parametrize("tune", [TUNE, {}])
def test_a_router_s_bias_stays_as_the_base_does(tune):
    """Exports merge with the base, and PEFT's adapters have no place for it: it changes in whole training alone."""
    c = tuned("experts", tune, balance_loss=0.0, **PLANS["1d"])
    c.model.router_bias, c.model.balance_rate = True, 0.1
    plan = make_plan(c)

    def biases(communicator):
        trainer = trainer_of(c, plan, communicator)
        trainer.step(1)
        return [x.clone() for x in trainer.weights.states.values()]

    changed = [bool(x.any()) for of_rank in run_threads(plan.mesh, biases) for x in of_rank]
    assert changed == [not tune] * len(changed) and changed


EVERYWHERE = {**TUNE, "targets": ["*"]}
EXPERTS = {"experts": 4, "expert_d_ff": 24, "shared_experts": 1, "capacity_factor": 4.0, "balance_loss": 0.3}
SPECIAL: dict[str, dict[str, Any]] = {
    "head and embedding": {"tensor": "1d_sp", "axes": {"t": 2}, "data": 2, "zero": 3, "tune": EVERYWHERE},
    "head and embedding, 3d": {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 2}, "tune": EVERYWHERE, "vocab": 64},
    "head by SUMMA": {"tensor": "2d", "axes": {"r": 2, "c": 2}, "tune": EVERYWHERE, "vocab": 64},
    "uneven": {"tensor": "1d", "axes": {"t": 3}, "uneven": True, "tune": EVERYWHERE},
    "rsLoRA": {"tensor": "1d", "axes": {"t": 2}, "tune": {**TUNE, "rslora": True, "rank": 3}},
    "dropout": {"tensor": "1d_sp", "axes": {"t": 2}, "data": 2, "tune": {**TUNE, "dropout": 0.25}, "recompute": "full"},
    "experts": {"data": 2, "experts_of": 2, "zero": 1, "tune": EVERYWHERE, **EXPERTS},
    "experts, 1d": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "experts_of": 2, "tune": EVERYWHERE, **EXPERTS},
    "rows of experts": {"data": 2, "experts_of": 2, "tune": EVERYWHERE, **EXPERTS, "capacity_factor": 0.0},
    "muon": {"tensor": "1d", "axes": {"t": 2}, "optimizer": "muon"},
    "branches": {"branch": "dsp", "branch_axes": {"g": 2}, "tensor": "1d", "axes": {"t": 2}},
}


DRAWN = "head and embedding", "dropout", "rows of experts", "experts, 1d"


@pytest.mark.parametrize(
    "name",
    [n if n in DRAWN else pytest.param(n, marks=full) for n in SPECIAL],
)
def test_special_ones_too(name):
    how = {**SPECIAL[name]}
    tune, uneven, optimizer = how.pop("tune", TUNE), how.pop("uneven", False), how.pop("optimizer", "adamw")
    c = tuned("llama", tune, **how)
    c.tensor.uneven, c.optimizer.kind = uneven, optimizer
    plan, results = prove(c)
    assert not find_unsoundness(plan)
    assert all(g.any() for r in results for n, g in r.gradients.items() if g.numel() and "expert" not in n)
    adapted = {name.rpartition(".")[2] for name in plan.adapters}
    assert tune is not EVERYWHERE or {"embedding", "head", "query", "down"} <= adapted


def test_masks_of_crossing_layers_are_each_layers_own():
    """However many layers of a stage have their keys and values of the encoder's output in one group."""
    tune = {**TUNE, "targets": ["cross.*"], "dropout": 0.25}
    prove(tuned("t5", tune, pipeline="interleaved", stages=2, chunks=3, microbatch=2, layers=2))


@pytest.mark.parametrize(
    "scheme", [("serial", {}), ("1d_sp", {"t": 2}), pytest.param(("3d", {"x": 2, "z": 2}), marks=full)], ids=str
)
@pytest.mark.parametrize("targets", [TUNE, pytest.param(EVERYWHERE, marks=full)], ids=["usual", "all"])
def test_what_is_kept_is_what_is_planned(scheme, targets):
    c = tuned("llama", targets, tensor=scheme[0], axes=scheme[1])
    plan, saved = measured(c)
    assert set(saved) == {count_saved_elements(plan, build_model(c.model)).total_elements}


def test_a_new_adapter_changes_nothing(monkeypatch):
    monkeypatch.setattr(tuning, "build_adapters", adapters.build_adapters)
    (plain,), (adapted,) = (run(c)[1] for c in (configure(**MODELS["llama"]), tuned(tune=EVERYWHERE)))
    assert adapted.loss == plain.loss
    for name, g in adapted.gradients.items():
        assert bool(g.any()) == name.endswith("lora_b"), name


def test_a_block_on_another_rank_is_found(monkeypatch):
    """The negative control: the two ranks' blocks of one `up` exchanged."""
    c = tuned(tensor="1d", axes={"t": 2})
    plan = make_plan(c)
    real = rank_parameters.initialise

    def exchange(plan, communicator, p, *more):
        at = communicator.coordinates
        other = {**at, "t": 1 - at["t"]} if p.name == "layers.1.attention.query.lora_b" else at
        real(plan, SimpleNamespace(coordinates=other), p, *more)

    serial(c)
    monkeypatch.setattr(rank_parameters, "initialise", exchange)
    _, results = run(c, plan)
    with pytest.raises(AssertionError, match="initial of layers.1.attention.query.lora_b"):
        compare(c, plan, results, serial(c))
    assert abs(results[0].loss - serial(c).loss) > 1e-6 * serial(c).loss, "and it is another model"

"""Losses of a user's own, and weights of labels, under every kind of plan: equal to one process in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from math import log

import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.config.fields import WEIGHTED
from platform.model.losses import LOSSES
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_peak_bytes
from platform.runtime import chunked_loss
from platform.runtime.chunked_loss import LogitDerivatives
from tests.harness.live import count
from tests.harness.oracle import MODELS, configure, prove, serial, trainer_of
from tests.harness.pairwise import cover, product
from tests.harness.registries import as_before
from tests.harness.suite import suite
from tests.harness.threads import run_threads

OWN = {
    "focal": lambda of: -((1 - of.log_probability.exp()) ** 2) * of.log_probability,
    "z": lambda of: 0.01 * of.log_sum_exp**2 - of.log_probability,
    "smoothed": lambda of: -0.9 * of.log_probability - 0.1 * of.mean_log_probability,
}
PLANS = {
    "1d": ("1d", {"t": 2}, {"data": 2}),
    "1d zero 3": ("1d", {"t": 2}, {"data": 2, "zero": 3}),
    "1d_sp": ("1d_sp", {"t": 4}, {}),
    "2d": ("2d", {"r": 2, "c": 2}, {}),
    "2d_gather": ("2d_gather", {"r": 2, "c": 2}, {"gathered": "again"}),
    "3d": ("3d", {"x": 2, "y": 2, "z": 2}, {}),
    "2p5d": ("2p5d", {"d": 2, "r": 1, "c": 2}, {}),
    "zero 3": ("serial", {}, {"data": 3, "zero": 3, "microbatch": 1}),
    "stages": ("1d", {"t": 2}, {"pipeline": "1f1b", "stages": 2, "microbatch": 2, "scatter_gather": True}),
    "zero bubble": ("3d", {"x": 1, "y": 2, "z": 1}, {"pipeline": "zb_h1", "stages": 2, "microbatch": 2}),
    "branches": ("1d", {"t": 2}, {"branch": "dsp", "branch_axes": {"g": 2}}),
    "common layers on one": ("serial", {}, {"branch": "dsp_csub", "branch_axes": {"g": 2}}),
}
FACTORS = {
    "plan": list(PLANS),
    "loss": ["", *OWN],
    "weighted": [False, True],
    "model": ["gpt", "gpt_untied", "bert", "t5", "modern"],
    "recompute": ["none", "full"],
}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with as_before():
        LOSSES.update(OWN)
        WEIGHTED.add("weighed")
        yield


def build(case, **more):
    tensor, axes, settings = PLANS[case["plan"]]
    c = configure(
        tensor, axes, recompute=case["recompute"], **{"layers": 2, **MODELS[case["model"]], **settings, **more}
    )
    c.train.loss, c.data.objective = case["loss"], "weighed" if case["weighted"] else ""
    return c


def legal(case) -> bool:
    return bool(case["loss"] or case["weighted"])


CASES = product(FACTORS, legal)
PLAIN = {"loss": ["focal"], "weighted": [True], "model": ["gpt", "t5"], "recompute": ["none"]}


@suite("oracle of losses", CASES, cover(CASES, plain=PLAIN))
def test_equals_one_process(case):
    prove(build(case))


CASE = {"plan": "1d", "loss": "focal", "weighted": True, "model": "gpt", "recompute": "none"}


@pytest.mark.parametrize("weighted", ["", "weighed"])
def test_one_process_gives_what_autograd_does(monkeypatch, weighted):
    """The oracle itself: against logits that torch differentiates, and a mean that is taken by hand."""
    totals = []

    def plainly(x, table, bias, targets, coming, classes, *, at_once, deferred):
        logs = (x @ table.t()).flatten(0, -2)[:, : classes.vocab].log_softmax(1)
        label = logs.gather(1, targets.labels.clamp(0).unsqueeze(1)).squeeze(1)
        weights = (targets.labels >= 0) * (1.0 if targets.weights is None else targets.weights)
        losses = -((1 - label.exp()) ** 2) * label * weights
        totals.append((losses.sum().item(), weights.abs().sum().item()))
        return losses.sum()

    c = build({**CASE, "plan": "zero 3", "weighted": bool(weighted)}, data=1, zero=0, microbatch=8)
    wanted = serial(c)
    monkeypatch.setattr(chunked_loss, "linear_cross_entropy", plainly)
    prove(c)
    (total, share), *_ = totals
    assert wanted.loss == pytest.approx(total / share, rel=1e-12)


@pytest.mark.parametrize("forgotten", ["whole", "label", "every", "weights"])
def test_a_wrong_derivative_shows(monkeypatch, forgotten):
    """Negative control: on ranks of a split vocab alone."""
    judged = chunked_loss._compute_token_losses
    c = build({**CASE, "loss": "smoothed"})
    serial(c)

    def wrong(statistics, classes, gradient):
        losses, derivatives = judged(statistics, classes, gradient)
        if classes.over and forgotten != "weights":
            fields = {"whole": derivatives.whole, "label": derivatives.label, "every": derivatives.every}
            derivatives = LogitDerivatives(**{**fields, forgotten: torch.zeros_like(derivatives.label)})
        return losses, derivatives

    monkeypatch.setattr(chunked_loss, "_compute_token_losses", wrong)
    if forgotten == "weights":
        monkeypatch.setattr("platform.train.trainer.compute_loss_divisor", lambda plan, corpus, first, end: 100.0)
    with pytest.raises(AssertionError, match="gradient of"):
        prove(c)


def test_an_evaluation_is_of_cross_entropy():
    """Of the same weights, whatever they are trained by."""
    own = build(CASE)
    plain = build({**CASE, "loss": "", "weighted": False})
    means = []
    for c in (own, plain):
        plan = make_plan(c)
        means.append(
            run_threads(plan.mesh, lambda one, c=c, plan=plan: trainer_of(c, plan, one).compute_mean_loss("v", 6))
        )
    assert means[0] == means[1] and abs(means[0][0] - log(61)) < 0.2


@pytest.mark.full
def test_compiled():
    """With what lies between collectives compiled: norms, gates, rotary turns. The loss itself stays eager."""
    c = build({**CASE, "model": "llama"}, dropout=0.2)
    c.train.compile = "on"
    prove(c)


def test_needed_bytes_hold():
    for name in ("1d", "zero 3", "stages"):
        c = build({**CASE, "plan": name}, length=64, d_model=64)
        plan = make_plan(c)
        peaks = [rank.peak for rank in count(c, plan)]
        assert abs(predict_peak_bytes(c, plan) - max(peaks)) <= 0.05 * max(peaks)


def test_no_place_for_it():
    """A model whose loss is no cross-entropy."""
    c = configure(kind="two_layer", length=1, io=8, hidden=24, vocab=100)
    make_plan(c)
    c.train.loss = "focal"
    with pytest.raises(ConfigError, match="train.loss=focal: model.kind=two_layer ends in squared_error"):
        make_plan(c)
    c.train.loss, c.data.objective = "", "weighed"
    with pytest.raises(ConfigError, match="data.objective=weighed: model.kind=two_layer ends in squared_error"):
        make_plan(c)

"""Losses by what a teacher says, under every kind of plan: loss and gradients equal one process in fp64, and this
equals torch's formulas, which are trl's."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from platform.plan.plan_check import find_unsoundness
from platform.predict.make_plan import make_plan
from platform.runtime import teacher_loss
from platform.runtime.chunked_loss import LossClasses, Targets, cross_entropy
from platform.runtime.communicator import SingleRank
from platform.runtime.teacher_loss import Distillation
from tests.harness.oracle import MODELS, configure, prove, serial
from tests.harness.pairwise import cover, product
from tests.harness.suite import suite
from tests.runtime.oracle.test_preferences import PLANS

FACTORS = {
    "plan": list(PLANS),
    "direction": ["forward", "reverse"],
    "top": [0, 5],
    "temperature": [1.0, 2.5],
    "model": ["packed_gpt", "modern", "experts", "gpt_oss"],
    "recompute": ["none", "full"],
}
CASES = product(FACTORS, lambda case: True)
FEW = [case for case in cover(CASES) if case["plan"] in ("1d_sp", "context 1d", "stages", "uneven", "zero 3")]


def build(case, **more):
    tensor, axes, options = PLANS[case["plan"]]
    model = {**MODELS[case["model"]], "layers": 2}
    uneven, options = options.get("uneven", False), {k: v for k, v in options.items() if k != "uneven"}
    c = configure(tensor, axes, recompute=case["recompute"], **{**model, **options, **more})
    c.tensor.uneven, c.train.loss = uneven, "distill"
    c.train.loss_settings = {"weight": 0.7, **{name: case[name] for name in ("direction", "top", "temperature")}}
    return c


@suite("oracle of distillation", CASES, FEW[:3])
def test_equals_one_process(case):
    c = build(case)
    assert not find_unsoundness(make_plan(c))
    prove(c)


SPLIT = {"plan": "1d", "direction": "reverse", "top": 5, "temperature": 2.5, "model": "packed_gpt", "recompute": "none"}


@pytest.mark.parametrize("spoiled", ["here", "over"])
def test_another_sum_is_found(spoiled, monkeypatch):
    """Controls: classes that each rank takes for its own, and statistics of a rank's own columns alone."""
    c = build(SPLIT)
    assert serial(c).loss
    whole = teacher_loss.measure_divergences

    def spoil(logits, classes, chunks, communicator, columns, with_gradient):
        divergences = whole(logits, classes, chunks, communicator, columns, with_gradient)
        name = {"here": "is_here", "over": "log_sum_exp"}[spoiled]
        value = (
            torch.ones_like(divergences.is_here)
            if spoiled == "here"
            else (logits / divergences.temperature).logsumexp(1)
        )
        object.__setattr__(divergences, name, value)
        return divergences

    monkeypatch.setattr("platform.runtime.chunked_loss.measure_divergences", spoil)
    with pytest.raises(AssertionError):
        prove(c)


ROWS, VOCAB = 12, 9


def formula(logits: Tensor, teacher: Tensor, labels: Tensor, how: Distillation, top: int, cap: float = 0.0) -> Tensor:
    """The loss in plain torch: sums over the labels that count."""
    counts, logits = labels >= 0, cap * torch.tanh(logits / cap) if cap else logits
    model, teacher = (F.log_softmax(x[counts] / how.temperature, -1) for x in (logits, teacher))
    if top < VOCAB:
        ids = teacher.topk(top, -1).indices
        rest = [(1 - x.gather(1, ids).exp().sum(1, keepdim=True)).log() for x in (model, teacher)]
        model, teacher = (torch.cat((x.gather(1, ids), r), 1) for x, r in zip((model, teacher), rest, strict=True))
    pair = (teacher, model) if how.reverse else (model, teacher)
    divergence = F.kl_div(*pair, reduction="sum", log_target=True)
    return how.label * F.cross_entropy(logits, labels, reduction="sum", ignore_index=-1) + how.teacher * divergence


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("top", [1, 4, VOCAB])
@pytest.mark.parametrize(("weights", "cap"), [((0.3, 2.0), 0.0), ((0.3, 2.0), 1.5), ((0.0, 1.0), 0.0)])
def test_the_formula_is_torch_s_and_trl_s(reverse, top, weights, cap):
    draw = torch.Generator().manual_seed(top)
    logits, teacher = (torch.randn(ROWS, VOCAB, generator=draw, dtype=torch.float64) * 2 for _ in range(2))
    labels = torch.randint(-1, VOCAB, (ROWS,), generator=draw)
    how = Distillation(*weights, 2.5, reverse)
    logs, ids = F.log_softmax(teacher / how.temperature, -1).topk(top, -1)
    targets = Targets(labels, classes=torch.cat((ids.double(), logs), 1))
    classes = LossClasses((), 0, VOCAB, teacher=how, cap=cap)
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    actual = cross_entropy(ours, targets, SingleRank(make_plan(configure()).mesh), classes)
    expected = formula(theirs, teacher, labels, how, top, cap)
    actual.backward()
    expected.backward()
    assert torch.allclose(actual, expected, rtol=1e-12)
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-10, atol=1e-13)
    if top == VOCAB and weights == (0.0, 1.0):
        trainer = pytest.importorskip("trl.experimental.gkd", reason="trl comes by the extra of that name").GKDTrainer
        of_trl = partial(trainer.generalized_jsd_loss, beta=float(reverse), temperature=how.temperature)
        shown = torch.where(labels < 0, -100, labels)
        assert torch.allclose(actual, of_trl(logits, teacher, shown) * (labels >= 0).sum(), rtol=1e-12)


def test_where_the_teacher_is_sure_nothing_is_infinite():
    """All its probability is in the classes that are kept, and the rest of both models has none left to divide."""
    teacher = torch.tensor([[0.0, -1e3]], dtype=torch.float32)
    targets = Targets(torch.zeros(1, dtype=torch.int64), classes=torch.cat((torch.tensor([[0.0, 1.0]]), teacher), 1))
    for reverse in (False, True):
        logits = torch.tensor([[90.0, -90.0, -90.0]], requires_grad=True)
        classes = LossClasses((), 0, 3, teacher=Distillation(0.5, 0.5, 1.0, reverse))
        loss = cross_entropy(logits, targets, SingleRank(make_plan(configure()).mesh), classes)
        loss.backward()
        assert loss.isfinite() and logits.grad is not None and logits.grad.isfinite().all()

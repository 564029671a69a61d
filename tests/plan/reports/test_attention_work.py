"""How evenly ranks that share sequences divide attention, as a plan says, counted by their masks."""

from __future__ import annotations

import pytest
import torch

from platform.parallel.kernels.positions import unseen
from platform.plan.language.stretches import Stretch
from platform.plan.reports.attention_work import attention_work, seen_by
from platform.plan.reports.describe import describe
from platform.planning.make_plan import make_plan
from tests.harness.oracle import MODELS, configure

EVEN = 1.02


@pytest.mark.parametrize("window", [0, 1, 3, 9, 40])
def test_keys_that_queries_see(window):
    for first, size in ((0, 5), (4, 7), (9, 1), (0, 16)):
        hidden = unseen(torch.arange(first, first + size), torch.arange(16), window, None)
        assert seen_by(Stretch(first, size), window) == (~hidden).sum()


def busiest(**more) -> float:
    work = attention_work(make_plan(configure(**{"layers": 2, **more})))
    assert len(work) == more["context"]
    return max(work) * len(work) / sum(work)


@pytest.mark.parametrize("kind", ["gather", "ring", "heads"])
@pytest.mark.parametrize("more", [{}, {"window": 64}, {"window": 64, "window_layers": [1]}, MODELS["packed_gpt"]])
def test_equal_work(kind, more):
    """Causal, in windows of much less than a part, and of documents, whose borders are the data's."""
    assert busiest(**{**more, "context": 4, "context_kind": kind, "length": 4096}) <= EVEN


def test_a_wide_window_is_uneven_and_the_plan_says_so():
    """Queries of the first parts see less than a window: what they lack, no later part has to spare."""
    c = configure(context=4, context_kind="ring", length=64, window=16, layers=2)
    assert busiest(context=4, context_kind="ring", length=64, window=16) == pytest.approx(1.13, abs=0.01)
    assert "the busiest of 4 ranks: 1.13 times the mean of attention's scores" in describe(make_plan(c))


def test_negative_control_straight_parts():
    c = configure(context=4, context_kind="ring", length=4096, layers=2)
    c.parallel.context_balance = False
    work = attention_work(make_plan(c))
    assert [round(100 * n / sum(work)) for n in work] == [6, 19, 31, 44]


def test_without_contexts_there_is_no_line():
    plan = make_plan(configure())
    assert attention_work(plan) == [] and "  work  " not in describe(plan)

"""How evenly ranks that share sequences divide attention, as a plan says, counted by their masks."""

from __future__ import annotations

import pytest
import torch

from platform.plan.layout import Stretch
from platform.plan.plan_summary import attention_imbalance, count_causal_keys, count_scores_by_rank, describe
from platform.predict.make_plan import make_plan
from platform.runtime.positions import unseen_mask
from tests.harness.oracle import MODELS, configure

EVEN = 1.02


@pytest.mark.parametrize("window", [0, 1, 3, 9, 40])
def test_keys_that_queries_see(window):
    for first, size in ((0, 5), (4, 7), (9, 1), (0, 16)):
        hidden = unseen_mask(torch.arange(first, first + size), torch.arange(16), window, None)
        assert count_causal_keys(Stretch(first, size), window) == (~hidden).sum()


def busiest(**more) -> float:
    plan = make_plan(configure(**{"layers": 2, **more}))
    assert len(count_scores_by_rank(plan)) == more["context"]
    return attention_imbalance(plan)


@pytest.mark.parametrize("kind", ["gather", "ring", "heads"])
@pytest.mark.parametrize("more", [{}, {"window": 64}, {"window": 64, "window_layers": [1]}, MODELS["packed_gpt"]])
def test_equal_work(kind, more):
    """Causal, in windows of much less than a part, and of documents, whose borders are the data's."""
    assert busiest(**{**more, "context": 4, "context_kind": kind, "length": 4096}) <= EVEN


LONG = {"context": 4, "length": 8192}
NESTED = {"context_kind": "nested_ring", "context_heads": 2}
# model and contexts -> pieces of a rank: the fewest by which work is even
PIECES = [
    ({**LONG, "context_kind": "ring"}, 2),
    ({**LONG, "context_kind": "gather", "window": 256}, 2),
    ({**LONG, "context_kind": "gather", "window": 1024}, 16),
    ({**LONG, "context_kind": "ring", "window": 2048}, 8),
    ({**LONG, **NESTED, "window": 2048}, 8),
    ({**LONG, "context_kind": "ring", "window": 2048, "window_layers": [1]}, 8),
    ({**LONG, "context_kind": "ring", **MODELS["t5"], "source_length": 2048}, 2),
    ({**LONG, "context_kind": "ring", **MODELS["packed_gpt"], "window": 0}, 8),  # the most: only data know
    ({**LONG, "context_kind": "ring", "window": 2048, "context_pieces": 16}, 16),
]


@pytest.mark.parametrize(("more", "pieces"), PIECES)
def test_pieces_are_as_many_as_make_work_even(more, pieces):
    plan = make_plan(configure(**more))
    assert 2 * plan.scheme.rounds == pieces and attention_imbalance(plan) <= EVEN


def test_a_wide_window_of_few_tokens_is_uneven_and_the_plan_says_so():
    """Queries of the first parts see less than a window: what they lack, no later part has to spare."""
    few = {"context": 4, "context_kind": "ring", "length": 64, "window": 16}
    assert busiest(**few) == pytest.approx(1.13, abs=0.01)
    line = "the busiest of 4 ranks: {} times the mean of attention's scores"
    assert describe(make_plan(configure(**few))).endswith(line.format(1.13))
    plan = make_plan(configure(**few, context_pieces=8))
    assert describe(plan).endswith(line.format("1.00") + "; 8 pieces each")


def test_another_plan_of_a_run_has_as_many_pieces_as_divide_its_lengths():
    """As when a run goes on with fewer workers."""
    schemes = {n: make_plan(configure(context=n, context_kind="ring", length=96, context_pieces=8)).scheme
             for n in (1, 2, 3, 4, 6)}  # fmt: skip
    assert {n: 2 * s.rounds if s.zigzag else 0 for n, s in schemes.items()} == {1: 0, 2: 8, 3: 8, 4: 8, 6: 8}
    assert make_plan(configure(context=4, context_kind="ring", length=48, context_pieces=8)).scheme.rounds == 3


def test_all_lengths_of_a_run_have_as_many_pieces():
    c = configure(context=2, context_kind="ring", length=8192, window=2048, positions="rope")
    c.train.length_ramp = ["0:1024", "2:8192"]
    plan = make_plan(c)
    assert plan.scheme.rounds == plan.plan_of_length(1024).scheme.rounds == 4


def test_negative_control_straight_parts():
    c = configure(context=4, context_kind="ring", length=4096, layers=2)
    c.parallel.context_balance = False
    work = count_scores_by_rank(make_plan(c))
    assert [round(100 * n / sum(work)) for n in work] == [6, 19, 31, 44]


def test_without_contexts_there_is_no_line():
    plan = make_plan(configure())
    assert count_scores_by_rank(plan) == [] and "  work  " not in describe(plan)

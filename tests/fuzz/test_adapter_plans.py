"""Nothing is lost with adapters, whoever dies: random plans, some of whose ranks are killed between two steps."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from platform.train import rank_model
from tests.fuzz import adapter_plans, plans
from tests.fuzz.runner import run
from tests.harness.oracle import configure

STAGES = {"pipeline": "1f1b", "stages": 2}
MANY, COUNT = range(0, 1000, 50), 50


def check_idle(then: dict[str, Any]) -> None:
    """Train adapters of the last layer on a stage that dies, then under another plan, of what the first stage has."""
    configs = [configure(layers=4, **keys) for keys in ({**STAGES, "data": 2, "zero": 1}, then)]
    for c in configs:
        c.train.steps = 4
        c.tune.kind, c.tune.rank, c.tune.targets = "lora", 2, ["layers.3.*"]
    passage = adapter_plans.InMemory(Random(0), ("last",))
    passage.nodes, passage.shared = 2, False
    plans.check(Random(0), configs, plans.planned(configs), asks=False, passage=passage)
    assert passage.idle and passage.killed == 2


@pytest.mark.parametrize("then", [{}, {"data": 2, "zero": 3}, STAGES], ids=str)
def test_ranks_that_train_nothing_know_what_others_do(then):
    check_idle(then)


def test_negative_control_ranks_that_train_nothing_count_nothing(monkeypatch):
    monkeypatch.setattr(rank_model, "build_idle_group", lambda dtype, device: {"params": [torch.zeros(0)]})
    with pytest.raises(AssertionError, match="final of|moment"):
        check_idle(STAGES)


@pytest.mark.full
@pytest.mark.parametrize("seed", MANY)
def test_random_plans_of_adapters(seed, record_count):
    outcome = run(adapter_plans, seed, COUNT)
    record_count("random plans of adapters with deaths", sum(outcome.counts.values()), COUNT)

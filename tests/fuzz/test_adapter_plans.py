"""Nothing is lost with adapters, whoever dies: random plans, some of whose ranks are killed between two steps."""

from __future__ import annotations

import pytest
import torch

from platform.train import rank_model
from tests.fuzz import adapter_plans
from tests.fuzz.runner import run

IDLE = (33, 2)  # seeds of which only ranks that train nothing survive, as the test itself sees
MANY, COUNT = range(0, 1000, 50), 50


@pytest.mark.parametrize("seed", IDLE)
def test_ranks_that_train_nothing_know_what_others_do(seed):
    assert run(adapter_plans, seed, 1).counts["only idle ones live"] == 1


def test_negative_control_ranks_that_train_nothing_count_nothing(monkeypatch):
    monkeypatch.setattr(rank_model, "build_idle_group", lambda dtype, device: {"params": [torch.zeros(0)]})
    with pytest.raises(AssertionError, match="final of|moment"):
        run(adapter_plans, IDLE[0], 1)


@pytest.mark.full
@pytest.mark.parametrize("seed", MANY)
def test_random_plans_of_adapters(seed, record_count):
    outcome = run(adapter_plans, seed, COUNT)
    record_count("random plans of adapters with deaths", sum(outcome.counts.values()), COUNT)

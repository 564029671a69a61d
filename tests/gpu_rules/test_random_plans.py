"""Random plans under the rules of GPUs: as NCCL runs them with the hardware queues that their workers have, equal to
one process in fp64; and their steps on a card that is not there."""

from __future__ import annotations

import pytest
import torch

from platform.runtime import flat_buffers
from tests.fuzz import gpu_plans
from tests.fuzz.runner import run
from tests.harness import suite

SEED, EACH, PARTS = 100_000, 5, 100  # a part takes 3 to 8 s of one core
FIRST = EACH if suite.full else 2  # plans of the first part


@pytest.mark.counted("random plans under the rules of GPUs", EACH * PARTS if suite.full else FIRST, EACH * PARTS)
@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, PARTS))])
def test_random_plans(part):
    run(gpu_plans, SEED + part * EACH, EACH if part else FIRST)


def test_negative_control_a_number_that_the_host_makes(monkeypatch):
    """On the CPU it is where all tensors are."""
    squares = flat_buffers.sum_squares
    monkeypatch.setattr(flat_buffers, "sum_squares", lambda stretches: squares(stretches) + torch.tensor(0.0))
    with pytest.raises(AssertionError, match="makes a tensor on"):
        run(gpu_plans, SEED, EACH)

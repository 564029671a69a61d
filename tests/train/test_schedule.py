import math

import pytest

from platform.config import Optimizer
from platform.train.schedule import SCHEDULES, learning_rate


def rates(steps: int, **keys) -> list[float]:
    o = Optimizer(lr=2.0, **keys)
    return [learning_rate(o, step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_linear_and_ends_at_the_peak(schedule):
    assert rates(10, schedule=schedule, warmup_steps=4)[:4] == [0.5, 1.0, 1.5, 2.0]


def test_the_cosine_ends_at_min_lr():
    found = rates(14, schedule="cosine", warmup_steps=4, min_lr=0.1)
    assert found[-1] == pytest.approx(0.2)
    assert found[3:] == sorted(found[3:], reverse=True)
    assert found[8] == pytest.approx((2.0 + 0.2) / 2)  # half way
    assert found[5] == pytest.approx(0.2 + 1.8 * (1 + math.cos(math.pi * 2 / 10)) / 2)
    assert rates(3, schedule="cosine", min_lr=0)[-1] == pytest.approx(0)
    assert rates(3, schedule="cosine", min_lr=1) == [2.0] * 3


def test_constant_is_constant():
    assert rates(5, schedule="constant") == [2.0] * 5
    assert rates(5, schedule="constant", warmup_steps=2) == [1.0, 2.0, 2.0, 2.0, 2.0]


def test_the_edges():
    assert rates(1, schedule="cosine", min_lr=0.5) == [1.0]
    assert rates(3, schedule="cosine", warmup_steps=3)[-1] == 2.0  # nothing but warm-up
    assert rates(2, schedule="cosine", warmup_steps=8) == [0.25, 0.5]  # cut short in it
    o = Optimizer(lr=2.0, min_lr=0.1)
    assert learning_rate(o, 50, 10) == pytest.approx(0.2)  # beyond the end

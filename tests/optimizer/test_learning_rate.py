import math

import pytest
import torch

from platform.config.fields import Optimizer
from platform.optimizer.learning_rate import SCHEDULES, learning_rate, warning_of_warmup


def rates(steps: int, **keys) -> list[float]:
    o = Optimizer(lr=2.0, **keys)
    return [learning_rate(o, step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_linear_and_ends_at_the_peak(schedule):
    assert rates(10, schedule=schedule, warmup_steps=4)[:4] == [0.5, 1.0, 1.5, 2.0]


def test_the_cosine_ends_at_min_lr():
    curve = rates(14, schedule="cosine", warmup_steps=4, min_lr=0.1)
    assert curve[-1] == pytest.approx(0.2)
    assert curve[3:] == sorted(curve[3:], reverse=True)
    assert curve[8] == pytest.approx((2.0 + 0.2) / 2)  # half way
    assert curve[5] == pytest.approx(0.2 + 1.8 * (1 + math.cos(math.pi * 2 / 10)) / 2)
    assert rates(3, schedule="cosine", min_lr=0)[-1] == pytest.approx(0)
    assert rates(3, schedule="cosine", min_lr=1) == [2.0] * 3


def test_the_inverse_square_root():
    """After the warm-up lr x sqrt(warmup / step); without any, lr / sqrt(step)."""
    curve = rates(16, schedule="inverse_sqrt", warmup_steps=4)
    assert curve[3] == 2.0 and curve[8] == pytest.approx(2.0 * 2 / 3) and curve[15] == pytest.approx(1.0)
    assert rates(4, schedule="inverse_sqrt") == pytest.approx([2.0, 2.0 / math.sqrt(2), 2.0 / math.sqrt(3), 1.0])


def test_the_paper_s_schedule_is_the_inverse_square_root():
    """ "Attention Is All You Need", equation (3), with d_model 512 and 8 updates of warm-up."""
    o = Optimizer(lr=(512 * 8) ** -0.5, schedule="inverse_sqrt", warmup_steps=8)
    for step in (1, 5, 8, 9, 40):
        assert learning_rate(o, step, 100) == pytest.approx(512**-0.5 * min(step**-0.5, step * 8**-1.5))


def test_constant_is_constant():
    assert rates(5, schedule="constant") == [2.0] * 5
    assert rates(5, schedule="constant", warmup_steps=2) == [1.0, 2.0, 2.0, 2.0, 2.0]


def test_the_edges():
    assert rates(1, schedule="cosine", min_lr=0.5) == [1.0]
    assert rates(3, schedule="cosine", warmup_steps=3)[-1] == 2.0  # nothing but warm-up
    assert rates(2, schedule="cosine", warmup_steps=8) == [0.25, 0.5]  # cut short in it
    o = Optimizer(lr=2.0, min_lr=0.1)
    assert learning_rate(o, 50, 10) == pytest.approx(0.2)  # beyond the end


def test_a_warm_up_that_is_longer_than_the_run_is_said():
    o = Optimizer(lr=6e-3, warmup_steps=150)
    assert warning_of_warmup(o, 12) == (
        "optimizer.warmup_steps=150 is more than the 12 steps of this run: the learning rate ends at 0.00048, "
        "8% of optimizer.lr=0.006"
    )
    assert learning_rate(o, 12, 12) == pytest.approx(0.00048)
    assert not warning_of_warmup(o, 150) and not warning_of_warmup(o, 0) and not warning_of_warmup(Optimizer(), 1)


def test_linear_falls_evenly():
    curve = rates(14, schedule="linear", warmup_steps=4, min_lr=0.5)
    assert curve[3:] == pytest.approx([2.0 - k / 10 for k in range(11)])


def test_wsd_stays_and_then_falls():
    """Warm-up, the peak, and a linear fall over the last updates."""
    curve = rates(10, schedule="wsd", warmup_steps=2, min_lr=0, decay_steps=4)
    assert curve == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0])
    assert rates(20, schedule="wsd", min_lr=0.1)[-3:] == pytest.approx([2.0, 1.1, 0.2])  # a tenth
    assert rates(3, schedule="wsd", warmup_steps=3)[-1] == 2.0


def test_the_cosine_starts_anew():
    """Cycles of equal length, each of which ends at min_lr: torch's, whose first update is its number 0."""
    curve = rates(12, schedule="cosine_restarts", min_lr=0.1, cycles=3)
    assert curve[3] == curve[7] == pytest.approx(0.2) == curve[11]
    assert curve[:4] == pytest.approx(rates(4, schedule="cosine", min_lr=0.1))
    assert curve[:4] == pytest.approx(curve[4:8])
    w = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], 2.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4, eta_min=0.2)
    for step in range(1, 13):
        optimizer.step()
        theirs.step()
        if step % 4:
            assert curve[step - 1] == pytest.approx(theirs.get_last_lr()[0])
    assert rates(5, schedule="cosine_restarts", cycles=1) == rates(5, schedule="cosine")

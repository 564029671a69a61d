"""What counts as a spike."""

from math import inf, nan

from platform.cluster.control.controller import RECENT_LOSSES, LossSpikes


def test_the_limit_follows_the_median():
    spikes = LossSpikes(3.0)
    for _ in range(7):
        spikes.add_loss(2.0)
        assert spikes.loss_limit == inf
    spikes.add_loss(100.0)
    assert spikes.loss_limit == 6.0
    for _ in range(RECENT_LOSSES):
        spikes.add_loss(1.0)
    spikes.add_loss(nan)
    assert spikes.loss_limit == 3.0


def test_none_without_a_factor():
    spikes = LossSpikes(0.0)
    for _ in range(20):
        spikes.add_loss(1.0)
    assert spikes.loss_limit == inf

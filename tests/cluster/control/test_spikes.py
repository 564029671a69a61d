"""What counts as a spike."""

from math import inf, nan

from platform.cluster.control.controller import RECENT_LOSSES, Spikes


def test_the_limit_follows_the_median():
    spikes = Spikes(3.0)
    for _ in range(7):
        spikes.add(2.0)
        assert spikes.limit == inf
    spikes.add(100.0)
    assert spikes.limit == 6.0
    for _ in range(RECENT_LOSSES):
        spikes.add(1.0)
    spikes.add(nan)
    assert spikes.limit == 3.0


def test_none_without_a_factor():
    spikes = Spikes(0.0)
    for _ in range(20):
        spikes.add(1.0)
    assert spikes.limit == inf

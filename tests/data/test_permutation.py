import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from platform.data.mixture import hash_integers, permute_indices


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(1, 3000))
def test_every_epoch_is_a_permutation(seed, epoch, n):
    assert sorted(permute_indices(seed, epoch, n, np.arange(n)).tolist()) == list(range(n))


@given(st.integers(1, 2**40), st.data())
def test_random_access_equals_the_whole(n, draw):
    index = np.array(draw.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    epoch = np.array(draw.draw(st.lists(st.integers(0, 5), min_size=len(index), max_size=len(index))))
    together = permute_indices(7, epoch, n, index)
    assert np.all((together >= 0) & (together < n))
    assert together.tolist() == [int(permute_indices(7, int(e), n, int(i))) for e, i in zip(epoch, index, strict=True)]


def test_epochs_and_seeds_differ():
    orders = {tuple(permute_indices(seed, epoch, 100, np.arange(100))) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


@pytest.mark.parametrize("n", [4, 5, 10, 17])
def test_positions_are_uniform(n):
    """Each index lands on each position equally often: chi-square within five standard deviations of its mean."""
    epochs, degrees = 40_000, (n - 1) ** 2
    landed = permute_indices(0, np.arange(epochs)[:, None], n, np.arange(n)[None])
    counts = np.stack([np.bincount(landed[:, i], minlength=n) for i in range(n)])
    chi_square = ((counts - epochs / n) ** 2 / (epochs / n)).sum()
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


def test_neighbours_are_not_kept_together():
    n = 10_000
    landed = permute_indices(0, 0, n, np.arange(n))
    assert abs(np.corrcoef(landed, np.arange(n))[0, 1]) < 0.05
    assert np.mean(np.abs(np.diff(landed)) < 10) < 0.01


def test_the_order_never_changes():
    """Golden values: another order would make resumed runs read samples twice."""
    assert permute_indices(1, 2, 10, np.arange(10)).tolist() == GOLDEN
    assert int(hash_integers(1, 2, 3)) == GOLDEN_MIX


GOLDEN = [8, 6, 3, 7, 5, 1, 0, 9, 4, 2]
GOLDEN_MIX = 15020427595393229491

"""The global order of samples: a pure function of (seed, epoch, index), with random access and no stored state."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN, _MULTIPLY_1, _MULTIPLY_2 = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (np.uint64(c) for c in (30, 27, 31))
_ROUNDS = 8  # of the Feistel network; with 4, the permutations of small ranges are measurably uneven


def mix(*words: ArrayLike) -> NDArray[np.uint64]:
    """Hash integers (such as seed, epoch, sample) to 64 bits, elementwise with broadcasting: the random numbers of the
    data order and the objectives, without a generator's state. The hash is the finaliser of SplitMix64, once per
    word."""
    hashed: NDArray[np.uint64] = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        for word in words:
            z = (hashed ^ np.asarray(word).astype(np.uint64)) + _GOLDEN
            z = (z ^ (z >> _SHIFT_1)) * _MULTIPLY_1
            z = (z ^ (z >> _SHIFT_2)) * _MULTIPLY_2
            hashed = z ^ (z >> _SHIFT_3)
    return np.asarray(hashed)


def order(seed: int, epoch: ArrayLike, n: int, index: ArrayLike) -> NDArray[np.int64]:
    """Shuffle samples: map number `index` to its image in the permutation of [0, n) that `seed` and `epoch` give,
    elementwise with broadcasting.

    A Feistel network permutes [0, 4**half), the smallest such range that holds n. Applying it again to images outside
    [0, n) until all lie inside (cycle walking) makes it a permutation of [0, n); fewer than four rounds are expected.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)

    def permute(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Apply the Feistel network, which permutes sample numbers in [0, 4**half), to each number in `x`."""
        left, right = x >> shift, x & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (mix(seed, epoch, turn, right) & mask)
        return (left << shift) | right

    index = np.asarray(index)
    assert np.all((index >= 0) & (index < n)), f"index outside [0, {n})"
    x = permute(index.astype(np.uint64))
    while np.any(outside := x >= n):
        x = np.where(outside, permute(x), x)
    return np.asarray(x).astype(np.int64)

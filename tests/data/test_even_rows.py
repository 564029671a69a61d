"""Documents of a packed row in an order by which ranks that share the row have equal work, counted token by token."""

from __future__ import annotations

import numpy as np
import pytest

from platform.data.packing import RANKS, best_fit, even_rows, work_imbalance
from platform.data.streams import PackedStream
from platform.plan.layout import LEAST_PIECE, MOST_ROUNDS, consecutive_ranges

LENGTH = 32768


def packed(seed: int, documents: int = 3000) -> tuple[np.ndarray, np.ndarray]:
    """Rows of documents of which a few are long, as texts are."""
    sizes = np.random.default_rng(seed).lognormal(6.5, 1.2, documents).astype(np.int64) + 8
    return best_fit(np.append(0, np.cumsum(sizes)), LENGTH)


def by_token(sizes: list[int], length: int) -> float:
    """The work of the busiest rank in terms of the mean, in the worst context: a sum over the tokens of its pieces."""
    work, worst = np.concatenate([np.arange(1, n + 1) for n in (*sizes, length - sum(sizes))]), []
    for ranks in RANKS:
        rounds = max(
            n for n in (1, 2, 4, 8, 16) if n == 1 or (n <= MOST_ROUNDS and length // (2 * ranks * n) >= LEAST_PIECE)
        )
        parts = (
            consecutive_ranges(rank * length // ranks, length // ranks, length, ranks, rounds) for rank in range(ranks)
        )
        each = [sum(work[first : first + n].sum() for first, n in pieces) for pieces in parts]
        worst.append(max(each) * ranks / sum(each))
    return max(worst)


@pytest.mark.parametrize("length", [256, 1024, 8192, LENGTH])
def test_work_is_counted_as_token_by_token(length):
    draw = np.random.default_rng(length)
    for count in (1, 2, 7):
        sizes = draw.integers(1, length // count + 1, count)
        assert work_imbalance(sizes, length) == pytest.approx(by_token(sizes.tolist(), length), rel=1e-12)


def test_rows_keep_their_documents_and_get_even():
    pieces, rows = packed(0)
    evened = even_rows(pieces, rows, LENGTH)
    pairs = [(pieces[a:b], evened[a:b]) for a, b in zip(rows[:-1], rows[1:], strict=True)]
    assert all(sorted(map(tuple, old)) == sorted(map(tuple, new)) for old, new in pairs)
    before, after = ([work_imbalance(pair[i][:, 1], LENGTH) for pair in pairs] for i in (0, 1))
    assert all(new <= old for old, new in zip(before, after, strict=True))
    assert np.mean(before) > 1.05 and np.mean(after) < 1.02
    sizes = np.full(LENGTH // 2, 2)
    short = np.stack([np.cumsum(sizes) - 2, sizes], 1)  # equal work as they are
    assert (even_rows(short, np.array([0, len(short)]), LENGTH) == short).all()


def test_a_row_is_ordered_by_itself():
    """Whatever other rows there are, and how many are made at once."""
    pieces, rows = packed(1)
    whole = even_rows(pieces, rows, LENGTH)
    for row in range(0, len(rows) - 1, 7):
        own = slice(rows[row], rows[row + 1])
        alone = even_rows(pieces[own], np.array([0, own.stop - own.start]), LENGTH)
        assert (alone == whole[own]).all()
    reader = PackedStream(np.arange(pieces[:, 1].sum()), whole, rows)
    assert sorted(reader.token_positions(np.arange(len(rows) - 1), LENGTH).ravel())[-3:] == [
        len(reader) - n for n in (3, 2, 1)
    ]

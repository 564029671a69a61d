"""Whole numbers: what divides one, found without counting to it."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt


def divisors(n: int) -> list[int]:
    """Return the divisors of n >= 1 in order, in O(sqrt n)."""
    low = [k for k in range(1, isqrt(n) + 1) if n % k == 0]
    return [*low, *(n // k for k in reversed(low) if k * k != n)]


def factorizations(n: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write n as a product of so many numbers, in order."""
    if factors < 2:
        yield from [(n,)] if factors else []
        return
    for first in divisors(n):
        yield from ((first, *rest) for rest in factorizations(n // first, factors - 1))

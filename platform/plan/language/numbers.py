"""Divisors and factorizations of whole numbers, in O(sqrt n) rather than O(n), and numbers with their nouns."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt


def divisors(n: int) -> list[int]:
    """Return the divisors of n >= 1, ascending, in O(sqrt n)."""
    low = [k for k in range(1, isqrt(n) + 1) if n % k == 0]
    return [*low, *(n // k for k in reversed(low) if k * k != n)]


def factorizations(n: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write n as an ordered product of `factors` numbers, in lexicographic order."""
    if factors < 2:
        yield from [(n,)] if factors else []
        return
    for first in divisors(n):
        yield from ((first, *rest) for rest in factorizations(n // first, factors - 1))


def count_of(number: int, noun: str, form: str = "") -> str:
    """Format a number, by the format specification `form`, with its noun, in the plural unless it is 1: "2 GPUs"."""
    plural = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number:{form}} {noun}" + ("" if number == 1 else plural)

"""Fit of the few constants of a hardware that no data sheet gives to measured times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp

import numpy as np

EXPECTED = 0.03  # usual error of a prediction, as a logarithm
TRUSTED = 0.5  # by how much a constant's logarithm may leave its first value at the price of such an error
TURNS, SETTLED, STEP = 12, 1e-5, 1e-3

Errors = Callable[[Mapping[str, float]], list[float]]  # constants -> logarithm of predicted / measured, per run


def fit(errors: Errors, first: Mapping[str, float]) -> dict[str, float]:
    """Return the constants, near their `first` values, with which the squares of the errors add up to least, by
    Gauss and Newton's method on the logarithms; runs that do not depend on a constant leave it as it is."""
    names = list(first)
    point = [0.0] * len(names)

    def at(x: Sequence[float]) -> list[float]:
        """Return the errors at logarithms `x` of the constants over their first values, and how far these are."""
        there = {name: first[name] * exp(step) for name, step in zip(names, x, strict=True)}
        return [*errors(there), *(step * EXPECTED / TRUSTED for step in x)]

    now = at(point)
    for _ in range(TURNS):
        slopes = np.array([np.subtract(at(_moved(point, i)), now) / STEP for i in range(len(names))])
        step = np.clip(np.linalg.solve(slopes @ slopes.T, -slopes @ now), -0.5, 0.5).tolist()
        scale = 1.0
        while True:
            tried = [x + scale * s for x, s in zip(point, step, strict=True)]
            then = at(tried)
            if sum(e * e for e in then) <= sum(e * e for e in now) or scale < 1e-3:
                break
            scale /= 2
        point, now = tried, then
        if max(abs(s) * scale for s in step) < SETTLED:
            break
    return {name: first[name] * exp(x) for name, x in zip(names, point, strict=True)}


def _moved(point: Sequence[float], i: int) -> list[float]:
    """Return the point a small step along coordinate i."""
    return [x + STEP * (j == i) for j, x in enumerate(point)]


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Kendall's tau-b of two rankings of the same runs: 1 if they agree on every pair, -1 if on none."""
    pairs = [(i, j) for i in range(len(one)) for j in range(i)]
    signs = [(_sign(one[i] - one[j]), _sign(other[i] - other[j])) for i, j in pairs]
    untied = [sum(a != 0 for a, _ in signs), sum(b != 0 for _, b in signs)]
    return sum(a * b for a, b in signs) / (untied[0] * untied[1]) ** 0.5 if all(untied) else 0.0


def _sign(x: float) -> int:
    """Return 1, 0 or -1 as a number is positive, zero or negative."""
    return (x > 0) - (x < 0)

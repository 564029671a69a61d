"""Pairwise covers of large products: every pair of values of two factors occurs in some case."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def product(factors: Mapping[str, Sequence[Any]], legal: Callable[[Case], bool]) -> list[Case]:
    names = list(factors)
    cases = (dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values()))
    return [case for case in cases if legal(case)]


def cover(cases: Sequence[Case], seed: int = 0) -> list[Case]:
    """A subset of `cases` that has every pair that any case has: greedy, with a fixed seed."""

    def pairs(case: Case) -> set:
        return set(itertools.combinations([(k, repr(v)) for k, v in case.items()], 2))

    pool = [(case, pairs(case)) for case in cases]
    random.Random(seed).shuffle(pool)
    missing = set().union(*(p for _, p in pool))
    chosen = []
    while missing:
        case, found = max(pool, key=lambda entry: len(entry[1] & missing))
        chosen.append(case)
        missing -= found
    return chosen

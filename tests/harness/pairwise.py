"""Pairwise covers of large products: every pair of values of two factors occurs in some case."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def product(factors: Mapping[str, Sequence[Any]], legal: Callable[[Case], bool]) -> list[Case]:
    names = list(factors)
    cases = (dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values()))
    return [case for case in cases if legal(case)]


def cover(
    cases: Sequence[Case], seed: int = 0, plain: Mapping[str, Sequence[Any]] | None = None, cost: Any = lambda case: 1.0
) -> list[Case]:
    """A subset of `cases` that has every pair that any case has: greedy, with a fixed seed; first those of most new
    pairs for their cost. `plain` names fewer values of some factors: the subset then has every pair of these values
    that any such case has, and every value of all."""

    def values(case: Case) -> list[tuple[str, str]]:
        return [(name, repr(value)) for name, value in case.items()]

    few = {name: set(map(repr, chosen)) for name, chosen in (plain or {}).items()}

    def pairs(case: Case) -> set:
        known = [(name, value) for name, value in values(case) if name not in few or value in few[name]]
        whole = len(known) == len(case)
        return {*values(case), *(itertools.combinations(known, 2) if whole else ())}

    pool = [(case, pairs(case), cost(case)) for case in cases]
    random.Random(seed).shuffle(pool)
    missing = set().union(*(p for _, p, _ in pool))
    worth = [(-len(covered) / price, i) for i, (_, covered, price) in enumerate(pool)]  # at most: it only falls
    heapq.heapify(worth)
    chosen = []
    while missing:
        most, i = worth[0]
        case, covered, price = pool[i]
        now = -len(covered & missing) / price
        if now > most:
            heapq.heapreplace(worth, (now, i))
            continue
        chosen.append(case)
        missing -= covered
    return chosen

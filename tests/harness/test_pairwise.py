"""Covers have every pair that there is; with plain values, every pair of those and every value."""

from itertools import combinations, product

from tests.harness.pairwise import cover

CASES = [dict(zip("abcd", values, strict=True)) for values in product(range(4), range(3), "xyz", [True, False])]
PLAIN = {"a": [0, 1], "c": ["x", "y"]}


def pairs(cases) -> set:
    return {pair for case in cases for pair in combinations(case.items(), 2)}


def test_every_pair():
    chosen = cover(CASES)
    assert pairs(chosen) == pairs(CASES) and len(chosen) < len(CASES) / 3
    assert pairs(chosen[:-1]) != pairs(CASES)


def test_every_pair_of_plain_values_and_every_value():
    plain = [case for case in CASES if case["a"] in PLAIN["a"] and case["c"] in PLAIN["c"]]
    chosen = cover(CASES, plain=PLAIN)
    assert pairs(chosen) >= pairs(plain) and len(chosen) < len(cover(CASES))
    assert {item for case in chosen for item in case.items()} == {item for case in CASES for item in case.items()}


def test_of_equal_pairs_the_cheapest():
    assert not [
        case for case in cover(CASES, plain=PLAIN, cost=lambda case: 1 + 9 * (case["a"] == 3)) if case["a"] == 3
    ][1:]

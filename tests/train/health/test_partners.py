import doctest
from itertools import combinations

import pytest

from platform.train import gauges, health
from platform.train.health import groups_by_check, pair_rounds


def test_examples():
    for module in (health, gauges):
        assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("nodes", ["", "a", "ab", "aaaa", "aaaaa", "aabbcc", "aabbc", "abcdefgh" * 2, "aaab"])
def test_each_rank_has_one_partner_at_a_time_and_each_partner_once(nodes):
    rounds = pair_rounds(nodes, 3)
    assert len(rounds) <= 3 and all(rounds)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks)) and all(a < b for a, b in pairs)
    everybody = [pair for pairs in rounds for pair in pairs]
    assert len(everybody) == len(set(everybody))
    if len(nodes) > 1:
        assert {rank for pair in everybody for rank in pair} == set(range(len(nodes)))


def test_all_meet_all_in_the_end():
    assert sorted(pair for pairs in pair_rounds("a" * 6, 99) for pair in pairs) == [*combinations(range(6), 2)]


def test_partners_are_on_other_nodes_where_there_are_any():
    nodes = "aaaabbbbcccc"
    assert all(nodes[a] != nodes[b] for pairs in pair_rounds(nodes, 9) for a, b in pairs)


def test_gpus_of_a_node_are_measured_together():
    pair, node = ("link", [(0, 2), (1, 3)]), ("node", [(0, 1), (2, 3)])
    assert groups_by_check("aabb", partners=1, gpus=True) == [pair, node]
    assert groups_by_check("aabb", partners=1, gpus=False) == [pair]
    assert groups_by_check("ab", partners=3, gpus=True) == [("link", [(0, 1)])]
    assert groups_by_check("a", partners=3, gpus=True) == []

"""Groups for measurements of connections: rounds of pairs in which every worker has a partner, on another node where it
can, and all workers of each node."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, zip_longest


def groups_by_check(nodes: Sequence[str], partners: int, gpus: bool) -> list[tuple[str, list[tuple[int, ...]]]]:
    """Return the groups of ranks whose connections the doctor measures at once, as (check, groups) for every round."""
    pairs: list[tuple[str, list[tuple[int, ...]]]] = [("link", [*each]) for each in rounds(nodes, partners)]
    by_node = [tuple(rank for rank, its in enumerate(nodes) if its == node) for node in dict.fromkeys(nodes)]
    whole = [ranks for ranks in by_node if len(ranks) > 1]
    return [*pairs, *([("node", whole)] if gpus and whole else [])]


def rounds(nodes: Sequence[str], most: int) -> list[list[tuple[int, int]]]:
    """Return up to `most` rounds of pairs of ranks, for the doctor to measure the links between workers: in each round
    a rank is in one pair at most, and no pair comes twice. `nodes`: each rank's node. The n-th workers of all nodes are
    partners of each other; workers without such a partner, as on a single node, are partners of each other. So a rank
    has several partners, and a slow one does not make all of them look slow.

    >>> rounds(["a", "a", "b", "b"], 3)
    [[(0, 2), (1, 3)]]
    >>> rounds(["a", "a", "a"], 2)
    [[(1, 2)], [(0, 2)]]
    """
    slots: list[list[int]] = []
    for rank, node in enumerate(nodes):
        slot = nodes[:rank].count(node)
        slots += [[] for _ in range(slot + 1 - len(slots))]
        slots[slot].append(rank)
    groups = [*slots, [rank for slot in slots if len(slot) == 1 for rank in slot]]
    together = zip_longest(*(_tournament(group) for group in groups if len(group) > 1), fillvalue=())
    return [[pair for pairs in each for pair in pairs] for each in islice(together, most)]


def _tournament(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return the rounds of pairs in which each of `ranks` meets every other once, to measure the link between them (the
    circle method); of an odd number of ranks, one has no partner in each round."""
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found

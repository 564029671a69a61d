"""Messages inside and between nodes: the closed forms against enumeration."""

from __future__ import annotations

import pytest

from platform.plan.language.mesh import Mesh
from platform.plan.reports.node_messages import count_messages, with_axes_moved


def naive_messages(n: int, g: int, workers_per_node: int) -> tuple[int, int]:
    """Return `messages` in closed form for g sub-grids of n / g consecutive ranks each; all arguments powers of two.

    Equations 4 and 5 of SUPER, whose two cases are printed the wrong way round there.
    """
    if n // g >= workers_per_node:
        return n, n * (g - 1)
    return min(n, workers_per_node) * g, max(0, n - workers_per_node) * g


def aware_messages(n: int, g: int, workers_per_node: int) -> tuple[int, int]:
    """Return `messages` in closed form if the g ranks of a group are consecutive; all arguments powers of two.

    Equations 6 and 7 of SUPER.
    """
    if g <= workers_per_node:
        return n * g, 0
    return n * workers_per_node, n * (g - workers_per_node)


POWERS = [1, 2, 4, 8, 16, 32]
CASES = [(n, g, node) for n in POWERS for g in POWERS for node in POWERS if g <= n and node <= n]


@pytest.mark.parametrize(("n", "g", "node"), CASES)
def test_closed_forms(n, g, node):
    aware = Mesh.of({"data": n // g, "g": g})
    naive = with_axes_moved(aware, ["g"], outer=True)
    assert naive.shape == (("g", g), ("data", n // g))
    assert count_messages(naive, ["g"], node) == naive_messages(n, g, node)
    assert count_messages(aware, ["g"], node) == aware_messages(n, g, node)
    for mesh, closed in ((naive, naive_messages), (aware, aware_messages)):  # common layers on sub-grid 0: a g-th
        found = count_messages(mesh, ["g"], node, from_zero=True)
        assert tuple(g * count for count in found) == closed(n, g, node)
    assert sum(naive_messages(n, g, node)) == sum(aware_messages(n, g, node)) == n * g


def test_as_printed_the_cases_of_equations_4_and_5_are_swapped():
    def printed(n, g, node):
        return (n, n * (g - 1)) if n // g <= node else (node * g, (n - node) * g)

    wrong = [case for case in CASES if printed(*case) != naive_messages(*case)]
    assert wrong and all(n // g != node for n, g, node in wrong)


def test_other_sizes_are_counted():
    aware = Mesh.of({"data": 4, "g": 3})
    assert count_messages(with_axes_moved(aware, ["g"], outer=True), ["g"], 4) == (12, 24)
    assert count_messages(aware, ["g"], 4) == (28, 8)


def test_two_branch_axes_and_a_scheme_between():
    mesh = Mesh.of({"data": 2, "t": 2, "a": 2, "b": 2})
    assert count_messages(mesh, ["a", "b"], 4) == (64, 0)
    assert count_messages(with_axes_moved(mesh, ["a", "b"], outer=True), ["a", "b"], 4) == (16, 48)

"""Steps of the plans of a case on nodes of the testbed: seconds, and bytes that the interfaces carried."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.nodes.cases import Case
from tests.testbed.links import Links
from tests.testbed.ranks import on_nodes

Steps = list[dict[str, Any]]  # of a rank: as `measure_steps` returns them


def measure(case: Case, rate: str | None, rounds: int) -> dict[str, list[Steps]]:
    """Step all variants of a case over links of `rate`; return by variant what each rank has seen."""
    steps: dict[str, list[Steps]] = {}
    for seats in dict.fromkeys(map(case.seats, case.variants)):
        variants = {name: how for name, how in case.variants.items() if case.seats(name) == seats}
        with Links(case.nodes, rate) as links:
            ranks = on_nodes(links, seats, "tests.testbed.ranks:measure_steps", variants, rounds, urgent=True)
        steps |= {name: [rank[name] for rank in ranks] for name in variants}
    return steps


def seconds(ranks: list[Steps]) -> float:
    """Return the median over the steps of the slowest rank's seconds."""
    return statistics.median(max(step["seconds"] for step in steps) for steps in zip(*ranks, strict=True))


def counted(case: Case, variant: str, ranks: list[Steps]) -> tuple[int, int, int]:
    """Return the bytes that the last step moved inside all nodes, between them, and on the busiest link one way."""
    first = {node: ranks[rank][-1] for rank, node in reversed(list(enumerate(case.seats(variant))))}.values()
    busiest = max(max(node["out"], node["into"]) for node in first)
    return sum(node["inside"] for node in first), sum(node["out"] for node in first), busiest

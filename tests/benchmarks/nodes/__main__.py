"""What layout, placement and scatter/gather are worth on slow links: seconds of steps, beside the plan's bytes.

    python -m tests.benchmarks.nodes [--cases scatter/gather D\\&SP] [--rates 10mbit 100mbit] [--rounds 5]

Needs root. Each case is a launch of its own on nodes of the testbed, in which the same eight processes hold the plans
of all variants and step them in turn. Seconds are the median of the slowest rank's; `counted` is what the busiest
node's interface has sent in a step, `planned` the plan's busiest link in one direction.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from tests.benchmarks.nodes.cases import RANKS, Case, cases
from tests.testbed.links import Links, bits_per_second, why_not
from tests.testbed.ranks import on_nodes

HEAD = (
    "case",
    "rate",
    "variant",
    "planned (MB)",
    "counted (MB)",
    "link (s)",
    "step (s)",
    "of the first",
    "planned",
    "off",
)


def measure(case: Case, rounds: int) -> list[dict[str, list[dict[str, Any]]]]:
    """Run all variants of a case; return what each rank has seen of them."""
    nodes = [rank // case.per_node for rank in range(RANKS)]
    with Links(RANKS // case.per_node, case.rate) as links:
        return on_nodes(links, nodes, "tests.testbed.ranks:measure_steps", case.variants, rounds, urgent=True)


def rows(case: Case, ranks: Sequence[dict[str, list[dict[str, Any]]]]) -> list[list[str]]:
    """Return a row per variant of a case."""
    found, first = [], (0.0, 0.0)
    for name in case.variants:
        steps = [max(found["seconds"] for found in step) for step in zip(*(rank[name] for rank in ranks), strict=True)]
        seconds, planned = statistics.median(steps), float(case.traffic(name)[-1].busiest or 0)
        first = first if found else (seconds, planned)
        counted = max(rank[name][-1]["out"] for rank in ranks)
        ratios = seconds / first[0], planned / first[1]
        least = 8 * planned / bits_per_second(case.rate)
        numbers = [f"{n:.2f}" for n in (planned / 1e6, counted / 1e6, least, seconds)]
        numbers += [*(f"{ratio:.3f}" for ratio in ratios), f"{ratios[0] / ratios[1] - 1:+.1%}"]
        found.append([case.name, case.rate, name, *numbers])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[])
    parser.add_argument("--rates", nargs="+", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if why := why_not():
        sys.exit(why)
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    for case in cases():
        if case.name in (options.cases or [case.name]) and case.rate in (options.rates or [case.rate]):
            for row in rows(case, measure(case, options.rounds)):
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()

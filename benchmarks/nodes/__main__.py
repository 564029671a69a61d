"""What layout, placement and scatter/gather are worth on slow links: seconds of steps, beside the plan's bytes.

    python -m benchmarks.nodes [--cases scatter/gather D\\&SP] [--rates 10mbit 100mbit] [--rounds 5]

Needs root. Each case is a launch on nodes of the testbed in which the same eight processes hold the plans of all
variants and step them in turn (of several placements: a launch each). Seconds are the median of the slowest rank's;
`cores`: of the same steps with links that nothing limits, which is what this machine itself takes. By tier, the plan's
bytes of a step beside those that the interfaces of all nodes have carried; `busiest`: on one link, in one direction,
and the seconds that these bytes alone take. `off`: how far the measured ratio is from that of the busiest link's bytes.

`--cases pipeline`: interleaved against 1F1B, a stage on a node, where computations sleep; see `pipelines`. `--cases
contexts "contexts of nodes" "pairs of experts"`: what hides messages behind computation, and what does not; see
`replayed`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.nodes import pipelines, replayed
from benchmarks.nodes.cases import RANKS, Case, cases
from benchmarks.nodes.measured import counted, measure, seconds
from tests.testbed.links import bits_per_second, why_not

HEAD = ("case", "rate", "variant", "inside nodes: planned, counted (MB)", "between", "busiest", "link (s)", "cores (s)",
        "step (s)", "a sequence (s)", "of the first", "planned", "off")  # fmt: skip


def rows(case: Case, rounds: int) -> Iterator[list[str]]:
    """Yield a row per variant of a case."""
    free, limited = measure(case, None, min(rounds, 3)), measure(case, case.rate, rounds)
    base = (0.0, 0.0)
    for name in case.variants:
        inside, between = case.traffic(name)
        busiest = between.busiest or 0
        pairs = zip((inside.bytes, between.bytes, busiest), counted(case, name, limited[name]), strict=True)
        took = seconds(limited[name])
        base = base if any(base) else (took, busiest)
        ratio, planned = took / base[0], busiest / base[1]
        yield [case.name, case.rate, name, *(f"{plan / 1e6:.2f}, {count / 1e6:.2f}" for plan, count in pairs),
               f"{8 * busiest / bits_per_second(case.rate):.3f}", f"{seconds(free[name]):.3f}", f"{took:.3f}",
               f"{took / case.variants[name]['global_batch']:.3f}", f"{ratio:.3f}", f"{planned:.3f}",
               f"{ratio / planned - 1:+.1%}"]  # fmt: skip


def show(table: Iterator[list[str]]) -> None:
    for row in table:
        print(f"| {' | '.join(row)} |", flush=True)


def title(*names: Any) -> Mapping[str, Any] | None:
    print(f"| {' | '.join(map(str, names))} |\n|{'---|' * len(names)}", flush=True)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[])
    parser.add_argument("--rates", nargs="+", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if why := why_not():
        sys.exit(why)
    wanted = [case for case in cases() if not options.cases or case.name in options.cases]
    wanted = [case for case in wanted if not options.rates or case.rate in options.rates]
    print(f"{RANKS} ranks, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    if wanted:
        title(*HEAD)
    for case in wanted:
        show(rows(case, options.rounds))
    hiding = [case for case in replayed.cases() if not options.cases or case.name in options.cases]
    if hiding:
        print()
        title(*replayed.HEAD)
    for case in hiding:
        if not options.rates or case.rate in options.rates:
            show(replayed.rows(case, options.rounds))
    if not options.cases or "pipeline" in options.cases:
        print()
        title(*pipelines.HEAD)
        for rate in options.rates or pipelines.RATES:
            show(pipelines.rows(rate, options.rounds))


if __name__ == "__main__":
    main()

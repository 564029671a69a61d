"""Plans that hide messages behind computation, and plans that wait for them: keys that go around a ring against keys
that are gathered, experts inside a node against across.

Planned: a step over links that nothing limits is replayed, launch by launch and wait by wait, with each collective's
bytes, as the plan has them, over the rate. Links carry one collective after the other, in the order of their launches.
So what a rank computes between a launch and its wait hides as much of the message, and no more.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

from benchmarks.nodes.cases import DEALT, Case
from benchmarks.nodes.measured import Steps, counted, measure, seconds
from platform.predict.tier_traffic import iterate_transfers
from platform.train.replies import CollectiveSpan
from tests.testbed.links import bits_per_second

HEAD = ("case", "rate", "variant", "busiest: planned, counted (MB)", "link (s)", "cores (s)", "replayed (s)",
        "step (s)", "of the first", "replayed", "off")  # fmt: skip
CONTEXT = {"positions": "rope", "d_model": 128, "d_ff": 128, "heads": 4, "length": 8192, "vocab": 64, "layers": 2,
           "precision": "fp32", "microbatch": 1, "global_batch": 1}  # fmt: skip
EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_d_ff": 128, "capacity_factor": 1.0, "norm": "rmsnorm",
           "bias": False, "data": 4, "experts_of": 2, "d_model": 64, "heads": 4, "length": 256, "vocab": 64,
           "layers": 2, "precision": "fp32", "microbatch": 8, "global_batch": 32}  # fmt: skip


def cases() -> Iterator[Case]:
    """Yield all cases: of contexts, links that are too slow for anything to hide a message, and fast enough."""
    for rate in ("25mbit", "250mbit", "500mbit"):
        yield Case("contexts", rate, 1, {
            kind: {"context": 2, "context_kind": kind, **CONTEXT} for kind in ("gather", "ring", "heads")
        }, ranks=2)  # fmt: skip
    kinds: Mapping[str, Mapping[str, Any]] = {"gather": {}, "ring": {}, "nested": {"context_heads": 2}}
    yield Case("contexts of nodes", "100mbit", 2, {
        kind: {"context": 4, "context_kind": kind, **more, **CONTEXT} for kind, more in kinds.items()
    }, ranks=4)  # fmt: skip
    for rate in ("25mbit", "100mbit"):
        yield Case("pairs of experts", rate, 2, {DEALT: EXPERTS, "experts inside a node": EXPERTS}, ranks=4)


def rows(case: Case, rounds: int) -> Iterator[list[str]]:
    """Yield a row per variant of a case. Raises AssertionError if a step's launches are not those of the plan."""
    free, limited = measure(case, None, rounds), measure(case, case.rate, rounds)
    rate, base = bits_per_second(case.rate) / 8, (0.0, 0.0)
    for name in case.variants:
        busiest, carried = case.traffic(name)[-1].busiest or 0, counted(case, name, limited[name])[-1]
        on_link = bytes_on_link(case, name)
        assert round(sum(map(on_link, launches(free[name][0][-1])))) == busiest
        planned, took = replay_all(free[name], lambda c, of=on_link: of(c) / rate), seconds(limited[name])
        base = base if any(base) else (took, planned)
        ratio, expected = took / base[0], planned / base[1]
        yield [case.name, case.rate, name, f"{busiest / 1e6:.2f}, {carried / 1e6:.2f}", f"{busiest / rate:.3f}",
               f"{seconds(free[name]):.3f}", f"{planned:.3f}", f"{took:.3f}", f"{ratio:.3f}", f"{expected:.3f}",
               f"{ratio / expected - 1:+.1%}"]  # fmt: skip


def launches(step: Mapping[str, Any]) -> list[CollectiveSpan]:
    """Return the collectives of a measured step of a rank."""
    return [CollectiveSpan(*each) for each in step["collectives"]]


def bytes_on_link(case: Case, variant: str) -> Callable[[CollectiveSpan], float]:
    """Return the function that gives the bytes of a collective, launched by all groups of a variant, on the busiest
    link in one direction."""
    mesh, seats = case.plan(variant).mesh, case.seats(variant)

    @cache
    def share(op: str, axes: str) -> Fraction:
        """Return what the busiest link carries of all groups' bytes, over the bytes of one group."""
        links: Counter[tuple[int, str]] = Counter({(0, "out"): 0})
        groups, moved = mesh.list_groups(axes.split("+")), Fraction()
        for group in groups:
            for sender, receiver, _, part in iterate_transfers(op, len(group)):
                moved += part
                source, target = seats[group[sender]], seats[group[receiver]]
                if source != target:
                    links[source, "out"] += part
                    links[target, "in"] += part
        return max(links.values()) * len(groups) / moved

    return lambda c: float(c.bytes * share(c.op, c.axes))


def replay_all(ranks: Sequence[Steps], takes: Callable[[CollectiveSpan], float]) -> float:
    """Return the median over steps of the slowest rank's seconds, of measured steps that are replayed."""
    return statistics.median(
        max(replay(launches(step), step["seconds"], takes) for step in steps) for steps in zip(*ranks, strict=True)
    )


def replay(spans: Sequence[CollectiveSpan], ended: float, takes: Callable[[CollectiveSpan], float]) -> float:
    """Return the seconds of a step of a rank, measured as `ended`, with collectives each of which `takes` so long, one
    after the other, on the link; where it had to wait longer without a link, it still does.

    >>> hidden = CollectiveSpan("keys", "rotate", "context", 1, 0.0, 2.0, 2.0)
    >>> [replay([hidden], 5.0, lambda _: link) for link in (0.0, 2.0, 3.0)]
    [5.0, 5.0, 6.0]
    """
    at = [(c.start, False, i) for i, c in enumerate(spans)] + [(c.wanted, True, i) for i, c in enumerate(spans)]
    later = free = 0.0  # how much later than measured it is now, and when the link has sent all that was launched
    arrives: dict[int, float] = {}
    for when, waits, i in sorted(at):
        if waits:
            later = max(spans[i].end + later, arrives[i]) - spans[i].end
        else:
            arrives[i] = free = max(free, when + later) + takes(spans[i])
    return ended + later

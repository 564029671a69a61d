"""Pairs of plans for the same work, of which the testbed's links decide: layouts, placement, what is sent how often."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from platform.plan.core.plan import Plan
from platform.plan.language.numbers import factorizations
from platform.plan.language.tiers import Tiers
from platform.plan.reports.tier_traffic import TierTraffic, tier_traffic
from platform.planning.choose_schedule import schedule_of
from platform.planning.make_plan import is_legal, make_plan
from tests.harness.oracle import configure

RANKS = 8
# As slow as the links are, beside what a rank computes here: a GPU computes a thousand times as much as a share of
# these cores, and its links are a thousand times as fast.
NARROW = {"d_model": 32, "heads": 8, "length": 32, "vocab": 64, "layers": 2, "precision": "fp32"}
SQUARE = {"d_model": 64, "heads": 8, "length": 256, "vocab": 64, "layers": 4, "precision": "fp32"}
FEW = {"microbatch": 4, "global_batch": 4}  # sequences, so that not every one has a rank


@dataclass(frozen=True)
class Case:
    """Plans of the same work, by name, on RANKS ranks, `per_node` on a node, with links of `rate`. The first is the one
    that the others are compared with."""

    name: str
    rate: str
    per_node: int
    variants: Mapping[str, Mapping[str, Any]]

    def plan(self, variant: str) -> Plan:
        """Return the plan of one variant."""
        c = configure(**self.variants[variant])
        return make_plan(c, stage_of=schedule_of(c, c.parallel.data).placement)

    def traffic(self, variant: str) -> list[TierTraffic]:
        """Return what one variant sends per step inside and between nodes."""
        return tier_traffic(self.plan(variant), Tiers.of({"node": self.per_node}, RANKS))


def cases() -> Iterator[Case]:
    """Yield all cases."""
    stages = {"tensor": "1d", "axes": {"t": 4}, "pipeline": "1f1b", "stages": 2, "tied": False, **NARROW}
    batch = {"microbatch": 32, "global_batch": 256}
    yield Case("scatter/gather", "5mbit", 4, {
        name: {**stages, **batch, "scatter_gather": on} for name, on in (("off", False), ("on", True))
    })  # fmt: skip
    split = {"tensor": "1d", "axes": {"t": 2}, "branch": "dsp", "branch_axes": {"g": 2}, "data": 2, **NARROW}
    batch = {"microbatch": 128, "global_batch": 256}
    yield Case("D&SP", "25mbit", 2, {
        name: {**split, **batch, "order": order}
        for name, order in (("naive order", "outer"), ("topology-aware", "inner"))
    })  # fmt: skip
    best = best_cuboid()
    schemes = {
        "1d": {"tensor": "1d", "axes": {"t": 8}},
        "2d": {"tensor": "2d_gather", "axes": {"r": 2, "c": 4}},
        "3d, the cube": {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 2}},
        f"3d, the best cuboid {' x '.join(map(str, best.values()))}": {"tensor": "3d", "axes": best},
    }
    for rate in ("10mbit", "100mbit", "1gbit"):
        yield Case("tensor scheme", rate, 1, {name: {**how, **SQUARE, **FEW} for name, how in schemes.items()})


def best_cuboid() -> dict[str, int]:
    """Return the sizes of the axes of tensor=3d with which the busiest of RANKS links carries the fewest bytes."""
    found = []
    for sizes in factorizations(RANKS, 3):
        how = {"tensor": "3d", "axes": dict(zip("xyz", sizes, strict=True)), **SQUARE, **FEW}
        if is_legal(configure(**how), 1):
            found.append((Case("", "1gbit", 1, {"": how}).traffic("")[-1].busiest, sizes))
    return dict(zip("xyz", min(found)[1], strict=True))

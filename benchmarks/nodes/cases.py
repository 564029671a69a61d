"""Plans for the same work, of which the testbed's links decide: layouts, placement, what is sent how often."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from platform.plan.layout import find_factorizations
from platform.plan.plan import Plan
from platform.predict.choose_schedule import build_schedule
from platform.predict.make_plan import has_legal_plan, make_plan
from platform.predict.tier_traffic import NetworkTiers, TierTraffic, tier_traffic
from tests.harness.oracle import configure

RANKS = 8
How = Mapping[str, Any]  # arguments of `configure`
# As slow as the links are, beside what a rank computes here: a GPU computes a thousand times as much as a share of
# these cores, and its links are a thousand times as fast.
NARROW = {"d_model": 32, "heads": 8, "length": 32, "vocab": 64, "layers": 2, "precision": "fp32"}
SQUARE = {"d_model": 64, "heads": 8, "length": 256, "vocab": 64, "layers": 4, "precision": "fp32"}
WIDE = {"d_model": 256, "heads": 8, "length": 64, "vocab": 64, "layers": 2, "precision": "fp32"}
FEW = {"microbatch": 4, "global_batch": 4}  # sequences, so that not every one has a rank
SCHEMES = {"1d_sp": "t", "2d_gather": "rc", "3d": "xyz"}  # of the search for the best plan -> their axes
DEALT = "ranks dealt to the nodes in turn"  # in the name of a variant: the ranks of a node are not consecutive


@dataclass(frozen=True)
class Case:
    """Plans of the same work, by name, on `ranks` ranks, `per_node` on a node, with links of `rate`. The first is the
    one that the others are compared with."""

    name: str
    rate: str
    per_node: int
    variants: Mapping[str, How]
    ranks: int = RANKS

    @property
    def nodes(self) -> int:
        return self.ranks // self.per_node

    def seats(self, variant: str) -> tuple[int, ...]:
        """Return the node of each rank."""
        return tuple(rank % self.nodes if DEALT in variant else rank // self.per_node for rank in range(self.ranks))

    def plan(self, variant: str) -> Plan:
        """Return the plan of one variant."""
        c = configure(**self.variants[variant])
        return make_plan(c, stage_of=build_schedule(c, c.parallel.data).placement)

    def traffic(self, variant: str) -> list[TierTraffic]:
        """Return what one variant sends per step inside and between nodes."""
        tiers = NetworkTiers(("node",), tuple((str(node),) for node in self.seats(variant)))
        return tier_traffic(self.plan(variant), tiers)


def cases() -> Iterator[Case]:
    """Yield all cases."""
    stages = {"tensor": "1d", "axes": {"t": 4}, "pipeline": "1f1b", "stages": 2, "tied": False, **NARROW}
    batch = {"microbatch": 32, "global_batch": 256}
    yield Case("scatter/gather", "2500kbit", 4, {
        name: {**stages, **batch, "scatter_gather": on} for name, on in (("off", False), ("on", True))
    })  # fmt: skip
    split = {"tensor": "1d", "axes": {"t": 2}, "branch": "dsp", "branch_axes": {"g": 2}, "data": 2, **NARROW}
    batch = {"microbatch": 128, "global_batch": 256}
    yield Case("D&SP", "25mbit", 2, {
        name: {**split, **batch, "order": order}
        for name, order in (("naive order", "outer"), ("topology-aware", "inner"))
    })  # fmt: skip
    replicas = {
        "tensor": "1d",
        "axes": {"t": 2},
        "data": 4,
        **WIDE,
        "d_model": 128,
        "microbatch": 8,
        "global_batch": 32,
    }
    yield Case("placement", "10mbit", 2, {DEALT: replicas, "t inside a node": replicas})
    experts = {"experts": 8, "experts_per_token": 2, "expert_d_ff": 64, "capacity_factor": 1.0, "norm": "rmsnorm",
               "bias": False, "data": 8, "experts_of": 4, **NARROW, "microbatch": 4, "global_batch": 32}  # fmt: skip
    yield Case("experts", "2500kbit", 4, {DEALT: experts, "experts inside a node": experts})
    batch = {"microbatch": 16, "global_batch": 16}
    name, best = best_plan({**WIDE, **batch})
    yield Case("best plan", "25mbit", 2, {
        "1d_sp, t 8": {"tensor": "1d_sp", "axes": {"t": 8}, **WIDE, **batch},
        f"{name}, {DEALT}": best,
        name: best,
    })  # fmt: skip
    cuboid = best_cuboid()
    schemes = {
        "1d": {"tensor": "1d", "axes": {"t": 8}},
        "2d": {"tensor": "2d_gather", "axes": {"r": 2, "c": 4}},
        "3d, the cube": {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 2}},
        f"3d, the best cuboid {' x '.join(map(str, cuboid.values()))}": {"tensor": "3d", "axes": cuboid},
    }
    for rate in ("2500kbit", "100mbit", "1gbit"):
        yield Case("tensor scheme", rate, 1, {name: {**how, **SQUARE, **FEW} for name, how in schemes.items()})
    yield from scaling_cases()


def scaling_cases() -> Iterator[Case]:
    """Yield the cases of weak and strong scaling (Bian et al., tables 1 and 2) from 4 to 8 ranks: of a model of half as
    many weights, and of the same one."""
    meshes = {
        4: {"1d": (4,), "2d_gather": (2, 2), "3d": (2, 2, 1)},
        8: {"1d": (8,), "2d_gather": (2, 4), "3d": (2, 2, 2)},
    }
    names = {"1d": "t", "2d_gather": "rc", "3d": "xyz"}
    for ranks, widths in {4: (48, 64), 8: (64,)}.items():
        yield Case(f"scaling, {ranks} ranks", "2500kbit", 1, {
            f"{tensor}, d_model {width}": {
                **{"tensor": tensor, "axes": dict(zip(names[tensor], sizes, strict=True)), **SQUARE, **FEW},
                "d_model": width,
            }
            for width in widths for tensor, sizes in meshes[ranks].items()
        }, ranks)  # fmt: skip


def best_cuboid() -> dict[str, int]:
    """Return the sizes of the axes of tensor=3d with which the busiest of RANKS links carries the fewest bytes."""
    cuboids = []
    for sizes in find_factorizations(RANKS, 3):
        axes = dict(zip("xyz", sizes, strict=True))
        if cost := _cost({"tensor": "3d", "axes": axes, **SQUARE, **FEW}, 1):
            cuboids.append((cost, sizes))
    return dict(zip("xyz", min(cuboids)[1], strict=True))


def best_plan(work: How) -> tuple[str, How]:
    """Return, by a name for people, the plan of RANKS ranks without stages, two on a node, with which the busiest link
    carries the fewest bytes; of equals, all links. Stages are left out: bytes alone do not say how long they wait for
    each other."""
    plans = []
    for scheme, axes in SCHEMES.items():
        for data, *sizes in find_factorizations(RANKS, 1 + len(axes)):
            shape = dict(zip(axes, sizes, strict=True))
            how = {"tensor": scheme, "axes": shape, "data": data, **work, "microbatch": work["global_batch"] // data}
            if cost := _cost(how, 2):
                plans.append((cost, f"{scheme}, {' '.join(f'{a} {n}' for a, n in shape.items())}, data {data}", how))
    _, name, how = min(plans, key=lambda each: each[:2])
    return name, how


def _cost(how: How, per_node: int) -> tuple[int, int] | None:
    """Return the bytes on the busiest link between nodes, and on all; None if there is no such plan."""
    if not has_legal_plan(configure(**how), 1):
        return None
    between = Case("", "1gbit", per_node, {"": how}).traffic("")[-1]
    return between.busiest or 0, between.bytes

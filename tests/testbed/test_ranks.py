"""What ranks on several nodes send is what the plan says, by the counters of the kernel's interfaces."""

from __future__ import annotations

from functools import cache

import pytest

from platform.plan.step_collectives import communication
from platform.predict.make_plan import make_plan
from platform.predict.tier_traffic import NetworkTiers, tier_traffic
from tests.harness.oracle import configure, serial
from tests.testbed.links import Links, why_not
from tests.testbed.ranks import on_nodes

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

NODES = (0, 0, 1, 1)
WIDE = {"d_model": 32, "length": 64, "layers": 1, "microbatch": 32, "global_batch": 32}  # headers do not matter
QUICK = {
    "t inside": {"tensor": "1d", "axes": {"t": 2}, "data": 2, **WIDE, "microbatch": 16},
    "pipeline": {"tensor": "1d_sp", "axes": {"t": 2}, "pipeline": "1f1b", "stages": 2, **WIDE, "layers": 2,
                 "microbatch": 8, "tied": False},
}  # fmt: skip
OTHERS = {
    "t across": {"tensor": "1d", "axes": {"t": 4}, **WIDE},
    "3d": {"tensor": "3d", "axes": {"x": 1, "y": 2, "z": 2}, **WIDE},
    "2d": {"tensor": "2d_gather", "axes": {"r": 2, "c": 2}, **WIDE},
    "dsp": {"tensor": "1d", "axes": {"t": 2}, "branch": "dsp", "branch_axes": {"g": 2}, **WIDE},
    "dsp_csub": {"tensor": "1d", "axes": {"t": 2}, "branch": "dsp_csub", "branch_axes": {"g": 2}, **WIDE},
    "zero 3": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "zero": 3, **WIDE, "microbatch": 16},
}
VARIANTS = QUICK | OTHERS
NAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]


@cache
def together(quick):
    """By variant, of a step: bytes inside the nodes and between them, of the busier node, and the losses."""
    variants = QUICK if quick else OTHERS
    with Links(nodes=2, rate=None) as links:
        ranks = on_nodes(links, NODES, "tests.testbed.ranks:measure_steps", variants, 1)
    measured = {}
    for name in variants:
        one, other = (ranks[i][name][0] for i in (0, 2))  # one of each node
        out = one["out"], other["out"]
        measured[name] = one["inside"] + other["inside"], sum(out), max(out), [rank[name][0]["loss"] for rank in ranks]
    return measured


def fits(name, inside, out, busiest):
    """Whether a node's counters are what the plan of this name says, but for headers and barriers. Gloo's `reduce` in a
    group of 2, which only dsp_csub has, sends half as much again: it scatters parts of the sum, then gathers them."""
    plan = make_plan(configure(**VARIANTS[name]))
    near, far = tier_traffic(plan, NetworkTiers.build_tiers({"node": 2}, 4))
    again = communication(plan).get("reduce/g", 0) // 2
    pairs = ((near.bytes + again, inside), (far.bytes, out), (far.busiest, busiest))
    return all(planned <= counted < 1.1 * planned + 50_000 for planned, counted in pairs)


@pytest.mark.parametrize("name", NAMES)
def test_planned_bytes_are_what_the_interfaces_carry(name):
    """By tier, and on the busiest link."""
    counted = together(name in QUICK)[name][:3]
    assert fits(name, *counted)
    other = next(other for other in VARIANTS if other != name)
    assert not fits(other, *counted), "control: those of another plan"


@pytest.mark.parametrize("name", NAMES)
def test_and_they_compute_the_same(name):
    expected = serial(configure(**VARIANTS[name])).losses[1]
    losses = [loss for loss in together(name in QUICK)[name][3] if loss]
    assert losses == pytest.approx([expected] * len(losses), rel=1e-10, abs=0) and losses

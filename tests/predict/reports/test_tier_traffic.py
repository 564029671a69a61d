"""Messages and bytes by tier: SUPER's closed forms, and what ranks as threads really send."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from platform.plan.layout import Mesh, move_axes
from platform.plan.step_collectives import communication, step_collectives
from platform.predict.make_plan import make_plan
from platform.predict.tier_traffic import NetworkTiers, count_messages, iterate_transfers, tier_traffic
from tests.harness.oracle import MODELS, configure, run
from tests.harness.replayed_bytes import pair_traffic


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


def counts(mesh, axes, node, **how):
    """Inside a node and between nodes."""
    return tuple(count_messages(mesh, axes, NetworkTiers.build_tiers({"node": node}, mesh.world_size), **how))


@pytest.mark.parametrize(("n", "g", "node"), CASES)
def test_closed_forms(n, g, node):
    aware = Mesh.arrange_axes({"data": n // g, "g": g})
    naive = move_axes(aware, ["g"], outer=True)
    assert naive.shape == (("g", g), ("data", n // g))
    assert counts(naive, ["g"], node) == naive_messages(n, g, node)
    assert counts(aware, ["g"], node) == aware_messages(n, g, node)
    for mesh, closed in ((naive, naive_messages), (aware, aware_messages)):  # common layers on sub-grid 0: a g-th
        messages = counts(mesh, ["g"], node, from_zero=True)
        assert tuple(g * count for count in messages) == closed(n, g, node)
    assert sum(naive_messages(n, g, node)) == sum(aware_messages(n, g, node)) == n * g


def test_as_printed_the_cases_of_equations_4_and_5_are_swapped():
    def printed(n, g, node):
        return (n, n * (g - 1)) if n // g <= node else (node * g, (n - node) * g)

    wrong = [case for case in CASES if printed(*case) != naive_messages(*case)]
    assert wrong and all(n // g != node for n, g, node in wrong)


def test_other_sizes_are_counted():
    aware = Mesh.arrange_axes({"data": 4, "g": 3})
    assert counts(move_axes(aware, ["g"], outer=True), ["g"], 4) == (12, 24)
    assert counts(aware, ["g"], 4) == (28, 8)


def test_two_branch_axes_and_a_scheme_between():
    mesh = Mesh.arrange_axes({"data": 2, "t": 2, "a": 2, "b": 2})
    assert counts(mesh, ["a", "b"], 4) == (64, 0)
    assert counts(move_axes(mesh, ["a", "b"], outer=True), ["a", "b"], 4) == (16, 48)


def test_four_tiers():
    tiers = NetworkTiers.build_tiers({"node": 2, "zone": 8, "rack": 4}, 16)
    assert tiers.names == ("zone", "rack", "node")
    assert tiers.distance_labels == ("inside a node", "between nodes", "between racks", "between zones")
    assert [tiers.row_between(5, other) for other in (5, 4, 6, 1, 9)] == [0, 0, 1, 2, 3]
    mesh = Mesh.arrange_axes({"data": 4, "g": 4})
    assert count_messages(mesh, ["g"], tiers) == [32, 32, 0, 0]
    assert count_messages(move_axes(mesh, ["g"], outer=True), ["g"], tiers) == [16, 0, 16, 32]


PLANS = {
    "1d": {"tensor": "1d", "axes": {"t": 2}, "data": 4},
    "1d_sp, zero 3": {"tensor": "1d_sp", "axes": {"t": 4}, "data": 2, "zero": 3},
    "3d": {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 2}},
    "2d, panels": {"tensor": "2d", "axes": {"r": 2, "c": 2}, "data": 2},
    "pipeline": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "pipeline": "interleaved", "stages": 2, "chunks": 2,
                 "layers": 4, "recompute": "full"},
    "no scatter/gather": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "pipeline": "1f1b", "stages": 2,
                          "scatter_gather": False},
    "dsp": {"tensor": "1d", "axes": {"t": 2}, "branch": "dsp", "branch_axes": {"g": 2}, "data": 2},
    "dsp_csub": {"tensor": "1d", "axes": {"t": 2}, "branch": "dsp_csub", "branch_axes": {"g": 2}, "data": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_every_byte_has_a_sender_and_a_receiver(name):
    plan = make_plan(configure(**PLANS[name]))
    pairs = pair_traffic(plan)
    assert sum(size for _, size in pairs.values()) == sum(communication(plan).values())
    assert all(sender != receiver for sender, receiver in pairs)
    rows = tier_traffic(plan, NetworkTiers.build_tiers({"node": 2, "rack": 4}, plan.mesh.world_size))
    assert sum(row.bytes for row in rows) == sum(communication(plan).values())
    assert rows[0].busiest is None and all(row.busiest <= row.bytes + rows[-1].bytes for row in rows[1:])
    tiers, counted = NetworkTiers.build_tiers({"node": 2, "rack": 4}, plan.mesh.world_size), defaultdict(int)
    for (sender, receiver), (messages, _) in pairs.items():
        counted[tiers.row_between(sender, receiver)] += messages
    assert [row.messages for row in rows] == [counted[row] for row in range(len(rows))]
    everything = tier_traffic(plan, NetworkTiers.build_tiers({}, plan.mesh.world_size))
    assert [(row.tier, row.bytes) for row in everything] == [("everywhere", sum(row.bytes for row in rows))]


@pytest.mark.parametrize("name", PLANS)
def test_who_sends_to_whom_is_what_the_ranks_launch(name):
    """Stage by stage and sub-grid by sub-grid; fp64, so that every element has 8 bytes."""
    plan, results = run(configure(**PLANS[name]))
    launched = Counter(
        (launch.op, launch.group, launch.elements) for r in results for launch in r.log if launch.group[0] == r.rank
    )
    sizes = defaultdict(int)
    for (op, group, elements), times in launched.items():
        pairs = [(0, 1, 1, 1)] if op == "send" else iterate_transfers(op, len(group))
        for sender, receiver, _, share in pairs:
            sizes[group[sender], group[receiver]] += 8 * times * elements * share
    assert sizes == {pair: size for pair, (_, size) in pair_traffic(plan).items()}


def test_the_busiest_link_of_a_ring():
    """An all-reduce of 4 ranks on 2 nodes: each node sends what one rank does, 2(n-1)/n of its input."""
    plan = make_plan(configure("1d", {"t": 4}))
    [world] = {c.axes for _, c, _ in step_collectives(plan)}
    moved = communication(plan)["all_reduce/t"]
    inside, between = tier_traffic(plan, NetworkTiers.build_tiers({"node": 2}, 4))
    assert (world, inside.bytes, between.bytes) == (("t",), moved // 2, moved // 2)
    assert between.busiest == moved // 4


def test_a_ring_of_gpus_enters_a_node_once():
    """Of 8 ranks on 2 nodes, 2 of 8 links join the nodes: a quarter of all bytes, as the price counts them."""
    plan = make_plan(configure(data=8, zero=3, microbatch=1, global_batch=8))
    places, moved = NetworkTiers.build_tiers({"node": 4}, 8), sum(communication(plan).values())
    direct, rings = tier_traffic(plan, places), tier_traffic(plan, places, rings=True)
    assert [sum(row.bytes for row in rows) for rows in (direct, rings)] == [moved, moved]
    assert (rings[1].bytes, rings[1].busiest) == (moved // 4, moved // 8) and direct[1].bytes > moved // 2
    assert sum(row.messages for row in rings) == sum(row.messages for row in direct)


def test_experts_are_exchanged_inside_a_node_as_ranks_are_placed():
    """The axis expert is the innermost of the replicas'. The control: ranks that are dealt to the nodes in turn."""
    plan = make_plan(configure(**MODELS["experts"], data=4, experts_of=2, microbatch=2))
    moved = communication(plan)["all_to_all/expert"]
    inside, between = tier_traffic(plan, NetworkTiers.build_tiers({"node": 2}, 4))
    dealt = tier_traffic(plan, NetworkTiers(("node",), (("0",), ("1",), ("0",), ("1",))))[-1]
    assert inside.bytes >= moved and between.bytes < dealt.bytes >= moved
    assert between.busiest < dealt.busiest

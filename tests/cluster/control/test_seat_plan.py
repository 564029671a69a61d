"""Who sits where: what communicates most is nearest, whoever can stay stays, and no room is wasted."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from platform.cluster.control.recruiter import arrange_seats, find_rank_tiers, member_paths
from platform.cluster.crew.failures import Member
from platform.cluster.crew.job import local_tiers
from platform.plan.layout import Mesh


def cluster(sizes):
    """Members, by number, of nodes {path: how many}, dealt to the nodes in turn as Ray may start them."""
    left, paths = dict(sizes), {}
    while any(left.values()):
        for path in (p for p in sizes if left[p]):
            paths[len(paths)] = path
            left[path] -= 1
    return paths


def nodes(*sizes):
    return cluster({(f"n{i}",): size for i, size in enumerate(sizes)})


def within(paths, seats, block):
    """The innermost tier that each block of consecutive ranks is in, as its depth; 0: none."""
    blocks = [[paths[m] for m in seats[i : i + block]] for i in range(0, len(seats), block)]
    return [next((d for d in range(len(b[0]), 0, -1) if len({p[:d] for p in b}) == 1), 0) for b in blocks]


def test_neighbours_share_a_node_however_members_are_numbered():
    paths = nodes(4, 4)
    seats = arrange_seats(paths, Mesh.arrange_axes({"data": 4, "t": 2}), {})
    assert [paths[m][0] for m in seats] == ["n0"] * 4 + ["n1"] * 4
    assert within(paths, sorted(paths), 2) != [1] * 4, "negative control: in the order of their numbers they do not"


def test_three_tiers_and_three_axes():
    sizes = {(z, f"{z}{r}", f"{z}{r}{n}"): 4 for z in "ab" for r in "01" for n in "xy"}
    paths = cluster(sizes)
    seats = arrange_seats(paths, Mesh.arrange_axes({"stage": 2, "data": 4, "t": 4}), {})
    assert within(paths, seats, 4) == [3] * 8 and within(paths, seats, 8) == [2] * 4
    assert within(paths, seats, 16) == [1] * 2  # a stage in each zone


def test_uneven_nodes_leave_their_odd_members_out():
    """3, 4 and 3 workers, two per group: each group is on one node, and nobody sits across."""
    paths = nodes(3, 4, 3)
    seats = arrange_seats(paths, Mesh.arrange_axes({"data": 4, "t": 2}), {})
    assert within(paths, seats, 2) == [1] * 4
    paths = nodes(3, 3)
    assert within(paths, arrange_seats(paths, Mesh.arrange_axes({"data": 3, "t": 2}), {}), 2) == [
        1,
        1,
        0,
    ]  # that one must


def test_a_small_room_is_filled_before_a_large_one_is_broken():
    paths = cluster({("r0", "a"): 2, ("r1", "b"): 4, ("r1", "c"): 2})
    assert {paths[m][1] for m in arrange_seats(paths, Mesh.arrange_axes({"t": 2}), {})} == {"a"}
    assert {paths[m][0] for m in arrange_seats(paths, Mesh.arrange_axes({"data": 3, "t": 2}), {})} == {"r1"}


def test_whoever_can_stay_stays():
    paths = nodes(4, 4)
    mesh = Mesh.arrange_axes({"data": 4, "t": 2})
    before = arrange_seats(paths, mesh, {})
    keep = dict(enumerate(before))
    gone, new = before[5], 99
    del paths[gone], keep[5]
    paths[new] = ("n1",)
    assert arrange_seats(paths, mesh, keep) == [*before[:5], new, *before[6:]]
    assert arrange_seats(paths, Mesh.arrange_axes({"data": 3, "t": 2}), keep)[:5] == before[:5]


def test_a_spare_node_takes_a_group_that_no_longer_fits():
    """Of two groups of 4 on two nodes one loses a member: the other stays, and the third node takes all of it."""
    paths = cluster({("a",): 4, ("b",): 4, ("c",): 4})
    mesh = Mesh.arrange_axes({"data": 2, "t": 4})
    on = {name: [m for m, path in paths.items() if path == (name,)] for name in "abc"}
    keep = dict(enumerate([*on["a"], *on["b"]]))
    del paths[keep.pop(6)]
    assert arrange_seats(paths, mesh, keep) == [*on["a"], *on["c"]]


def test_survivors_of_ranks_that_are_no_more_take_what_is_free():
    paths = nodes(2, 2)
    on_b = [m for m, path in paths.items() if path == ("n1",)]
    keep = {2: on_b[0], 3: on_b[1]}
    assert arrange_seats(paths, Mesh.arrange_axes({"t": 2}), keep) == on_b


@pytest.mark.parametrize("seed", range(30))
def test_anything_is_seated_once_and_groups_fit_where_they_can(seed):
    chance = random.Random(seed)
    paths = cluster({(f"r{i % 3}", f"n{i}"): chance.randrange(1, 6) for i in range(chance.randrange(1, 7))})
    t = chance.randrange(1, 5)
    room = sum(list(paths.values()).count(path) // t for path in set(paths.values()))
    data = chance.randrange(1, max(2, len(paths) // t + 1))
    if data * t > len(paths):
        return
    members = list(paths)
    keep = dict(zip(chance.sample(range(20), min(8, len(members))), chance.sample(members, min(8, len(members))),
                    strict=True))  # fmt: skip
    seats = arrange_seats(paths, Mesh.arrange_axes({"data": data, "t": t}), {})
    assert len(set(seats)) == data * t and within(paths, seats, t).count(2) >= min(room, data)
    assert len(set(arrange_seats(paths, Mesh.arrange_axes({"data": data, "t": t}), keep))) == data * t


def test_tiers_of_members():
    """Those that not all of them tell do not count, nor do those that all of them share."""
    members = {
        3: Member(3, "a", 1, ("zone=z", "rack=0", "switch=s1")),
        4: Member(4, "b", 1, ("zone=z", "rack=0")),
        5: Member(5, "c", 1, ("zone=z", "rack=1", "switch=s2")),
    }
    paths = member_paths(members)
    assert paths[3] == ("zone=z", "rack=0", "a")
    tiers = find_rank_tiers([3, 5, 4], paths)
    assert tiers.names == ("rack", "node") and tiers.paths == (("rack=0", "a"), ("rack=1", "c"), ("rack=0", "b"))
    assert [tiers.row_between(a, b) for a, b in pairwise([0, 0, 2, 1])] == [0, 1, 2]
    assert find_rank_tiers([3], paths).names == ("node",)


def test_tiers_that_ray_and_slurm_tell(monkeypatch):
    monkeypatch.delenv("SLURM_TOPOLOGY_ADDR", raising=False)
    assert local_tiers(["zone", "rack"], {"rack": "7", "other": "x"}) == ["zone=", "rack=7"]
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "core.s[0-1].node17.example.org")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.switch.node")
    assert local_tiers(["rack"], {}) == ["rack=", "switch=core", "switch=s[0-1]"]
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "node17")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "node")
    assert local_tiers([], {}) == []

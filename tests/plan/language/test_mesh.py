from hypothesis import given
from hypothesis import strategies as st

from platform.plan.layout import Mesh, is_at_index_zero

MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda sizes: Mesh(tuple((f"a{i}", n) for i, n in enumerate(sizes)))
)


@given(MESHES)
def test_ranks_and_coordinates_are_one_to_one(mesh):
    coordinates = [mesh.rank_coordinates(rank) for rank in range(mesh.world_size)]
    assert [mesh.find_rank(c) for c in coordinates] == list(range(mesh.world_size))
    indices = [tuple(c.values()) for c in coordinates]
    assert indices == sorted(indices), "the last axis is fastest"


@given(MESHES, st.data())
def test_groups_partition_the_ranks(mesh, data):
    axes = data.draw(st.permutations(list(mesh.axes)).flatmap(lambda a: st.integers(0, len(a)).map(lambda n: a[:n])))
    groups = mesh.list_groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    for group in groups:
        assert [mesh.index_in_group(mesh.rank_coordinates(rank), axes) for rank in group] == list(
            range(mesh.count_ranks(axes))
        )
        others = [{a: i for a, i in mesh.rank_coordinates(r).items() if a not in axes} for r in group]
        assert others.count(others[0]) == len(group)


@given(st.integers(1, 4), st.integers(1, 3), st.permutations(["x", "y", "z"]))
def test_a_shifted_axis_begins_at_the_diagonal(side, x, order):
    """Its groups are those of the axis that it shifts, and its index 0 is where both indices are equal."""
    mesh = Mesh.arrange_axes({axis: x if axis == "x" else side for axis in order})
    groups = mesh.list_groups(["y-z"])
    assert {frozenset(group) for group in groups} == {frozenset(group) for group in mesh.list_groups(["y"])}
    assert mesh.count_ranks(["y-z"]) == side and mesh.order_axes(["y-z"]) == (("y-z",) if side > 1 else ())
    for group in groups:
        places = [mesh.rank_coordinates(rank) for rank in group]
        assert [mesh.index_in_group(at, ["y-z"]) for at in places] == list(range(side))
        assert [is_at_index_zero(["y-z"], at) for at in places] == [at["y"] == at["z"] for at in places]
        assert [(at["y"] - at["z"]) % side for at in places] == list(range(side))


def test_groups_of_a_small_mesh():
    mesh = Mesh.arrange_axes({"data": 2, "t": 3})
    assert mesh.list_groups(["t"]) == [(0, 1, 2), (3, 4, 5)]
    assert mesh.list_groups(["data"]) == [(0, 3), (1, 4), (2, 5)]
    assert mesh.list_groups(["t", "data"]) == [(0, 3, 1, 4, 2, 5)]  # the first axis is major
    assert mesh.order_axes({"t", "data"}) == ("data", "t")
    assert Mesh.arrange_axes({"data": 1, "t": 3}).order_axes(["t", "data"]) == ("t",)

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from platform.plan.layout import Layout, Mesh, common_prefix, local_shape, locate_block
from tests.harness.numpy_blocks import layouts

MESHES = [
    Mesh.arrange_axes({"a": 2, "b": 3}),
    Mesh.arrange_axes({"a": 2, "b": 2, "c": 2}),
    Mesh.arrange_axes({"a": 1, "b": 4}),
]
DIMS = ("length", "heads", "vocab")


@given(st.data(), st.sampled_from(MESHES), st.integers(1, 20), st.integers(1, 3))
def test_blocks_tile_every_tensor_exactly_once(data, mesh, vocab, unit):
    """Replicas share a block; blocks differ by one unit, and the first is the longest."""
    layout = data.draw(layouts(mesh, DIMS))
    sizes, units = {"length": 12, "heads": 7 * unit, "vocab": vocab}, {"heads": unit}
    longest = local_shape(DIMS, sizes, layout, mesh, units)
    count = np.zeros([sizes[d] for d in DIMS], int)
    for rank in range(mesh.world_size):
        at = mesh.rank_coordinates(rank)
        block = locate_block(DIMS, sizes, layout, mesh, at, units)
        for d, most, (offset, n) in zip(DIMS, longest, block, strict=True):
            assert most - units.get(d, 1) <= n <= most and offset % units.get(d, 1) == 0
            assert n == most or mesh.index_in_group(at, layout[d])
            (outer,) = locate_block([d], sizes, Layout.build_canonical({d: layout[d][:1]}), mesh, at, units)
            assert outer[0] <= offset and offset + n <= sum(outer), "blocks of two axes lie in the blocks of the first"
        count[tuple(slice(o, o + n) for o, n in block)] += 1
    assert (count == mesh.world_size // mesh.count_ranks(layout.axes)).all()


def test_the_first_axis_is_major():
    mesh = Mesh.arrange_axes({"a": 2, "b": 3})
    offsets = [
        locate_block(
            ["heads"], {"heads": 12}, Layout.build_canonical({"heads": ["b", "a"]}), mesh, mesh.rank_coordinates(rank)
        )[0][0]
        for rank in range(6)
    ]
    assert offsets == [0, 4, 8, 2, 6, 10]


def test_a_layout_is_a_value():
    layout = Layout.build_canonical({"heads": ["y", "z"], "batch": ["x"], "length": []})
    assert layout == Layout.build_canonical({"batch": ["x"], "heads": ("y", "z")})
    assert hash(layout) == hash(Layout.build_canonical(dict(layout)))
    assert layout["length"] == () and "length" not in list(layout) and layout.axes == ("x", "y", "z")
    assert layout.restrict_dims(["heads", "d_kv"]) == Layout.build_canonical({"heads": ["y", "z"]})
    assert str(layout) == "batch: x, heads: y+z" and str(Layout()) == "whole"


def test_a_tensor_may_exist_at_index_0_alone():
    layout = Layout.build_canonical({"heads": ["y"]}, ["g", "y"])
    assert layout.only == ("g",) and layout.axes == ("y",) and layout != Layout.build_canonical({"heads": ["y"]})
    assert str(layout) == "heads: y; only at g=0" and layout.restrict_dims(["d_kv"]).only == ("g",)
    assert layout.has_block({"y": 1, "g": 0}) and not layout.has_block({"y": 0, "g": 1})


@pytest.mark.parametrize(
    ("rules", "clash"),
    [
        ({"batch": ["x"], "heads": ["y"]}, None),
        ({"batch": ["x"], "heads": ["y", "x"]}, ("x", "batch", "heads")),
        ({"batch": ["x", "x"]}, ("x", "batch", "batch")),
    ],
)
def test_an_axis_serves_one_dim(rules, clash):
    assert Layout.build_canonical(rules).find_conflict() == clash


def test_the_longest_common_prefix():
    assert common_prefix("abc", "abd", "ab") == ("a", "b")
    assert common_prefix("abc") == ("a", "b", "c")
    assert common_prefix("abc", "") == common_prefix("ab", "ba") == ()

"""The one rule: as a table of known collectives, and executed on NumPy blocks for any layouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from platform.plan.layout import Layout, Mesh
from platform.plan.rule import (
    Conversion,
    RelayoutStep,
    contract_layouts,
    partial_axes,
    plan_operand_conversion,
    relayout_steps,
)
from tests.harness.numpy_blocks import equal, execute, layouts, split, whole

MESHES = [
    Mesh.arrange_axes({"a": 2, "b": 2}),
    Mesh.arrange_axes({"a": 2, "b": 3}),
    Mesh.arrange_axes({"a": 2, "b": 2, "c": 2}),
]
X, W, H = ("length", "batch", "d_model"), ("d_model", "d_ff"), ("length", "batch", "d_ff")


def layout(text: str) -> Layout:
    """'batch:data+x d_ff:y only:g'"""
    rules = {d: axes.split("+") for d, axes in (word.split(":") for word in text.split())}
    return Layout.build_canonical(rules, rules.pop("only", ()))


def steps(text: str) -> tuple[RelayoutStep, ...]:
    """'all_gather y 0, all_to_all z 2<1 @g': operation, axes, dim(<joined), at whose index 0 alone."""

    def one(op: str, axes: str, dims: str = "0", only: str = "") -> RelayoutStep:
        dim, _, joined = dims.partition("<")
        return RelayoutStep(
            op, tuple(axes.split("+")), int(dim), int(joined or 0), tuple(only.removeprefix("@").split())
        )

    return tuple(one(*words.split()) for words in text.split(",") if words.strip())


# The table: x, w and output layouts -> (forward, backward) of x, of w and of the output.

IN = "in"  # x w = h, a column-parallel projection; OUT: h w^T = x, a row-parallel one
OUT = "out"
TABLE = {
    # Megatron: f is nothing forward and an all-reduce backward, g the other way round
    "1d in": (IN, "", "d_ff:t", "d_ff:t", ("", "all_reduce t"), ("", ""), ("", "")),
    "1d out": (OUT, "d_ff:t", "d_ff:t", "", ("", ""), ("", ""), ("all_reduce t", "")),
    # sequence parallelism: the pair is all-gather and reduce-scatter
    "1d_sp in": (IN, "length:t", "d_ff:t", "d_ff:t", ("all_gather t 0", "reduce_scatter t 0"), ("", ""), ("", "")),
    "1d_sp out": (OUT, "d_ff:t", "d_ff:t", "length:t", ("", ""), ("", ""), ("reduce_scatter t 0", "all_gather t 0")),
    # the 3-D linear: gather x over y, gather w over x, reduce-scatter the product over z
    "3d in": (
        IN, "length:y batch:x d_model:z", "d_model:z+x d_ff:y", "length:z batch:x d_ff:y",
        ("all_gather y 0", "reduce_scatter y 0"), ("all_gather x 0", "reduce_scatter x 0"),
        ("reduce_scatter z 0", "all_gather z 0"),
    ),
    "3d out": (
        OUT, "length:z batch:x d_ff:y", "d_model:z+x d_ff:y", "length:y batch:x d_model:z",
        ("all_gather z 0", "reduce_scatter z 0"), ("all_gather x 0", "reduce_scatter x 0"),
        ("reduce_scatter y 0", "all_gather y 0"),
    ),
    # (n, 1, 1) is FSDP: gather the weight, reduce-scatter its gradient, never move an activation
    "fsdp": (
        IN, "batch:x", "d_model:x", "batch:x",
        ("", ""), ("all_gather x 0", "reduce_scatter x 0"), ("", ""),
    ),
    # data parallelism moves nothing here: the weight's gradient stays partial until the end of the step
    "data": (IN, "batch:data", "", "batch:data", ("", ""), ("", ""), ("", "")),
    # a split dim that the product wants whole is gathered before; nothing is partial, so the adjoint is a free slice
    "gather": (IN, "batch:t", "", "", ("all_gather t 1", "slice t 1"), ("", ""), ("", "")),
    # D&SP: split the batch outside, d_ff inside
    "dsp in": (IN, "batch:g", "d_ff:g", "d_ff:g", ("all_gather g 1", "reduce_scatter g 1"), ("", ""), ("", "")),
    # cSub: the stream is on sub-grid 0 alone; all-gather becomes broadcast, reduce-scatter becomes reduce
    "csub in": (IN, "only:g", "d_ff:g", "d_ff:g", ("broadcast g", "reduce g"), ("", ""), ("", "")),
    "csub out": (OUT, "d_ff:g", "d_ff:g", "only:g", ("", ""), ("", ""), ("reduce g", "broadcast g")),
    "csub common": (IN, "only:g", "only:g", "only:g", ("", ""), ("", ""), ("", "")),
    "csub 1d": (
        IN, "only:g", "d_ff:g+t", "d_ff:g+t",
        ("broadcast g", "reduce g, all_reduce t 0 @g"), ("", ""), ("", ""),
    ),
    # a whole weight that meets a wanted split is sliced for free; its gradient is padded and stays partial
    "slice": (IN, "", "", "d_ff:t", ("", "all_reduce t"), ("slice t 1", "pad t 1"), ("", "")),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_the_table(case):
    direction, x, w, out, *conversions = TABLE[case]
    x_dims, out_dims = (X, H) if direction == IN else (H, X)
    contraction = contract_layouts([(x_dims, layout(x), False), (W, layout(w), True)], (out_dims, layout(out)))
    assert [*contraction.inputs, contraction.output] == [Conversion(steps(f), steps(b)) for f, b in conversions]


def test_data_parallel_gradients_stay_partial():
    contraction = contract_layouts([(X, layout("batch:data"), False), (W, layout(""), True)], (H, layout("batch:data")))
    assert partial_axes(Layout(), contraction.axes) == ("data",)
    assert partial_axes(layout("d_model:data"), contraction.axes) == ()


@pytest.mark.parametrize(
    ("source", "target", "moves"),
    [
        ("batch:a", "d_model:a", "all_to_all a 2<1"),
        ("batch:a+b", "batch:a d_model:b", "all_to_all b 2<1"),
        ("batch:a", "batch:a+b", "slice b 1"),
        ("batch:a+b", "", "all_gather b 1, all_gather a 1"),  # minor first
        ("batch:a", "batch:b", "all_gather a 1, slice b 1"),
        ("length:a batch:b", "length:b batch:a", None),  # a swap: whatever it takes, checked below
        ("batch:a", "batch:a", ""),
        ("only:a", "d_model:a", "scatter a 2"),
        ("d_model:a", "only:a", "gather a 2"),
        ("only:a", "length:b", "slice b 0 @a, broadcast a"),  # what is broadcast is small
        ("length:b", "only:a", "drop a, all_gather b 0 @a"),
    ],
)
def test_the_fewest_moves(source, target, moves):
    chosen = relayout_steps(X, layout(source), layout(target))
    if moves is None:
        assert len(chosen) <= 4
    else:
        assert chosen == steps(moves)


def test_an_illegal_layout_is_named():
    with pytest.raises(ValueError, match="axis t would split both batch and d_ff"):
        contract_layouts([(X, layout("batch:t"), False), (W, layout("d_ff:t"), True)], (H, layout("batch:t d_ff:t")))


# On blocks of all ranks, for any layouts.


@given(st.data(), st.sampled_from(MESHES))
def test_any_layout_turns_into_any_other(data, mesh):
    source, target = data.draw(layouts(mesh, X)), data.draw(layouts(mesh, X))
    x = whole(X, mesh)
    blocks = execute(relayout_steps(X, source, target), split(x, X, source, mesh), mesh)
    assert equal(blocks, split(x, X, target, mesh))


def partial_blocks(dims, mesh, target, axes):
    """A gradient as a computation on `axes` leaves it in layout `target`, and the whole gradient: one part for every
    place along the axes that do not split the operand, their sum the whole; the same on ranks that differ in no axis
    of `axes`."""
    lacking = [a for a in axes if a not in target.axes]
    parts = [whole(dims, mesh, 1 + i) for i in range(mesh.count_ranks(lacking))]
    blocks = [
        split(parts[mesh.index_in_group(mesh.rank_coordinates(rank), lacking)], dims, target, mesh)[rank]
        for rank in range(mesh.world_size)
    ]
    return blocks, sum(parts)


@given(st.data(), st.sampled_from(MESHES), st.booleans())
def test_the_backward_steps_are_the_adjoint(data, mesh, parameter):
    """<A x, g> over the computation's places = <x, A^T g> over the tensor: the gradient in the source's layout is the
    block of the whole gradient, after a parameter's deferred sum."""
    source, target = data.draw(layouts(mesh, X)), data.draw(layouts(mesh, X))
    others = data.draw(st.lists(st.sampled_from(list(mesh.axes)), unique=True))
    axes = tuple(a for a in mesh.order_axes([*target.axes, *others]) if a not in target.only)
    try:
        conversion = plan_operand_conversion(X, source, target, axes, parameter=parameter)
    except ValueError:
        assume(False)
    gradient, total = partial_blocks(X, mesh, target, axes)
    gradients = execute(conversion.backward, gradient, mesh)
    if parameter and (partial := partial_axes(source, axes)):
        gradients = execute([RelayoutStep("all_reduce", partial, only=source.only)], gradients, mesh)
    assert equal(gradients, split(total, X, source, mesh))


@given(st.data(), st.sampled_from(MESHES), st.booleans())
def test_any_einsum_of_any_layouts(data, mesh, parameter):
    """x w = y on all ranks, with its gradients, equals the whole product."""
    x_dims, w_dims, y_dims = ("i", "j"), ("j", "k"), ("i", "k")
    lx, lw, ly = (data.draw(layouts(mesh, dims)) for dims in (x_dims, w_dims, y_dims))
    try:
        c = contract_layouts([(x_dims, lx, False), (w_dims, lw, parameter)], (y_dims, ly))
    except ValueError:
        assume(False)
    x, w, dy = whole(x_dims, mesh, 1), whole(w_dims, mesh, 2), whole(y_dims, mesh, 3)
    enter_x, enter_w = c.inputs
    local_x = execute(enter_x.forward, split(x, x_dims, lx, mesh), mesh)
    local_w = execute(enter_w.forward, split(w, w_dims, lw, mesh), mesh)

    def multiply(a, b):
        """Where the operation is computed."""
        assert all((p is None) == (q is None) for p, q in zip(a, b, strict=True))
        return [None if p is None else p @ q for p, q in zip(a, b, strict=True)]

    def turn(a):
        return [None if p is None else p.T for p in a]

    y = execute(c.output.forward, multiply(local_x, local_w), mesh)
    assert equal(y, split(x @ w, y_dims, ly, mesh))

    local_dy = execute(c.output.backward, split(dy, y_dims, ly, mesh), mesh)
    dx = execute(enter_x.backward, multiply(local_dy, turn(local_w)), mesh)
    dw = execute(enter_w.backward, multiply(turn(local_x), local_dy), mesh)
    if parameter and (partial := partial_axes(lw, c.axes)):
        dw = execute([RelayoutStep("all_reduce", partial, only=lw.only)], dw, mesh)
    assert equal(dx, split(dy @ w.T, x_dims, lx, mesh)), "gradient of x"
    assert equal(dw, split(x.T @ dy, w_dims, lw, mesh)), "gradient of w"


def test_negative_control_a_wrong_adjoint_shows():
    mesh = MESHES[0]
    gradient, total = partial_blocks(X, mesh, Layout(), ("a",))
    source = layout("length:a")
    right = plan_operand_conversion(X, source, Layout(), ("a",)).backward
    assert equal(execute(right, gradient, mesh), split(total, X, source, mesh))
    wrong = plan_operand_conversion(X, source, Layout(), ()).backward
    assert not equal(execute(wrong, gradient, mesh), split(total, X, source, mesh))
    assert not np.array_equal(gradient[0], gradient[2])

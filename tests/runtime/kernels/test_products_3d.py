"""The 3-D papers' three products (Bian et al. 2021, algorithms 1 to 6), literally: the layouts of their matrices, their
directions, forward and gradients, on cubes of threads in fp64.

A matrix with rows m over x and then y, columns n over z is A_ijl. Every element of a matrix lies on one rank.
"""

from __future__ import annotations

from math import prod

import pytest
import torch

from platform.plan.layout import Layout, Mesh, locate_block
from platform.plan.operation_plan import Einsum, EinsumGroup
from platform.plan.rule import contract_layouts
from platform.runtime.einsum import compute_einsums
from platform.runtime.residency import Operands
from tests.harness.threads import run_threads

SIZES = {"m": 18 * 4, "n": 18 * 2, "k": 36}  # every block of a (2,2,2) or (3,3,3) cube is a whole one
A_IJL, A_ILJ = {"m": "xy", "n": "z"}, {"m": "xz", "n": "y"}
B_LJI, B_IJL = {"n": "z", "k": "yx"}, {"m": "xy", "k": "z"}
C_ILJ, C_JLI = {"m": "xz", "k": "y"}, {"n": "y", "k": "zx"}

# product -> (dims, layout) of A, B and C; the directions in which A, B are gathered and C is scattered, and those in
# which the gradients of C, A, B are gathered and scattered.
# Algorithm 5 cannot run as printed: with its indices the directions are z, y, x (a slip of the paper).
PRODUCTS = {
    "AB": (("mn", A_IJL), ("nk", B_LJI), ("mk", C_ILJ), ("y", "x", "z"), ("z", "y", "x")),
    "AB^T": (("mn", A_IJL), ("kn", B_LJI), ("mk", C_ILJ), ("y", "x", "z"), ("z", "y", "x")),
    "A^TB": (("mn", A_ILJ), ("mk", B_IJL), ("nk", C_JLI), ("z", "y", "x"), ("x", "z", "y")),
}


def cube(p: int) -> Mesh:
    return Mesh.arrange_axes({"x": p, "y": p, "z": p})


def planned(product: str, again: bool = False):
    *matrices, _, _ = PRODUCTS[product]
    (a, a_on), (b, b_on), (c, c_on) = ((tuple(dims), Layout.build_canonical(on)) for dims, on in matrices)
    contraction = contract_layouts([(a, a_on, False), (b, b_on, False)], (c, c_on))
    einsum = Einsum(0, a, b, c, contraction.inputs[1], contraction.output, again)
    group = EinsumGroup(contraction.inputs[0], (einsum,), regathered=again)
    return contraction, group, ((a, a_on), (b, b_on), (c, c_on))


@pytest.mark.parametrize("product", PRODUCTS)
def test_directions(product):
    """Three collectives forward; backward the gradient of C is gathered once and shared by both products."""
    *_, forward, backward = PRODUCTS[product]
    c, _, _ = planned(product)
    (a, b), out = c.inputs, c.output
    one = lambda steps, op: (len(steps), steps[0].op, steps[0].axes) == (1, op, steps[0].axes)  # noqa: E731
    assert all(one(s, "all_gather") for s in (a.forward, b.forward, out.backward))
    assert all(one(s, "reduce_scatter") for s in (out.forward, a.backward, b.backward))
    assert tuple(s[0].axes[0] for s in (a.forward, b.forward, out.forward)) == forward
    assert tuple(s[0].axes[0] for s in (out.backward, a.backward, b.backward)) == backward


def check(product: str, p: int, again: bool) -> None:
    mesh = cube(p)
    _, group, (a, b, c) = planned(product, again)
    draw = torch.Generator().manual_seed(0)
    random = lambda dims: torch.randn([SIZES[d] for d in dims], dtype=torch.float64, generator=draw)  # noqa: E731
    whole = [random(dims).requires_grad_() for dims, _ in (a, b)]
    upstream = random(c[0])
    expected = torch.einsum(f"{''.join(a[0])},{''.join(b[0])}->{''.join(c[0])}", *whole)
    expected.backward(upstream)

    def mine(tensor, operand, communicator):
        dims, layout = operand
        where = locate_block(dims, SIZES, layout, mesh, communicator.coordinates)
        return tensor[tuple(slice(o, o + n) for o, n in where)]

    def work(communicator):
        torch.set_num_threads(1)
        x, y = (mine(t.detach(), o, communicator).clone().requires_grad_() for t, o in zip(whole, (a, b), strict=True))
        (z,) = compute_einsums(Operands(communicator, group), x, [y])
        z.backward(mine(upstream, c, communicator))
        for actual, tensor, operand in ((z, expected, c), (x.grad, whole[0].grad, a), (y.grad, whole[1].grad, b)):
            wanted = mine(tensor.detach(), operand, communicator)
            assert (actual - wanted).abs().max() <= 1e-10 * tensor.abs().max()
        return communicator.moved

    moved = sum(sum(m.values()) for m in run_threads(mesh, work))
    sizes = [prod(SIZES[d] for d in dims) for dims, _ in (a, b, c)]
    collectives = 2 * sum(sizes) + (sizes[0] + sizes[1] if again else 0)
    assert moved == (p - 1) * collectives * 8  # each gathers or scatters a whole matrix, p - 1 times over


@pytest.mark.parametrize("again", [False, True], ids=["keep", "again"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_product_on_a_cube_of_8(product, again):
    check(product, 2, again)


@pytest.mark.parametrize("product", PRODUCTS)
def test_product_on_a_cube_of_27(product):
    check(product, 3, again=True)


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_element_lies_on_one_rank(product):
    """The papers' memory: each matrix takes 1 / p^3 of itself on every rank."""
    _, _, matrices = planned(product)
    for dims, layout in matrices:
        places = {
            tuple(locate_block(dims, SIZES, layout, cube(2), cube(2).rank_coordinates(rank)))
            for rank in range(cube(2).world_size)
        }
        assert len(places) == 8 and all(prod(n for _, n in b) == prod(SIZES[d] for d in dims) // 8 for b in places)

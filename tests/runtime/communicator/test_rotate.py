"""Rotation: every rank of a group gives a tensor to the next and gets the one before's, in every transport."""

from __future__ import annotations

import pytest
import torch

from platform.plan.layout import Mesh
from platform.plan.operation_plan import TRAFFIC
from platform.predict.make_plan import make_plan
from platform.predict.tier_traffic import iterate_transfers
from platform.runtime import process_groups
from tests.doubles.strict_nccl import Stuck, run_strictly
from tests.harness.oracle import configure
from tests.harness.threads import run_threads

SIZES = [(1, torch.float64), (3, torch.float32), (70_000, torch.float32), (5, torch.bfloat16)]


def rotated(communicator, axis="data") -> bool:
    """Whether several rotations at once, waited for in reverse, beside another collective, give what they should."""
    n, me = communicator.mesh.count_ranks((axis,)), communicator.group_index((axis,))
    tensors = [torch.arange(size, dtype=dtype) % 100 + me for size, dtype in SIZES]
    communicator.log = []
    handles = [communicator.launch("rotate", x, (axis,)) for x in tensors]
    total = communicator.launch("all_reduce", torch.ones(1), (axis,))
    received = [h.wait() for h in reversed(handles)][::-1]
    assert total.wait().item() == n
    assert [launch.elements for launch in communicator.log] == [*(size for size, _ in SIZES), 1]
    counted = communicator.moved[f"rotate/{axis}"]
    expected = sum(n * size * dtype.itemsize for size, dtype in SIZES)
    assert counted == (
        expected if communicator.rank == communicator.mesh.group_of_rank(communicator.rank, (axis,))[0] else 0
    )
    before = [x - me + (me - 1) % n for x in tensors]
    return all(map(torch.equal, received, before)) and not any(map(torch.equal, received, tensors))


def rotated_over_gloo(config, plan, communicator) -> bool:
    return rotated(communicator)


SHAPES = ({"data": 2}, {"data": 3}, {"data": 4}, {"data": 3, "t": 2})
MESHES = [Mesh.arrange_axes({"stage": 1, **shape}) for shape in SHAPES]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_among_threads(mesh):
    assert all(run_threads(mesh, rotated))


@pytest.mark.parametrize("data", [2, 3])
def test_over_gloo(data, pool):
    c = configure(data=data, microbatch=1, global_batch=data)
    assert all(pool.run(rotated_over_gloo, c, make_plan(c)))


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_as_strictly_as_nccl(mesh, early, monkeypatch):
    assert all(run_strictly(monkeypatch, mesh, rotated, [("data",)], early=early)[1])


def test_two_messages_one_after_the_other_are_stuck(monkeypatch):
    """The negative control: where all send first, nobody receives."""

    def apart(x, out, members, me, group):
        sending = process_groups.dist.isend(x, members[(me + 1) % len(members)], group)
        receiving = process_groups.dist.irecv(out, members[me - 1], group)
        return lambda: [sending.wait(), receiving.wait()]

    monkeypatch.setattr(process_groups, "_start_nccl_rotation", apart)
    with pytest.raises(Stuck):
        run_strictly(monkeypatch, MESHES[1], rotated, [("data",)])


@pytest.mark.parametrize("n", [2, 3, 5])
def test_messages_carry_the_bytes_that_are_counted(n):
    assert sum(share for *_, share in iterate_transfers("rotate", n)) == TRAFFIC["rotate"](n, 1)

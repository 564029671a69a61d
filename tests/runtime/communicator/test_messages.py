"""Collectives of gloo that are built from messages give what its own give, in whatever order they are waited for."""

from __future__ import annotations

import pytest
import torch

from platform.plan.operation_plan import TRAFFIC
from platform.predict.make_plan import make_plan
from tests.harness.oracle import configure


def gathered_and_summed(config, plan, communicator) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Several collectives at once along `data`, waited for in reverse, of which every second is over the world too."""
    n, rank = plan.mesh.count_ranks(("data",)), communicator.rank
    axes = [("data",), plan.mesh.order_axes(plan.mesh.axes)]
    tensors = [torch.arange(n * size, dtype=dtype) + 100 * rank for size, dtype in SIZES]
    gathers = [communicator.launch("all_gather", x, axes[i % 2]) for i, x in enumerate(tensors)]
    sums = [communicator.launch("reduce_scatter", x, axes[i % 2]) for i, x in enumerate(tensors)]
    summed = [s.wait() for s in reversed(sums)][::-1]
    gathered = [g.wait() for g in reversed(gathers)][::-1]
    into = torch.full((n, 3), -1.0)
    into[rank] = rank
    communicator.launch("all_gather", into[rank], ("data",), into=into).wait()
    assert into.tolist() == [[float(i)] * 3 for i in range(n)]
    return gathered, summed, sum(communicator.moved.values())


SIZES = [(1, torch.float64), (3, torch.float32), (70_000, torch.float32), (5, torch.bfloat16), (2, torch.int64)]


@pytest.mark.parametrize("data", [2, 3])
def test_they_are_what_they_are_called(data, pool):
    c = configure(data=data, microbatch=1, global_batch=data)
    for rank, (gathered, summed, _) in enumerate(pool.run(gathered_and_summed, c, make_plan(c))):
        for (size, dtype), whole, part in zip(SIZES, gathered, summed, strict=True):
            each = [torch.arange(data * size, dtype=dtype) + 100 * r for r in range(data)]
            assert torch.equal(whole, torch.cat(each))
            total = each[0].clone()
            for x in each[1:]:
                total += x
            assert torch.equal(part, total.view(data, -1)[rank])


def test_bytes_are_counted_once(pool):
    c = configure(data=2, microbatch=1, global_batch=2)
    moved = sum(nbytes for *_, nbytes in pool.run(gathered_and_summed, c, make_plan(c)))
    expected = sum(
        (TRAFFIC["all_gather"](2, 2 * n) + TRAFFIC["reduce_scatter"](2, 2 * n)) * d.itemsize for n, d in SIZES
    )
    assert moved == expected + TRAFFIC["all_gather"](2, 3) * 4

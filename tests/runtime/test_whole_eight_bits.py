"""Blocks with products in 8 bits, compiled whole: equal to one process in fp64, and to it in every 8-bit number."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from platform.runtime import compiled_blocks, eight_bits
from tests.harness.oracle import compare, count_flips, run
from tests.runtime.oracle.test_eight_bits import CASES, PLANS, SPECIAL, configured, one_process, small_mx
from tests.runtime.test_whole_tensor_blocks import fast, traced_blocks

__all__ = ["fast", "traced_blocks", "small_mx"]

FEW = [("1d", "tensor")]
NEVER_WHOLE = "sub-grids", "ring"  # as `reasons_against_whole_blocks` says, and of rows of experts
MORE = [case for case in CASES if case not in FEW and case[0] not in NEVER_WHOLE]
MORE += [(name, scale) for name, (scale, _) in SPECIAL.items() if "rows" not in name]


def compiling(name: str, scale: str):
    c = configured(scale, **(PLANS | {special: how for special, (_, how) in SPECIAL.items()})[name])
    c.train.compile, c.train.compile_collectives = "on", True
    return c


@pytest.mark.parametrize(
    "name, scale", [*FEW, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)], ids=str
)
def test_they_compute_the_same(name, scale, traced_blocks):
    """Loss, gradients, two updates; no number of 8 bits is another one."""
    c = compiling(name, scale)
    plan, ranks = run(c)
    assert traced_blocks and all(traced_blocks)
    compare(c, plan, ranks, expected := one_process(c))
    assert count_flips(c, plan, ranks, expected) == 0


@pytest.mark.full
def test_the_compiler_makes_kernels_of_them(monkeypatch):
    """Of torch.compile's own, on a CPU; function by function are the same numbers."""
    monkeypatch.undo()  # of `fast`
    c = configured("block")
    c.train.compile = "on"
    plan, ranks = run(c)
    compare(c, plan, ranks, one_process(c))


def test_negative_control_operands_that_are_not_rounded(monkeypatch):
    """A block that was traced with them is another one."""
    compiled_blocks._partition_graph.cache_clear()
    monkeypatch.setattr(eight_bits, "round_tiles", lambda x, tile, factors, dtype: x)
    monkeypatch.setattr(eight_bits.ScaledMatrix, "decode", lambda matrix, dtype: matrix.values.to(dtype))
    c = compiling("zero 3", "block")
    plan, ranks = run(c)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        compare(c, plan, ranks, one_process(c))


def test_a_maximum_over_ranks_is_not_taken_again():
    """A backward pass that made it again would wait for a collective that its forward pass has launched."""

    def compute(x):
        operand = torch.ops.platform.operand(x)
        largest = operand.amax()
        sent = torch.ops.platform.launch(largest, x, 0, "", [])
        return operand / torch.ops.platform.wait(largest, sent, 0, [])

    graph = make_fx(compute)(torch.ones(2, 2))
    compiled_blocks._mark_rounded_operands(graph)
    marked = {
        node.name.partition("_")[0] for node in graph.graph.nodes if "recompute" in node.meta and node.op != "output"
    }
    assert marked == {"amax", "div"}

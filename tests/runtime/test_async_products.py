"""Products that are one with the gather of what they read, or the scatter of what they give: the numbers of one
process, the bytes and launches of products that wait, in threads, over gloo, and on a double of NCCL whose fused
operations wait in the stream of the rank."""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from threading import Lock

import pytest
import torch

from platform.plan.layout import Mesh
from platform.plan.step_collectives import process_groups
from platform.predict.make_plan import make_plan
from platform.runtime import communicator as communicators
from platform.runtime import parallel_ops
from platform.runtime.communicator import CollectiveHandle, Communicator
from tests.doubles import strict_nccl
from tests.doubles.strict_nccl import run_strictly
from tests.harness.oracle import MODELS, compare, compute, configure, examine, run, serial
from tests.harness.threads import ThreadGroups
from tests.runtime.test_compiled_block import FROZEN, TUNE
from tests.runtime.test_compiled_block import compiling as compiling_locally
from tests.runtime.test_whole_tensor_blocks import compiling, fast, traced_blocks, without_waits

__all__ = ["fast", "traced_blocks"]

ON = {"layers": 1, "async_products": "on"}
SEQUENCE = {"tensor": "1d_sp", "axes": {"t": 2}, **ON}
LLAMA = {**SEQUENCE, **MODELS["llama"]}
CUBE = {"tensor": "3d", "axes": {"x": 1, "y": 2, "z": 2}, **ON}
TWICE = {"data": 2, "microbatch": 2}
PLANS = {
    "1d_sp": SEQUENCE,
    "1d_sp, data 2, zero 3, gathered again": {**LLAMA, **TWICE, "zero": 3, "gathered": "again"},
    "1d_sp, weight gradients apart": {**SEQUENCE, "pipeline": "zb_h1", "stages": 2, "layers": 2, "microbatch": 2},
}
MORE = {
    "3d, recomputed": {**CUBE, "recompute": "full"},
    "1d_sp, recomputed": {**SEQUENCE, "recompute": "full", "layers": 2},
    "1d_sp, grouped heads, 4 ranks": {**LLAMA, "axes": {"t": 4}},
    "1d_sp, data 2": {**SEQUENCE, **TWICE},
    "1d_sp, data 2, zero 1": {**LLAMA, **TWICE, "zero": 1},
    "1d_sp, zero 3, recomputed": {**SEQUENCE, **TWICE, "zero": 3, "recompute": "full"},
    "1d_sp, selective": {**SEQUENCE, "recompute": "selective"},
    "1d_sp, interleaved": {**LLAMA, "pipeline": "interleaved", "stages": 2, "chunks": 2, "layers": 4, "microbatch": 2},
    "1d_sp, 1f1b": {**SEQUENCE, "pipeline": "1f1b", "stages": 2, "layers": 2, "microbatch": 1},
    "1d_sp, encoder and decoder": {**SEQUENCE, **MODELS["t5"]},
    "1d_sp, padding": {**SEQUENCE, **MODELS["bert"]},
    "1d_sp, documents, dropout": {**SEQUENCE, **MODELS["packed_gpt"], "dropout": 0.2},
    "1d_sp, latent": {**SEQUENCE, **MODELS["latent"]},
    "1d_sp, modern": {**SEQUENCE, **MODELS["modern"], "layers": 2},
    "1d_sp, experts": {**SEQUENCE, **MODELS["experts"], "layers": 2},
    "1d_sp, frozen": {**SEQUENCE, **FROZEN},
    "1d_sp, adapters": {**LLAMA, "tune": TUNE},
    "1d_sp, context": {**LLAMA, "context": 2},
    "3d": CUBE,
    "3d, 8 ranks, gathered again": {**CUBE, **MODELS["llama"], "axes": {"x": 2, "y": 2, "z": 2}, "gathered": "again"},
    "dsp": {**ON, "branch": "dsp", "branch_axes": {"g": 2}},
}
EVERY = [*PLANS, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)]


def configure_alike(**how):
    """A small model, parts of which may be frozen or adapted."""
    c = compiling_locally(**how)
    c.train.compile = "off"
    return c


def fused(plan) -> Counter[str]:
    return Counter(group.fuses for o in plan.operations.values() for group in o.groups if group.fuses)


@pytest.fixture
def calls(monkeypatch):
    """How often ranks multiply as parts come, or leave."""
    counts = Counter()
    for name in ("gather_and_multiply", "multiply_and_scatter"):
        method = getattr(Communicator, name)

        def count(self, *arguments, method=method, name=name):
            counts[name] += 1
            return method(self, *arguments)

        monkeypatch.setattr(Communicator, name, count)
    return counts


@pytest.mark.parametrize("name", EVERY)
def test_they_compute_and_move_the_same(name, calls):
    """Each collective is launched as often, over the same ranks, by products that wait for it."""
    c = configure_alike(**(PLANS | MORE)[name])
    plan, results = run(c)
    examine(c, plan, results)
    assert fused(plan) and min(calls["gather_and_multiply"], calls["multiply_and_scatter"]) > 0
    c.tensor.async_products = "off"
    calls.clear()
    waiting, others = run(c)
    assert not fused(waiting) and not calls
    for result, other in zip(results, others, strict=True):
        assert Counter(result.log) == Counter(other.log) and result.moved == other.moved


WHOLE = {
    "1d_sp": SEQUENCE,
    "1d_sp, data 2, zero 3, gathered again": PLANS["1d_sp, data 2, zero 3, gathered again"],
    "1d_sp, weight gradients apart": PLANS["1d_sp, weight gradients apart"],
    **{name: MORE[name] for name in MORE if not {"1f1b", "context", "selective"} & {*name.split(", ")}},
}


@pytest.mark.parametrize(
    "name", [name if name == "1d_sp" else pytest.param(name, marks=pytest.mark.full) for name in WHOLE]
)
def test_blocks_with_them_are_compiled_whole(name, traced_blocks):
    """One forward and one backward pass, with the launches and bytes of blocks that run function by function, in their
    order but for buckets that are full within a block."""
    c = compiling(**WHOLE[name])
    plan, results = run(c)
    assert fused(plan) and traced_blocks and all(traced_blocks)
    for block in traced_blocks:
        code = block.functions.forward.graph.code + block.functions.backward.graph.code
        assert "gather_and_multiply" in code and "multiply_and_scatter" in code
    examine(c, plan, results)
    c.train.compile = "off"
    for result, other in zip(results, run(c)[1], strict=True):
        assert Counter(result.log) == Counter(other.log) and result.moved == other.moved
        inside, outside = ([x for x in r.log if x.axes == ("t",)] for r in (result, other))
        assert inside == outside


def test_compiled_blocks_with_and_without_them_are_equal_in_every_bit(traced_blocks):
    """The operators of a graph compute what products that wait do; and the losses are those of blocks by function."""
    c = compiling(**LLAMA)
    asynchronous = run(c)[1]
    c.tensor.async_products = "off"
    waiting = run(c)[1]
    c.train.compile, c.tensor.async_products = "off", "on"
    assert traced_blocks and all(traced_blocks)
    for result, other, by_function in zip(asynchronous, waiting, run(c)[1], strict=True):
        assert result.losses == other.losses
        assert by_function.losses == pytest.approx(other.losses, rel=1e-14)  # a CPU's kernels may round apart
        assert all(torch.equal(g, other.gradients[parameter]) for parameter, g in result.gradients.items())


def test_negative_control_a_compiled_block_that_does_not_wait(monkeypatch):
    """What a block multiplies before it has come computes other numbers."""
    start = ThreadGroups._start_collective
    monkeypatch.setattr(ThreadGroups, "_start_collective", without_waits(start))
    c = compiling(**SEQUENCE)
    with pytest.raises(Exception):  # noqa: B017  (numbers that differ, or none)
        compare(c, *run(c), serial(c))


def test_over_gloo(pool):
    c = configure(**LLAMA, **TWICE)
    plan = make_plan(c)
    examine(c, plan, pool.run(compute, c, plan))


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.full)], ids=["late", "early"])
@pytest.mark.parametrize("made_by", [configure, compiling], ids=["by function", "whole"])
@pytest.mark.parametrize("name", ["1d_sp, recomputed", pytest.param("3d, recomputed", marks=pytest.mark.full)])
def test_on_gpus_as_strict_as_they_may_be(name, made_by, early, monkeypatch):
    """A fused operation waits for its peers in the stream that computes, beside what NCCL has under way."""
    traced_by = Lock()  # torch traces in one thread at a time

    def trace(*arguments, trace=parallel_ops.compile_block_with_own_backward):
        with traced_by:
            return trace(*arguments)

    monkeypatch.setattr(parallel_ops, "compile_block_with_own_backward", trace)
    c = made_by(**MORE[name])
    plan = make_plan(c)
    work, connections = partial(compute, c, plan), 1  # as under tensor axes
    axes = process_groups(plan)
    world, results = run_strictly(monkeypatch, plan.mesh, work, axes, connections=connections, early=early)
    examine(c, plan, results)
    assert min(world.symmetric.calls["gather"], world.symmetric.calls["scatter"]) > 0


def torch_operations(c, plan, communicator):
    """What the ranks of a group get of torch's own, as they are without memory that GPUs share, and of ours."""
    from torch.distributed import _symmetric_memory as torch_own

    draw = torch.Generator().manual_seed(communicator.rank)
    results = []
    for dim in (0, 1):
        x, gradient = (torch.randn(*shape, dtype=torch.float64, generator=draw) for shape in ((4, 6, 5), (4, 6, 3)))
        weights = [torch.arange(5.0 * n, dtype=torch.float64).view(n, 5).t() for n in (3, 7)]  # not contiguous
        name = communicator._groups["t",].group_name
        gathered, products = torch_own._fused_all_gather_matmul_fallback(x, weights, dim, name)
        ours, ours_too = communicator.gather_and_multiply(x, weights, ("t",), dim)
        scattered = torch_own._fused_matmul_reduce_scatter_fallback(gradient, weights[0].t(), "sum", dim, name)
        results += [(gathered, ours), *zip(products, ours_too, strict=True)]
        results.append((scattered, communicator.multiply_and_scatter(gradient, weights[0].t(), ("t",), dim)))
    return [(theirs.shape == mine.shape, (theirs - mine).abs().max().item()) for theirs, mine in results]


def test_our_operations_mean_what_those_of_torch_do(pool):
    c = configure(**SEQUENCE)
    for by_rank in pool.run(torch_operations, c, make_plan(c)):
        assert len(by_rank) == 8 and all(alike and difference < 1e-12 for alike, difference in by_rank)


MESH = Mesh.arrange_axes({"stage": 1, "t": 2})


@pytest.mark.parametrize("lost", [False, True])
def test_a_mesh_that_is_formed_again_waits_for_its_collectives(lost, monkeypatch):
    """torch knows shared memory by the name of its group, which the next mesh of a process has again, and by numbers
    that each process counts. One rank's process is new, and does as the other does."""
    begin = strict_nccl.NamesOfRanks.__init__

    def remember(self, world):
        begin(self, world)
        if lost:
            self._names[1].add("2_3")

    monkeypatch.setattr(strict_nccl.NamesOfRanks, "__init__", remember)

    def multiply(groups):
        x, w = torch.full((2, 3), 1.0 + groups.rank), torch.ones(3, 4)
        gathered, (product,) = groups.gather_and_multiply(x, [w], ("t",), 0)
        again = groups.multiply_and_scatter(gathered, w, ("t",), 0)
        return gathered[:, 0].tolist(), product[:, 0].tolist(), again[:, 0].tolist(), groups.moved

    world, results = run_strictly(monkeypatch, MESH, multiply, [("t",)])
    for rank, (gathered, product, again, moved) in enumerate(results):
        assert (gathered, product) == ([1.0, 1.0, 2.0, 2.0], [3.0, 3.0, 6.0, 6.0])
        assert again == [6.0 + 6.0 * rank] * 2
        assert moved == ({"all_gather/t": 2 * 1 * 6 * 4, "reduce_scatter/t": 1 * 16 * 4} if rank == 0 else {})
    assert world.symmetric.calls == ({} if lost else {"gather": 2, "scatter": 2})


@pytest.mark.parametrize("seed", range(6))
def test_ranks_of_a_group_agree_whoever_shared_memory_before(seed, monkeypatch):
    """Processes that survived a mesh lie anywhere in the next one: no rank of a group waits where another one fuses."""
    begin, mesh = strict_nccl.NamesOfRanks.__init__, Mesh.arrange_axes({"stage": 1, "data": 2, "t": 2})
    survivors = Random(seed).sample(range(4), 1 + seed % 3)

    def remember(self, world):
        begin(self, world)
        for rank in survivors:
            self._names[rank].add("2_3")

    def multiply(groups):
        x, w = torch.full((2, 3), 1.0 + groups.rank), torch.ones(3, 4)
        gathered, (product,) = groups.gather_and_multiply(x, [w], ("t",), 0)
        return groups.rank, product[:, 0].tolist()

    monkeypatch.setattr(strict_nccl.NamesOfRanks, "__init__", remember)
    world, results = run_strictly(monkeypatch, mesh, multiply, [("data",), ("t",)])
    for rank, product in results:
        first = rank - rank % 2
        assert product == [3.0 * (1 + first)] * 2 + [3.0 * (2 + first)] * 2
    without = [pair for pair in ((0, 1), (2, 3)) if not {*pair} & {*survivors}]
    assert world.symmetric.calls["gather"] == 2 * len(without)


def test_negative_control_a_wait_that_is_taken_away(monkeypatch):
    """What multiplies what has not come computes other numbers."""
    gather, wait = Communicator.gather_and_multiply, CollectiveHandle.wait

    def multiply_at_once(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CollectiveHandle, "wait", lambda self: (self._finish().clone(), wait(self))[0])
            return gather(*arguments)

    monkeypatch.setattr(Communicator, "gather_and_multiply", multiply_at_once)
    c = configure(**SEQUENCE)
    with pytest.raises(Exception):  # noqa: B017  (numbers that differ, or none)
        compare(c, *run(c), serial(c))


@pytest.mark.parametrize("broken", ["dim", "part"])
def test_negative_control_parts_in_another_order(broken, monkeypatch):
    """Parts that are joined along another dim, or product parts that are not summed."""
    if broken == "dim":
        multiply = communicators.multiply_rows
        monkeypatch.setattr(communicators, "multiply_rows", lambda x, m: multiply(x.flip(0), m))
    else:
        scatter = Communicator.multiply_and_scatter
        monkeypatch.setattr(Communicator, "multiply_and_scatter", lambda *arguments: scatter(*arguments) * 0.5)
    c = configure(**SEQUENCE)
    with pytest.raises(AssertionError):
        compare(c, *run(c), serial(c))


def test_negative_control_memory_of_a_mesh_that_is_gone(monkeypatch):
    """Fused operations on memory that torch knows by the name of an earlier mesh."""
    monkeypatch.setattr(strict_nccl, "SymmetricMemory", partial(strict_nccl.SymmetricMemory, lost=["0_1"]))
    work = lambda groups: groups.gather_and_multiply(torch.ones(2, 3), [torch.ones(3, 4)], ("t",), 0)  # noqa: E731
    with pytest.raises(AssertionError, match="of another mesh"):
        run_strictly(monkeypatch, MESH, work, [("t",)])

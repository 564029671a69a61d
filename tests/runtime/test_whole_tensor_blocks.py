"""Blocks of tensor axes compiled whole, their collectives inside: equal to one process in fp64, launched as the blocks
are that run function by function."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from platform.boundary.refusals import ConfigError
from platform.predict.make_plan import make_plan
from platform.runtime import compilation, compiled_blocks, parallel_ops, process_groups, traced_collectives
from platform.runtime.clock import SectionClock
from platform.runtime.communicator import Communicator
from platform.runtime.pipeline import StageFailed
from platform.runtime.process_groups import ProcessGroups
from tests.harness.oracle import CONF, MODELS, compare, examine, read, run, serial, trainer_of
from tests.harness.threads import ThreadGroups
from tests.runtime.test_compiled_block import APART, FROZEN, TUNE, calls_of
from tests.runtime.test_compiled_block import compiling as compiling_locally


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """The same graphs of forward and backward passes, run operation by operation."""
    monkeypatch.setattr(parallel_ops, "compile_region", lambda function: function)


@pytest.fixture
def traced_blocks(monkeypatch):
    """What became of every block that was traced."""
    traced, trace = [], parallel_ops.compile_block_with_own_backward

    def keep(*arguments):
        traced.append(trace(*arguments))
        return traced[-1]

    monkeypatch.setattr(parallel_ops, "compile_block_with_own_backward", keep)
    return traced


def compiling(**how):
    c = compiling_locally(**how)
    c.train.compile_collectives = True
    return c


ONE = {"layers": 1}
MEGATRON, SEQUENCE = ({"tensor": name, "axes": {"t": 2}, **ONE} for name in ("1d", "1d_sp"))
LLAMA = {**SEQUENCE, **MODELS["llama"]}
SUMMA, GATHERED = ({"tensor": name, "axes": {"r": 2, "c": 2}, **ONE} for name in ("2d", "2d_gather"))
CUBE = {"tensor": "3d", "axes": {"x": 1, "y": 2, "z": 2}, **ONE}
ROWS = {"batch": ["rows"], "heads": ["cols"], "d_ff": ["cols"], "vocab": ["cols"]}
PLANS = {
    "1d": MEGATRON,
    "1d_sp, grouped heads": LLAMA,
    "1d_sp, recomputed": {**SEQUENCE, "recompute": "full"},
    "2d": SUMMA,
    "2d_gather, weight gradients apart": {**GATHERED, **APART, "microbatch": 2, "global_batch": 4},
    "3d, grouped heads": {**CUBE, **MODELS["llama"]},
}
MORE = {
    "1d, two layers": {**MEGATRON, "layers": 2},
    "1d, 4 ranks": {**MEGATRON, **MODELS["llama"], "axes": {"t": 4}},
    "1d_sp, gathered again": {**LLAMA, "gathered": "again"},
    "1d, data 2, zero 1": {**MEGATRON, "data": 2, "zero": 1, "microbatch": 2},
    "1d_sp, data 2, zero 3": {**LLAMA, "data": 2, "zero": 3, "microbatch": 2},
    "1d, zero 3, recomputed": {**MEGATRON, "data": 2, "zero": 3, "microbatch": 2, "recompute": "full"},
    "1d_sp, interleaved": {
        **LLAMA, "pipeline": "interleaved", "stages": 2, "chunks": 2, "layers": 4, "microbatch": 2,
    },
    "1d_sp, weight gradients apart": {**SEQUENCE, **APART},
    "1d_sp, gathered again, weight gradients apart": {**LLAMA, **APART, "gathered": "again"},
    "1d, encoder and decoder": {**MEGATRON, **MODELS["t5"]},
    "1d_sp, padding": {**SEQUENCE, **MODELS["bert"]},
    "1d_sp, documents, dropout": {**SEQUENCE, **MODELS["packed_gpt"], "dropout": 0.2},
    "1d_sp, latent": {**SEQUENCE, **MODELS["latent"]},
    "1d, frozen": {**MEGATRON, **FROZEN},
    "1d_sp, adapters": {**LLAMA, "tune": TUNE},
    "1d_sp, modern": {**SEQUENCE, **MODELS["modern"], "layers": 2},
    "2d, llama, weight gradients apart": {**SUMMA, **MODELS["llama"], **APART, "microbatch": 2},
    "2d_gather": GATHERED,
    "2d_gather, gathered again": {**GATHERED, "gathered": "again"},
    "2d_gather, documents, dropout": {**GATHERED, **MODELS["packed_gpt"], "dropout": 0.2},
    "2d_gather, gathered again, weight gradients apart": {**GATHERED, **APART, "microbatch": 2, "gathered": "again"},
    "3d, 8 ranks": {**CUBE, **MODELS["llama"], "axes": {"x": 2, "y": 2, "z": 2}},
    "3d, weight gradients apart": {**CUBE, **APART},
    "layout": {"tensor": "layout", "axes": {"rows": 2, "cols": 2}, "rules": ROWS, **ONE},
    "dsp, 1d": {**MEGATRON, "branch": "dsp", "branch_axes": {"g": 2}},
    "context": {**MODELS["llama"], **ONE, "context": 2},
    "context, all_to_all": {**ONE, "context": 2, "context_kind": "all_to_all"},
}  # fmt: skip
# a gradient bucket that is full within a block is reduced at the block's end
LATER = {
    "3d, recomputed": {**CUBE, "recompute": "full"},
    "3d, data 2, zero 3": {**CUBE, "data": 2, "zero": 3, "microbatch": 2},
    "3d_literal": {**CUBE, "tensor": "3d_literal", "axes": {"x": 2, "y": 2, "z": 2}},
    "2p5d": {**CUBE, "tensor": "2p5d", "axes": {"r": 2, "c": 2, "d": 2}},
}


def examine_and_compare_logs(c, traced_blocks) -> None:
    """Gradients are those of one process; collectives, in their order, those of blocks that are not compiled."""
    plan, results = run(c)
    assert traced_blocks and all(traced_blocks)
    examine(c, plan, results)
    c.train.compile = "off"
    for whole, by_function in zip(results, run(c)[1], strict=True):
        assert whole.log == by_function.log


@pytest.mark.parametrize("name", [*PLANS, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_they_compute_the_same(name, traced_blocks):
    examine_and_compare_logs(compiling(**(PLANS | MORE)[name]), traced_blocks)


@pytest.mark.full
@pytest.mark.parametrize("name", LATER)
def test_buckets_are_reduced_behind_the_block(name, traced_blocks):
    """All other collectives are in the same order as in blocks that are not compiled."""
    c = compiling(**LATER[name])
    plan, results = run(c)
    assert traced_blocks and all(traced_blocks)
    examine(c, plan, results)
    c.train.compile = "off"
    of_buckets = set(plan.reductions.values())
    for whole, by_function in zip(results, run(c)[1], strict=True):
        assert Counter(whole.log) == Counter(by_function.log)
        inside, outside = ([x for x in r.log if x.axes not in of_buckets] for r in (whole, by_function))
        assert inside == outside != by_function.log


@pytest.mark.full
@pytest.mark.parametrize("name", ["1d", "1d_sp, data 2, zero 3", "2d", "2d_gather, weight gradients apart"])
def test_kernels_of_the_compiler_compute_the_same(name, monkeypatch):
    """Blocks of torch.compile's default compiler, which schedules kernels anew, launch the same in the same order."""
    monkeypatch.undo()  # of `fast`
    c = compiling(**(PLANS | MORE)[name])
    plan, results = run(c)
    examine(c, plan, results)
    c.train.compile = "off"
    for whole, by_function in zip(results, run(c)[1], strict=True):
        assert whole.log == by_function.log


def test_a_graph_names_no_communicator(traced_blocks):
    run(compiling(**MEGATRON))
    functions = traced_blocks[-1].functions
    for function in (functions.forward, functions.backward):
        launches = function.graph.graph.find_nodes(op="call_function", target=torch.ops.platform.launch.default)
        waits = function.graph.graph.find_nodes(op="call_function", target=torch.ops.platform.wait.default)
        assert len(launches) == len(waits) == 2
        assert all(not isinstance(value, Communicator) for node in launches for value in node.args)


def without_waits(start):
    """A start of collectives of which blocks read what these have not yet brought."""

    def start_collective(*arguments, **how):
        wait = start(*arguments, **how)
        return (lambda: None) if traced_collectives._RUNNING.communicator else wait

    return start_collective


def test_negative_control_a_wait_that_is_taken_away(monkeypatch):
    """A block that reads what a collective has not yet brought computes other numbers."""
    c = compiling(**MEGATRON)
    monkeypatch.setattr(ThreadGroups, "_start_collective", without_waits(ThreadGroups._start_collective))
    with pytest.raises(Exception):  # noqa: B017  (numbers that differ, or none)
        compare(c, *run(c), serial(c))


@pytest.mark.full
def test_negative_control_collectives_that_no_gradient_needs(monkeypatch):
    """The last sums of a backward pass by SUMMA bring nothing to ranks that own none: they must not be left out."""
    partition = compiled_blocks._partition_graph.__wrapped__

    def forget_last(code, *how):
        graph = how[-1]._found[0]
        output = graph.graph.output_node()
        output.args = ([*output.args[0][:-2], None, None],)
        graph.recompile()
        return partition(code, *how)

    class Unordered(traced_collectives._TracedHandle):
        def __init__(self, trace, *arguments):
            super().__init__(trace, *arguments)
            self.launched = trace.last

        def wait(self):
            self._trace.last = torch.ops.platform.wait(self._x, self.launched, *self._arguments)
            return self._trace.last

    monkeypatch.setattr(compiled_blocks, "_partition_graph", forget_last)
    monkeypatch.setattr(traced_collectives, "_TracedHandle", Unordered)
    c = compiling(**SUMMA)
    with pytest.raises(StageFailed, match="where its group"):
        run(c)


class Alone(Communicator):
    """A rank whose collectives bring zeros at once. `started`: how many."""

    started = 0

    def _start_collective(self, op, x, out, axes, group, reduce, root):
        self.started += 1
        out.zero_()
        return lambda: None

    def sum_numbers(self, numbers):
        return [max(1.0, n) for n in numbers]

    all_gather_texts = collect_numbers = broadcast_text = transfer = exchange = None


class Sharing(Alone):
    """A rank whose products run as one with their collectives, as those of GPUs that read each other's memory."""

    multiply_parts, _time_product = ProcessGroups.multiply_parts, ProcessGroups._time_product

    def __init__(self, mesh, rank):
        super().__init__(mesh, rank)
        self.shared_memory = {(axis,): axis for axis in mesh.axes}


def multiply_gathered(x, matrices, dim, name):
    gathered = torch.cat([x, x], dim)
    return gathered, [gathered @ matrix for matrix in matrices]


def multiply_half(x, matrix, reduce, dim, name):
    return (x @ matrix).chunk(2, dim)[0]


def calls_of_a_layer(plan, rank=Alone) -> tuple[int, int]:
    """Calls of Python functions of the platform, one of the transport for each collective among them, and collectives,
    of a layer and microbatch more."""
    counted = {}
    for layers, microbatches in product((1, 2), (1, 2)):
        sequences = {"global_batch": 4 * microbatches * plan.get("data", 1), "microbatch": 4}
        c = compiling(**{**plan, "layers": layers, **sequences})
        trainer = trainer_of(c, whole := make_plan(c), alone := rank(whole.mesh, 0))
        for step in (1, 2):
            trainer.step(step)
        alone.started = 0
        calls = calls_of(lambda trainer=trainer: trainer.step(3), every=False)
        counted[layers, microbatches] = calls + alone.started, alone.started
    return tuple(
        a - b - c + d for a, b, c, d in zip(*(counted[n] for n in ((2, 2), (2, 1), (1, 2), (1, 1))), strict=True)
    )


# of more than the axes of a scheme's file, which have two ranks each
PLANNED = {"layout": {"rules": ROWS, "axes": {"rows": 2, "cols": 2}}}
LEFT_OUT = {"auto", "mesh_tf_illegal"}  # which choose one of the others, and are refused
SHIPPED = sorted({path.stem for path in (CONF / "tensor").glob("*.yaml")} - LEFT_OUT)


@pytest.mark.parametrize("scheme", [pytest.param(s, marks=() if s == "2d" else pytest.mark.full) for s in SHIPPED])
def test_python_calls_of_a_layer(scheme, traced_blocks):
    """Those of a block, and of what launches and waits for its collectives: of SUMMA's 64, too."""
    axes = dict.fromkeys(read("tensor", scheme).get("order", ()), 2)
    calls, collectives = calls_of_a_layer({"tensor": scheme, "axes": axes, **PLANNED.get(scheme, {})})
    print(f"{scheme}: {calls} calls, {collectives} collectives")
    assert traced_blocks and all(traced_blocks), "no block is whole"
    assert calls <= 150


FUSED = SimpleNamespace(fused_all_gather_matmul=multiply_gathered, fused_matmul_reduce_scatter=multiply_half)
ASYNCHRONOUS = ["1d_sp", "3d", "3d_literal"]
CASES = [(scheme, rank) for scheme in ASYNCHRONOUS for rank in (Alone, Sharing)]


def calls_of_async_products(scheme, rank, monkeypatch) -> tuple[int, int]:
    monkeypatch.setattr(process_groups, "_fused_operations", lambda: FUSED)
    axes = dict.fromkeys(read("tensor", scheme)["order"], 2)
    return calls_of_a_layer({"tensor": scheme, "axes": axes, "async_products": "on"}, rank)


@pytest.mark.parametrize(
    ("scheme", "rank"),
    [pytest.param(*case, marks=() if case == ("1d_sp", Sharing) else pytest.mark.full) for case in CASES],
)
def test_python_calls_of_a_layer_with_async_products(scheme, rank, traced_blocks, monkeypatch):
    """Those of products that wait for their collectives, and those of products that are one with them."""
    calls, collectives = calls_of_async_products(scheme, rank, monkeypatch)
    print(f"{scheme}: {calls} calls, {collectives} collectives that are launched by themselves")
    assert traced_blocks and all(traced_blocks)
    code = traced_blocks[-1].functions.forward.graph.code
    assert "gather_and_multiply" in code or "multiply_and_scatter" in code
    assert calls <= 150


@pytest.mark.parametrize("scheme", sorted({*SHIPPED} - {*ASYNCHRONOUS}))
def test_no_other_scheme_may_have_async_products(scheme):
    axes = dict.fromkeys(read("tensor", scheme).get("order", ()), 2)
    with pytest.raises(ConfigError, match="async_products"):
        make_plan(compiling(**{"tensor": scheme, "axes": axes, **PLANNED.get(scheme, {}), **ONE}, async_products="on"))


@pytest.mark.full
@pytest.mark.parametrize("rank", [Alone, Sharing])
def test_negative_control_calls_of_async_products_one_by_one(rank, monkeypatch):
    """Products whose collectives are followed each by itself exceed what a layer may call."""
    monkeypatch.setattr(SectionClock, "is_followed", True)
    monkeypatch.setattr(SectionClock, "set_detailed", lambda clock, _: setattr(clock, "detailed", True))
    assert calls_of_async_products("3d", rank, monkeypatch)[0] > 150


@pytest.mark.full
def test_negative_control_calls_of_collectives_one_by_one(monkeypatch):
    """Launches and waits that are never joined, each noted by itself, exceed what a layer may call."""
    monkeypatch.setattr(SectionClock, "is_followed", True)
    calls, collectives = calls_of_a_layer(SUMMA)
    assert collectives == 64 and calls > 150


def test_launches_and_waits_are_joined_where_nothing_lies_between():
    """What is computed between a launch and its wait stays there; what reads a result comes behind it."""

    def compute(x, y):
        sent = torch.ops.platform.launch(x, x, 0, "", [2, 2])
        product = y @ y
        came = torch.ops.platform.wait(x, sent, 0, [2, 2])
        copied = came.clone()
        sent = torch.ops.platform.launch(y, came, 1, "", [2, 2])
        other = torch.ops.platform.wait(y, sent, 1, [2, 2])
        sent = torch.ops.platform.launch(copied, other, 2, "", [2, 2])
        return product, torch.ops.platform.wait(copied, sent, 2, [2, 2])

    graph = traced_collectives.join_turns(make_fx(compute)(torch.ones(2, 2), torch.ones(2, 2)))
    nodes = [
        node for node in graph.graph.nodes if node.target in (traced_collectives._TAKE_TURN, torch.ops.aten.mm.default)
    ]
    turns = [node.args[2] if node.target is traced_collectives._TAKE_TURN else "product" for node in nodes]
    assert [turn if turn == "product" else [len(step) for step in json.loads(turn)] for turn in turns] == [
        [3], "product", [2, 3, 2], [3, 2],
    ]  # fmt: skip
    graph(torch.ones(2, 2), torch.ones(2, 2))


@pytest.mark.full
def test_a_mesh_of_known_shapes_compiles_nothing(monkeypatch):
    """As it is formed anew with fewer replicas; negative control: with other shapes it does."""
    monkeypatch.undo()  # of `fast`
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    compiled, mark = [], compilation.PROGRESS.mark_preparing
    monkeypatch.setattr(compilation.PROGRESS, "mark_preparing", lambda what: compiled.append(what) or mark(what))

    def form(**how) -> list[str]:
        compiled.clear()
        c = compiling(**{**MEGATRON, "layers": 2, "d_model": 40, "microbatch": 2, **how})
        trainer = trainer_of(c, plan := make_plan(c), Alone(plan.mesh, 0))
        partitions = compiled_blocks._partition_graph.cache_info().misses
        trainer.step(1)
        return [*compiled, *["partition"] * (compiled_blocks._partition_graph.cache_info().misses - partitions)]

    first = form(data=2)
    assert [first.count(what) for what in ("compile block_forward", "compile block_backward", "partition")] == [1, 1, 1]
    assert form(data=1) == form(data=2) == []
    assert "partition" in form(data=1, axes={"t": 4})

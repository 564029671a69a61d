"""What a generation compiles, it compiles while it forms; where one rank cannot, none does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from platform.predict.make_plan import make_plan
from platform.runtime import compilation, compiled_blocks
from platform.runtime.communicator import SingleRank
from platform.runtime.pipeline import StageFailed
from platform.train.rehearsal import rehearse_steps
from platform.train.worker import Worker
from tests.harness import oracle
from tests.harness.oracle import MODELS, compute, configure, examine, trainer_of, validation_loss
from tests.harness.threads import run_threads


def refused(*_: Any) -> None:
    raise ValueError("the compiler is broken")


@contextmanager
def compiling(backend: Any = "aot_eager", broken: str = "") -> Iterator[None]:
    """Graphs without kernels, that of the function `broken` alone cannot be had."""
    before, compile_, graph_for = compilation.BACKEND, torch.compile, compilation._compile_graph

    def counted(function, arguments):
        counters["stats"]["unique_graphs"] += 1
        return refused if function.__name__ == broken else graph_for(function, arguments)

    compilation.compile_region.cache_clear()
    torch._dynamo.reset()
    compilation.BACKEND, compilation._compile_graph = backend, counted
    torch.compile = lambda f, **how: refused if f.__name__ == broken else compile_(f, **how)
    try:
        yield
    finally:
        compilation.BACKEND, compilation._compile_graph, torch.compile = before, graph_for, compile_
        compilation.compile_region.cache_clear()
        torch._dynamo.reset()


def configured(evaluates: bool = True, layers_watched: int = 0, **how: Any):
    c = configure(**how)
    c.train.compile, c.eval.every, c.monitor.layers = "on", int(evaluates), layers_watched
    return c


def rehearsed(c, plan, monkeypatch) -> tuple[list[Any], int, int]:
    """What all ranks compute after a rehearsal, and the graphs there were after it, and after steps and evaluation."""
    before, trainers, prepared = trainer_of, {}, []

    def trainer_that_has_rehearsed(c, plan, communicator):
        trainer = trainers[communicator.rank] = before(c, plan, communicator)
        assert rehearse_steps(trainer, 1) == ""
        communicator.barrier()  # nobody steps yet
        prepared.append(counters["stats"]["unique_graphs"])
        return trainer

    def work(communicator):
        result = compute(c, plan, communicator)
        validation_loss(trainers[communicator.rank])
        return result

    monkeypatch.setattr(oracle, "trainer_of", trainer_that_has_rehearsed)
    counters.clear()
    with compiling():
        results = [work(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else run_threads(plan.mesh, work)
    return results, min(prepared), counters["stats"]["unique_graphs"]


PLANS = {
    "gpt": {},
    "llama, dropout": {**MODELS["llama"], "dropout": 0.1, "layers": 1},
    "layers watched": {**MODELS["llama"], "layers_watched": 2, "layers": 1},
    "padding": {**MODELS["bert"], "layers": 1},
    "1d_sp, recomputed": {"tensor": "1d_sp", "axes": {"t": 2}, "recompute": "full", **MODELS["llama"], "layers": 1},
    "interleaved, zero 3": {"pipeline": "interleaved", "stages": 2, "chunks": 2, "layers": 4, "data": 2, "zero": 3,
                            "microbatch": 2, "global_batch": 16},
    "zb_h1": {"pipeline": "zb_h1", "stages": 2, "microbatch": 2, **MODELS["llama"]},
    "zero 2": {"data": 2, "zero": 2, "microbatch": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_nothing_is_compiled_after_it(name, monkeypatch):
    """And nothing else is left of it: the numbers, bytes and launches of the steps are those of one process."""
    c = configured(**PLANS[name])
    plan = make_plan(c)
    results, prepared, after = rehearsed(c, plan, monkeypatch)
    assert prepared == after > 0
    if "dropout" not in PLANS[name]:
        examine(c, plan, results)


def test_negative_control_an_evaluation_that_was_not_rehearsed(monkeypatch):
    c = configured(evaluates=False, layers=1)
    _, prepared, after = rehearsed(c, make_plan(c), monkeypatch)
    assert after > prepared


def test_it_leaves_every_bit_as_it_is():
    c = configured(**MODELS["llama"], dropout=0.1)
    plan = make_plan(c)
    with compiling():
        outcomes = []
        for rehearses in (False, True):
            trainer = trainer_of(c, plan, SingleRank(plan.mesh))
            torch.manual_seed(0)
            if rehearses:
                rehearse_steps(trainer, 3)
            report = trainer.step(1)
            outcomes.append((trainer.weights.own_masters, torch.rand(1), report.loss, report.comm_bytes))
    (weights, *others), (weights2, *others2) = outcomes
    assert others == others2 and all(torch.equal(weights[n], weights2[n]) for n in weights)


# on processes: which rank cannot compile what, and what all say


def trained(c, plan, communicator):
    """What `Worker.rehearse_steps` says, whether the rank compiles after it, and two losses; `c.run.dir` says what is
    broken: RANK:FUNCTION."""
    rank, broken = c.run.dir.split(":")
    with compiling(broken=broken if communicator.rank == int(rank) else ""):
        worker = Worker(c, communicator.rank, device="cpu", run_dir="", threads=1)
        worker.plan, worker.communicator = plan, communicator
        worker.trainer = trainer_of(c, plan, communicator)
        said = worker.rehearse_steps(1)
        return said, worker.trainer.ops.compiles_functions, [worker.trainer.step(k).loss for k in (1, 2)]


def on_two(broken: str, **how: Any):
    c = configured(data=2, microbatch=2, layers=1, precision="fp32", **MODELS["llama"], **how)
    c.run.dir = broken
    return c, make_plan(c)


@pytest.mark.parametrize("function", ["_row_statistics", "block_forward", "block_backward"])
def test_where_one_rank_cannot_compile_none_does(function, pool):
    eager, plan = on_two("0:")
    eager.train.compile = "off"
    expected = [losses for *_, losses in pool.run(trained, eager, plan)]
    actual = pool.run(trained, *on_two(f"1:{function}"))
    why = f"{function}: ValueError: the compiler is broken"
    assert actual == [("", False, expected[0]), (why, False, expected[1])]


def test_negative_control_where_all_can_they_do(pool):
    assert [(said, compiles) for said, compiles, _ in pool.run(trained, *on_two("1:"))] == [("", True)] * 2


def test_negative_control_without_a_rehearsal_the_first_step_fails():
    c = configured(layers=1)
    plan = make_plan(c)
    with compiling(broken="_row_statistics"), pytest.raises(StageFailed, match="the compiler is broken"):
        trainer_of(c, plan, SingleRank(plan.mesh)).step(1)


def test_a_backward_pass_that_does_not_compile_is_found():
    c = configured(evaluates=False, layers=1, dropout=0.1, **MODELS["llama"])  # no whole blocks, of graphs each
    plan = make_plan(c)
    with compiling(aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=refused)):
        trainer = trainer_of(c, plan, SingleRank(plan.mesh))
        assert rehearse_steps(trainer, 1).startswith("apply_rms_norm: ") and not trainer.ops.compiles_functions


@pytest.mark.parametrize("broken", ["make_fx", "_split_graph"])
def test_a_block_that_cannot_be_traced_is_found(broken, monkeypatch):
    c = configured(evaluates=False, layers=1, **MODELS["llama"])
    plan = make_plan(c)
    monkeypatch.setattr(compiled_blocks, broken, refused)
    with compiling():
        trainer = trainer_of(c, plan, SingleRank(plan.mesh))
        assert (
            rehearse_steps(trainer, 1).endswith(": ValueError: the compiler is broken")
            and not trainer.ops.compiles_functions
        )
        trainer.step(1)

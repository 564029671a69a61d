"""Sequences that grow: steps through two boundaries equal one process, and a reference that cuts samples by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config
from platform.config.ramps import find_sequence_length
from platform.data import streams
from platform.plan.plan import Plan
from platform.plan.plan_check import find_unsoundness
from platform.plan.step_collectives import communication
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import Communicator, SingleRank
from platform.train import stage_passes
from platform.train.replies import StepReport
from tests.fuzz import plans
from tests.harness import reference_transformer
from tests.harness.oracle import MODELS, Result, Tokens, compare, configure, trainer_of
from tests.harness.replay import replay

RAMP, LENGTH, STEPS = ["0:4", "1:8", "2:16"], 16, 3
Reference = Callable[[Config, Any, int], dict[str, Any]]


def growing(*plan: Any, model: str = "gpt", ramp: Sequence[str] = RAMP, **more: Any) -> Config:
    c = configure(*plan, **{"global_batch": 3, "microbatch": 1, **MODELS[model], **more})
    c.train.length_ramp, c.train.steps = list(ramp), STEPS
    c.model.position_rows = LENGTH if c.model.positions == "learned" else 0
    c.data.document_mask = c.model.within_documents
    return c


def in_contexts(kind: str, **more: Any) -> Config:
    c = growing(**more)
    c.parallel.context, c.parallel.context_kind, c.parallel.context_balance = 2, kind, True
    return c


def by_hand(c: Config, corpus: Any, step: int) -> dict[str, Any]:
    """The sequences of a step, row by row: the samples of the step in their order, each from left to right."""
    length = {1: 4, 2: 8, 3: 16}[step]
    sequences: dict[str, list[Any]] = {}
    for number in range((step - 1) * c.train.global_batch, step * c.train.global_batch):
        sample = {name: rows[0] for name, rows in corpus.batch("train", number, number + 1).items()}
        for start in range(0, LENGTH, length):
            piece = {name: row[start : start + length].tolist() for name, row in sample.items()}
            if "begins" in piece:
                piece["begins"] = [max(begin - start, 0) for begin in piece["begins"]]
            if "segments" in piece:
                piece["segments"] = [n - piece["segments"][0] for n in piece["segments"]]
            for name, row in piece.items():
                sequences.setdefault(name, []).append(row)
    return {name: torch.tensor(rows) for name, rows in sequences.items()}


def check_reference(c: Config, reference: Reference = by_hand) -> None:
    """Loss and gradients of every step of one process are those of plain PyTorch on the reference's sequences."""
    plan, corpus = make_plan(c), Tokens(c)
    trainer = trainer_of(c, plan, SingleRank(plan.mesh), corpus)
    for step in range(1, STEPS + 1):
        weights = {n: w.detach().clone().requires_grad_() for n, w in trainer.weights.master.items()}
        wanted = reference_transformer.loss(c.model, weights, reference(c, corpus, step))
        wanted.backward()
        update, gradients = trainer._update_weights, {}

        def recorded(norm: float, lr: float) -> None:
            gradients.update((n, g.clone()) for n, g in trainer.weights.gradients.items())  # noqa: B023
            update(norm, lr)  # noqa: B023

        trainer._update_weights = recorded  # type: ignore[method-assign]
        report = trainer.step(step)
        trainer._update_weights = update  # type: ignore[method-assign]
        assert report.loss == pytest.approx(wanted.item(), rel=1e-12), f"step {step}"
        assert report.tokens == step * c.train.global_batch * LENGTH
        for name, w in weights.items():
            torch.testing.assert_close(gradients[name].view_as(w), w.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("model", ["gpt", "llama", "modern", "packed_gpt", "whole_bert"])
def test_one_process_equals_samples_that_are_cut_by_hand(model):
    check_reference(growing(model=model, global_batch=4, microbatch=3))


def test_negative_control_pieces_that_are_no_neighbours(monkeypatch):
    """Where every second token goes to a piece, it has as many of them, and others before each."""

    def strided(samples, count):
        return {name: rows.reshape(len(rows), -1, count).swapaxes(1, 2).reshape(len(rows) * count, -1)
                for name, rows in samples.items()}  # fmt: skip

    monkeypatch.setattr(streams, "cut_samples", strided)
    with pytest.raises(AssertionError, match="step 1"):
        check_reference(growing(global_batch=4, microbatch=3))


PLANS: dict[str, Callable[[], Config]] = {
    "data 2": lambda: growing(data=2),
    "data 2, zero 3": lambda: growing(data=2, zero=3, model="llama"),
    "1d": lambda: growing("1d", {"t": 2}, microbatch=2),
    "1d_sp, dropout": lambda: growing("1d_sp", {"t": 2}, microbatch=2, dropout=0.2),
    "2d, pieces of a sample on several ranks": lambda: growing("2d", {"r": 2, "c": 2}, microbatch=2, model="modern"),
    "length whole nowhere": lambda: growing("layout", {"c": 2}, rules={"length": ["c"]}),
    "pipeline": lambda: growing(pipeline="1f1b", stages=2),
    "zero bubble, 1d_sp": lambda: growing("1d_sp", {"t": 2}, pipeline="zb_h1", stages=2, chunks=2, model="llama"),
    "experts of two replicas": lambda: growing(data=2, experts_of=2, model="experts"),
    "encoder": lambda: growing("1d_sp", {"t": 2}, data=2, model="whole_bert"),
    "context, gathered": lambda: in_contexts("gather"),
    "context, ring, data 2": lambda: in_contexts("ring", data=2, model="llama"),
    "recomputed": lambda: growing("1d_sp", {"t": 2}, recompute="full", model="llama"),
}  # fmt: skip


def moved_by_steps(c: Config, plan: Plan) -> tuple[list[Result], list[dict[str, int]]]:
    """What all ranks compute in three steps without a break, and the bytes that each step moves."""

    def work(communicator: Communicator) -> tuple[Result, list[Counter[str]]]:
        trainer = trainer_of(c, plan, communicator)
        step, moved = trainer.step, list[Counter[str]]()

        def counted(number: int) -> StepReport:
            report = step(number)
            moved.append(Counter(report.comm_bytes))
            return report

        trainer.step = counted  # type: ignore[method-assign, assignment]
        return plans.steps_of(trainer, communicator, range(1, STEPS + 1), True), moved

    by_rank = plans.on_threads(c, plan, work)
    of_steps = zip(*(moved for _, moved in by_rank), strict=True)
    return [result for result, _ in by_rank], [dict(sorted(sum(step, Counter()).items())) for step in of_steps]


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_through_two_boundaries_equals_one_process(name):
    """Loss, gradients, norms, updates, an evaluation and answers; each step moves the bytes of its length's plan."""
    c = PLANS[name]()
    plan = make_plan(c)
    assert [*plan.shorter] == [4, 8] and find_unsoundness(plan) == []
    results, moved = moved_by_steps(c, plan)
    compare(c, plan, results, plans.alone(c, [range(1, STEPS + 1)], asks=True)[0])
    assert moved == [communication(plan.plan_of_length(length)) for length in (4, 8, 16)]
    assert replay([result.log for result in results]) is None, "order of launches"


@pytest.mark.parametrize("seed", range(4))
def test_a_run_goes_on_under_another_plan(seed):
    """From storage or memory, at a boundary or between two: at another world size, scheme and pipeline."""
    r = Random(seed)
    first, then = r.sample([*PLANS.values()][:8], 2)
    configs = [first(), then()]
    configs[1].model, configs[1].data = configs[0].model, configs[0].data
    plans.check(r, configs, [make_plan(c) for c in configs])


def test_negative_control_positions_of_the_last_rows(monkeypatch):
    """Where ranks that are several read the table from its end, the oracle sees it."""
    c = growing("1d", {"t": 2}, microbatch=2)
    plan, cut_of = make_plan(c), stage_passes.read_sequence_batch

    def shifted(corpus, split, start, end, count):
        return cut_of(corpus, split, start + (count > 1), end + (count > 1), count)

    real, alone = plans.run_phase, stage_passes.read_sequence_batch

    def wrong(*arguments):
        monkeypatch.setattr(stage_passes, "read_sequence_batch", shifted)
        outcome = real(*arguments)
        monkeypatch.setattr(stage_passes, "read_sequence_batch", alone)
        return outcome

    monkeypatch.setattr(plans, "run_phase", wrong)
    with pytest.raises(AssertionError, match="gradient of"):
        plans.check(Random(0), [c], [plan])


def test_steps_move_what_each_length_moves():
    """A shorter length moves the same activations, as they have as many tokens, and the gradients of all steps."""
    c = growing("1d_sp", {"t": 2}, data=2, model="llama")
    plan = make_plan(c)
    moved = {n: communication(plan.plan_of_length(n)) for n in (4, 8, 16)}
    assert moved[4] == moved[8] == moved[16]
    flops = [plan.plan_of_length(n).flops_per_token for n in (4, 8, 16)]
    assert flops == sorted(flops) and flops[0] < flops[-1]
    assert [find_sequence_length(c, step) for step in (1, 2, 3, 99)] == [4, 8, 16, 16]


def test_a_length_that_axes_do_not_divide_is_refused_with_others_that_do():
    c = growing("1d_sp", {"t": 4}, ramp=["0:2", "1:16"])
    with pytest.raises(ConfigError) as refused:
        make_plan(c)
    [line] = refused.value.violations
    assert line.startswith("train.length_ramp=0:2: model.length=2 is not divisible by tensor.axes.t=4")
    assert line.endswith("nearest legal: 0:4, 0:8")
    c.train.length_ramp = ["0:4", "1:16"]
    assert [*make_plan(c).shorter] == [4]


def test_parameters_that_depend_on_the_length_are_refused():
    c = growing()
    c.model.position_rows = 0  # as a model of one's own may do
    with pytest.raises(ConfigError, match=r"0:4: model.kind=decoder has other parameters at this length"):
        make_plan(c)


def test_memory_is_that_of_the_length_that_needs_most():
    from tests.harness.planned_memory import predict_training

    c = growing("1d", {"t": 2}, layers=1, dropout=0.1)
    plan = make_plan(c)
    [whole] = predict_training(c, plan)
    [longest] = predict_training(c, replace(plan, shorter={}))
    [short] = predict_training(c, replace(plan.shorter[4], shorter={}))
    assert whole.total_bytes == max(longest.total_bytes, short.total_bytes) >= longest.total_bytes
    assert np.isclose(longest.parameters, short.parameters)

"""One training step: which samples it consumes, how it clips, and what evaluation gives in every layout."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import isfinite

import pytest
import torch

from platform.config.fields import Config
from platform.plan.step_collectives import process_groups
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from platform.train.faults import Fault
from platform.train.trainer import SECTIONS
from tests.harness.oracle import Tokens, configure, trainer_of, validation_loss
from tests.harness.threads import run_threads

B, STEPS = 16, 3


def case(*scheme, **more) -> Config:
    c = configure(*scheme, **{"global_batch": B, "layers": 1, **more})
    c.train.steps = STEPS
    return c


ROWS_COLS = {"batch": ["rows"], "heads": ["cols"], "d_ff": ["cols"], "vocab": ["cols"]}
CASES = {
    "serial": case(),
    "one microbatch": case(microbatch=16),
    "data": case(data=4, microbatch=2),
    "1d": case("1d", {"t": 2}, data=2),
    "1d_sp": case("1d_sp", {"t": 2}),
    "zero 1": case("1d", {"t": 2}, data=2, zero=1),
    "zero 3": case("1d_sp", {"t": 2}, data=2, zero=3),
    "3d": case("3d", {"x": 2, "y": 2, "z": 2}, microbatch=8),
    "layout": case("layout", {"rows": 2, "cols": 2}, rules=ROWS_COLS),
    "dsp": case("1d", {"t": 2}, branch="dsp", branch_axes={"g": 2}, data=2, dropout=0.1),
}
PARALLEL = [name for name in CASES if name not in ("serial", "one microbatch")]


def on_all_ranks(c: Config, work) -> list:
    """`work(trainer)` on every rank."""
    plan = make_plan(c)

    def start(communicator):
        return work(trainer_of(c, plan, communicator))

    return [start(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else run_threads(plan.mesh, start)


class Recorder(Tokens):
    """Notes every sample that was asked for."""

    def __init__(self, c: Config):
        super().__init__(c)
        self.asked: list[tuple[str, int]] = []

    def batch(self, split, start, end):
        self.asked += [(split, i) for i in range(start, end)]
        return super().batch(split, start, end)

    def predicted(self, split, start, end):
        """Labels are counted one step ahead, which is no reading of them."""
        asked = list(self.asked)
        count = super().predicted(split, start, end)
        self.asked = asked
        return count


@pytest.mark.parametrize("name", CASES)
def test_a_step_consumes_its_samples_exactly(name):
    """Together [k B, (k+1) B) and nothing else, every sample equally often (twice per replica: tokens and labels)."""
    c = CASES[name]

    def work(trainer):
        trainer.corpus = trainer.passes.corpus = Recorder(c)
        by_step = []
        for step in range(1, STEPS + 1):
            report = trainer.step(step)
            assert report.samples == ((step - 1) * B, step * B)
            assert report.tokens == step * B * c.model.length
            by_step.append(Counter(trainer.corpus.asked))
            trainer.corpus.asked.clear()
        return by_step

    ranks = on_all_ranks(c, work)
    for k in range(STEPS):
        together = sum((r[k] for r in ranks), Counter())
        assert set(together) == {("train", i) for i in range(k * B, (k + 1) * B)}
        assert len(set(together.values())) == 1


def test_the_report_is_plain_and_complete():
    (report,) = on_all_ranks(case(), lambda trainer: trainer.step(1))
    assert set(report.seconds) == set(SECTIONS)
    assert 0 < sum(report.seconds.values()) <= report.step_seconds
    assert report.comm_bytes == {} and report.peak_memory_bytes > 0
    assert all(type(getattr(report, k)) is float for k in ("loss", "grad_norm", "lr", "step_seconds"))


def with_clip(c: Config, clip: float) -> Config:
    return replace(c, optimizer=replace(c.optimizer, clip=clip))


def clipped(c: Config) -> list[tuple[float, dict, dict]]:
    """(norm, gradients as they are, gradients that the optimizer has used) of the first step on every rank."""

    def work(trainer):
        _, norm = trainer.compute_gradients(1)
        before = {n: g.clone() for n, g in trainer.weights.gradients.items()}
        after = {}
        trainer.optimizer.register_step_post_hook(
            lambda *_: after.update({n: g.clone() for n, g in trainer.weights.gradients.items()})
        )
        trainer._update_weights(norm, 1e-3)
        assert not trainer.weights.gradients
        return norm, before, after

    return on_all_ranks(c, work)


@pytest.mark.parametrize("precision", ["fp64", "fp32"])  # multiplied; divided by the optimizer
@pytest.mark.parametrize("name", ["serial", "1d", "3d", "zero 1", "zero 3"])
def test_clipping_scales_every_gradient_to_the_global_norm(name, precision):
    for norm, before, after in clipped(replace(with_clip(CASES[name], 0.01), precision=precision)):
        assert norm > 0.01
        assert all(torch.allclose(after[n], before[n] * (0.01 / norm), rtol=1e-3, atol=0) for n in before)
        if name == "serial":
            assert sum(g.square().sum() for g in after.values()) == pytest.approx(0.01**2, rel=1e-3)


@pytest.mark.parametrize("clip", [0.0, 1e6])
def test_no_clipping(clip):
    ((norm, before, after),) = clipped(with_clip(case(), clip))
    assert norm > 0.01 and all(torch.equal(after[n], before[n]) for n in before)


def look(trainer) -> tuple[float, float, set]:
    """Validation loss, the loss of a step after it, and the groups that the evaluation launches in."""
    trainer.communicator.log = log = []
    loss = validation_loss(trainer)
    trainer.communicator.log = None
    return loss, trainer.step(1).loss, {launch.axes for launch in log}


@pytest.fixture(scope="module")
def serial() -> tuple:
    return on_all_ranks(CASES["serial"], look)[0]


@pytest.mark.parametrize("name", PARALLEL)
def test_evaluation_is_the_same_in_every_layout(name, serial):
    c = CASES[name]
    for loss, step, _ in on_all_ranks(c, look):
        assert loss == pytest.approx(serial[0], rel=1e-10)
        assert c.model.dropout or step == pytest.approx(serial[1], rel=1e-10)  # dropout is off in the evaluation alone


TWO_ON_BATCH = case("layout", {"rows": 2}, rules={"batch": ["rows"]}, data=2)


@pytest.mark.parametrize(
    "c", [CASES["3d"], CASES["dsp"], CASES["zero 3"], TWO_ON_BATCH], ids=["3d", "dsp", "zero 3", "two axes on batch"]
)
def test_the_plan_names_every_group_that_a_run_launches_in(c):
    """Evaluation too: real process groups exist only where the plan says so."""
    groups = set(process_groups(make_plan(c)))
    for *_, used in on_all_ranks(c, look):
        assert used <= groups


def test_evaluation_reads_the_first_held_out_batches_only():
    c = case()
    c.eval.batches = 2

    def work(trainer):
        trainer.corpus = trainer.passes.corpus = Recorder(c)
        validation_loss(trainer)
        return trainer.corpus.asked

    (asked,) = on_all_ranks(c, work)
    assert set(asked) == {("validation", i) for i in range(2 * B)}


def test_the_same_step_gives_the_same_numbers():
    def work(trainer):
        return [trainer.step(k).loss for k in (1, 2)]

    first, second = (on_all_ranks(case(dropout=0.2), work) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", ["serial", "1d", "zero 3", "dsp"])
@pytest.mark.parametrize("cause", ["a spike", "not finite"])
def test_a_step_that_is_skipped_changes_nothing(name, cause):
    """All ranks alike, also where one alone computed what is not finite; afterwards the step gives what it would have
    given."""

    def work(trainer):
        fault = Fault(1, "nan", 1) if trainer.communicator.rank == trainer.plan.mesh.world_size - 1 else None
        before = {n: w.detach().clone() for n, w in trainer.weights.master.items()}
        report = trainer.step(1, 0.1) if cause == "a spike" else trainer.step(1, fault=fault)
        assert report.skipped and not trainer.weights.gradients
        assert isfinite(report.grad_norm) == (cause == "a spike")
        assert all(torch.equal(w, before[n]) for n, w in trainer.weights.master.items())
        again = trainer.step(1)
        assert not again.skipped
        return again.loss, again.grad_norm

    undisturbed = on_all_ranks(CASES[name], lambda trainer: trainer.step(1))
    assert on_all_ranks(CASES[name], work) == [(r.loss, r.grad_norm) for r in undisturbed]

"""Passes that are launched before the numbers of the step before are read change no number, byte or report, whatever
comes between; and on a device they are there before the host waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from platform.config.fields import Config
from platform.launch import compose_config
from platform.optimizer.optimizers import reason_against_passes_ahead
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import Communicator, SingleRank
from platform.train.faults import Fault
from platform.train.training_state import RankTrainingState
from tests.harness.card import SECTIONS, KernelCounter, alone, shrunk
from tests.harness.oracle import MODELS, configure, trainer_of, validation_loss
from tests.harness.threads import run_threads

PLANS: dict[str, dict[str, Any]] = {
    "whole": {},
    "zero 1": {"data": 2, "zero": 1},
    "zero 3, tensor": {"data": 2, "zero": 3, "tensor": "1d", "axes": {"t": 2}},
    "1f1b": {"pipeline": "1f1b", "stages": 2, "microbatch": 2},
    "zb_h1": {"pipeline": "zb_h1", "stages": 2, "microbatch": 2},
    "experts": {**MODELS["experts"], "data": 2, "balance_rate": 0.3, "router_bias": True, "balance_loss": 0.0},
}
Step = tuple[int, dict[str, Any]]
# a step that is skipped, one that is done again, one that others' passes come before, a fault that passes must meet
STEPS: list[Step] = [(1, {}), (2, {"limit": 0.5}), (2, {}), (3, {}), (4, {"fault": Fault(4, "nan", 0)}), (5, {})]
EVALUATED = 3


def configured(plan: str) -> Config:
    c = configure(**{"precision": "fp32", "layers": 2, "dropout": 0.1, **PLANS[plan]})
    c.train.steps, c.train.ema, c.monitor.layers = len(STEPS), 0.9, 2
    return c


def run(c: Config, ahead: bool) -> list[Any]:
    """What each rank reports, and its state, after each step."""
    plan = make_plan(c)

    def work(communicator):
        trainer, seen = trainer_of(c, plan, communicator), []
        trainer.weights.begin_averages()
        trainer.updates_early = True
        state = RankTrainingState(trainer)
        for step, how in STEPS:
            if "fault" in how:
                trainer.drop_passes_ahead()
            report = trainer.step(step, then=step + 1 if ahead and "fault" not in how else 0, **how)
            numbers = [report.loss, report.grad_norm, report.skipped, report.samples, report.comm_bytes, report.routed]
            numbers += [report.layer_gradients, report.layer_activations, state.read_values()]
            blocks = {block.name: block.tensor.detach().clone() for block in state.live_blocks()}
            seen.append((str(numbers), validation_loss(trainer) if step == EVALUATED else 0.0, blocks))
        return seen

    return run_threads(plan.mesh, work)


def differences(c: Config) -> list[str]:
    unequal = []
    for ours, others in zip(run(c, True), run(c, False), strict=True):
        for (step, _), (numbers, loss, blocks), (wanted, waited, kept) in zip(STEPS, ours, others, strict=True):
            unequal += [f"step {step}: {numbers} {loss}, not {wanted} {waited}"] * ((numbers, loss) != (wanted, waited))
            unequal += [f"step {step}: {name}" for name in blocks if not torch.equal(blocks[name], kept[name])]
    return unequal


FEW = ("whole",)


@pytest.mark.parametrize("plan", [*FEW, *(pytest.param(p, marks=pytest.mark.full) for p in PLANS if p not in FEW)])
def test_nothing_depends_on_when_passes_are_launched(plan):
    assert differences(configured(plan)) == []


def test_negative_control_passes_that_are_not_dropped(monkeypatch):
    """Gradients of a step's passes are added to those of the step that is done in its place."""
    monkeypatch.setattr("platform.train.trainer.Trainer.drop_passes_ahead", lambda self: setattr(self, "_ahead", None))
    assert differences(configured("whole"))


def test_what_goes_wrong_in_passes_ahead_is_told_at_their_turn(monkeypatch):
    c = configured("whole")
    plan = make_plan(c)
    trainer = trainer_of(c, plan, SingleRank(plan.mesh))
    trainer.updates_early, batch = True, trainer.corpus.batch

    def broken(split: str, start: int, end: int):
        if end > c.train.global_batch:
            raise OSError("no such sample")
        return batch(split, start, end)

    monkeypatch.setattr(trainer.corpus, "batch", broken)
    assert not trainer.step(1, then=2).skipped
    with pytest.raises(OSError, match="no such sample"):
        trainer.step(2)


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "negative control"])
def test_a_device_has_the_next_passes_before_the_host_waits(ahead):
    """Behind the update, and before the one read of a step; what a read waits for is not launched later."""
    c, seen = shrunk(compose_config(["+experiment=one_gpu"])), {}
    reads: list[int] = []
    with alone(c, 0, reads) as trainer, pytest.MonkeyPatch.context() as patch:
        assert trainer.runs_ahead
        trainer.step(1, then=2 if ahead else 0)
        with KernelCounter(trainer.communicator) as counter:

            def note(what: str, function):
                def noted(*args):
                    seen[what] = {name: counter.sections[name].launched for name in SECTIONS}
                    return function(*args)

                return noted

            patch.setattr(Communicator, "read_numbers", note("read", Communicator.read_numbers))
            patch.setattr(trainer, "_update_weights", note("update", trainer._update_weights))
            trainer.step(2, then=3 if ahead else 0)
            seen["end"] = {name: counter.sections[name].launched for name in SECTIONS}
    assert len(reads) == 2 and seen["read"]["optimizer"] > seen["update"]["optimizer"]
    for passes in ("forward", "backward"):
        between = seen["read"][passes] - seen["update"][passes]
        assert (between > 0) is ahead
    assert seen["end"] == seen["read"]


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "negative control"])
def test_the_labels_of_a_step_are_counted_while_the_device_works_on_another(ahead, monkeypatch):
    """None are counted between a step's order and its passes, but for the first of a generation."""
    c, seen = configured("whole"), {}
    plan = make_plan(c)
    trainer = trainer_of(c, plan, SingleRank(plan.mesh))

    def note(what: str, function):
        return lambda *args: calls.append(what) or function(*args)

    monkeypatch.setattr(trainer.corpus, "predicted", note("count", trainer.corpus.predicted))
    monkeypatch.setattr(trainer, "run_passes", note("passes", trainer.run_passes))
    if not ahead:
        monkeypatch.setattr(trainer, "_count_labels_ahead", lambda step: None)
    for step in (1, 2, c.train.steps):
        calls: list[str] = []
        trainer.step(step)
        seen[step] = calls
    first, second, last = seen.values()
    assert first == ["count", "passes", "count"][: 2 + ahead]
    assert second == (["passes", "count"] if ahead else ["count", "passes"])
    assert last == ["count", "passes"], "one that does not follow"


def test_where_a_step_waits_it_says_why():
    c = configured("whole")
    assert not reason_against_passes_ahead(c, make_plan(c))
    for change, reason in (
        (lambda: setattr(c.monitor, "timeline", True), "monitor.timeline begins"),
        (lambda: setattr(c, "precision", "fp16"), "precision=fp16 scales"),
        (lambda: setattr(c.train, "ahead", "off"), "train.ahead=off"),
    ):
        change()
        assert reason_against_passes_ahead(c, make_plan(c)).startswith(reason)

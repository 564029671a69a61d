"""An update that is launched before the step's numbers are read is the one that waits for them, to the bit, and the
device leaves out the ones that are to be skipped."""

from typing import Any

import pytest
import torch

from platform.config.fields import Config
from platform.optimizer.optimizers import reason_against_early_update
from platform.predict.make_plan import make_plan
from platform.train.faults import Fault
from platform.train.training_state import RankTrainingState
from tests.harness.oracle import MODELS, configure, trainer_of
from tests.harness.threads import run_threads

PLANS: dict[str, dict[str, Any]] = {
    "whole": {},
    "zero 1": {"data": 2, "zero": 1},
    "zero 3, tensor": {"data": 2, "zero": 3, "tensor": "1d", "axes": {"t": 2}},
}
STEPS: list[dict[str, Any]] = [{}, {"fault": Fault(2, "nan", 0)}, {}, {"limit": 0.5}, {}]  # the 2nd, 4th are skipped


def configured(plan: str, precision: str, clip: float) -> Config:
    c = configure(**{**MODELS["gpt"], **PLANS[plan], "precision": precision, "layers": 1})
    c.optimizer.clip, c.optimizer.weight_decay = clip, 0.1
    return c


def run(c: Config, early: bool) -> list[Any]:
    """Reports and state of each rank after each step."""
    plan = make_plan(c)

    def work(communicator):
        trainer, seen = trainer_of(c, plan, communicator), []
        assert not trainer.updates_early, "nothing is launched on a CPU"
        trainer.updates_early = early
        state = RankTrainingState(trainer)
        for step, how in enumerate(STEPS, 1):
            report = trainer.step(step, **how)
            blocks = {block.name: block.tensor.detach().clone() for block in state.live_blocks()}
            seen.append((report.skipped, report.loss, report.grad_norm, report.loss_scale, state.read_values(), blocks))
        return seen

    return run_threads(plan.mesh, work)


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("plan", PLANS)
def test_equals_the_update_that_waits(plan, precision, clip):
    c = configured(plan, precision, clip)
    assert not reason_against_early_update(c, make_plan(c))
    for early, late in zip(run(c, True), run(c, False), strict=True):
        assert [skipped for skipped, *_ in early] == [False, True, False, True, False]
        for ours, waited in zip(early, late, strict=True):
            *numbers, blocks = ours
            *wanted, kept = waited
            assert str(numbers) == str(wanted)  # NaN too
            assert blocks.keys() == kept.keys() and all(torch.equal(blocks[n], kept[n]) for n in blocks)


def test_negative_control_a_device_that_skips_nothing(monkeypatch):
    c = configured("whole", "fp32", 0.5)
    monkeypatch.setattr(torch, "isfinite", lambda x: torch.ones_like(x, dtype=torch.bool))
    monkeypatch.setattr(torch.Tensor, "__le__", lambda x, _: torch.ones_like(x, dtype=torch.bool))
    (((*_, first), (*_, second), *_),) = run(c, True)
    assert not torch.equal(first["model.embedding"], second["model.embedding"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: setattr(c.optimizer, "kind", "lion"), "optimizer=lion cannot skip"),
        (lambda c: setattr(c.train, "ema", 0.9), "train.ema changes"),
        (lambda c: setattr(c, "precision", "fp64"), "precision=fp64"),
        (lambda c: setattr(c.optimizer, "early", "off"), "optimizer.early=off"),
    ],
)
def test_where_it_waits_it_says_why(change, reason):
    c = configured("whole", "fp32", 0.5)
    change(c)
    assert reason_against_early_update(c, make_plan(c)).startswith(reason)

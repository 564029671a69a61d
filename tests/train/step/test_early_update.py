"""An update that is launched before the step's numbers are read is the one that waits for them, to the bit, whatever
the optimizer keeps, and the device leaves out the ones that are to be skipped: the first one too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from platform.config.fields import Config
from platform.optimizer import update_rules
from platform.optimizer.optimizers import OPTIMIZERS, OptimizerKind, reason_against_early_update
from platform.predict.make_plan import make_plan
from platform.train.faults import Fault
from platform.train.training_state import RankTrainingState
from tests.harness.oracle import MODELS, configure, trainer_of
from tests.harness.threads import run_threads
from tests.optimizer.test_stored_states import WIDE

PLANS: dict[str, dict[str, Any]] = {
    "whole": {},
    "zero 1": {"data": 2, "zero": 1},
    "zero 2": {"data": 2, "zero": 2},
    "zero 3, tensor": {"data": 2, "zero": 3, "tensor": "1d", "axes": {"t": 2}},
}
LORA = {"kind": "lora", "rank": 4, "alpha": 8.0}
BALANCED = {**MODELS["experts"], "balance_rate": 0.3, "router_bias": True, "balance_loss": 0.0}
# what is trained -> the model, and settings by key
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adamw": ({}, {}),
    "averages": ({}, {"train.ema": 0.9}),
    "sgd": ({}, {"optimizer.kind": "sgd", "optimizer.momentum": 0.9, "optimizer.nesterov": True}),
    "lion": ({}, {"optimizer.kind": "lion"}),
    "muon": ({}, {"optimizer.kind": "muon"}),
    "muon, averages": ({}, {"optimizer.kind": "muon", "optimizer.nesterov": True, "train.ema": 0.9}),
    "adafactor": ({}, {"optimizer.kind": "adafactor"}),
    "moments in bf16": (WIDE, {"optimizer.moments": "bf16"}),
    "moments in 8 bits": (WIDE, {"optimizer.moments": "int8"}),
    "sgd in 8 bits": (WIDE, {"optimizer.moments": "int8", "optimizer.kind": "sgd", "optimizer.momentum": 0.9}),
    "lion in 8 bits": (WIDE, {"optimizer.moments": "int8", "optimizer.kind": "lion"}),
    "masters split": ({"precision": "bf16"}, {"optimizer.masters": "split", "train.ema": 0.9}),
    "all split": ({**WIDE, "precision": "bf16"}, {"optimizer.masters": "split", "optimizer.moments": "int8"}),
    "adapters": ({}, {"tune": LORA}),
    "router": (BALANCED, {}),
}
# the 1st, 3rd, 5th are skipped
STEPS: list[dict[str, Any]] = [{"fault": Fault(1, "nan", 0)}, {}, {"fault": Fault(3, "nan", 0)}, {}, {"limit": 0.5}, {}]


def configured(kind: str, plan: str, precision: str, clip: float) -> Config:
    model, settings = KINDS[kind]
    c = configure(**{**MODELS["gpt"], "precision": precision, "layers": 1, **PLANS[plan], **model})
    c.optimizer.clip, c.optimizer.weight_decay = clip, 0.1
    for key, value in settings.items():
        group, _, name = key.partition(".")
        owner = getattr(c, group)
        for n, v in value.items() if isinstance(value, dict) else [(name, value)]:
            setattr(owner, n, v)
    return c


def run(c: Config, early: bool) -> list[Any]:
    """Reports and state of each rank after each step. Numbers of an optimizer that has updated nothing yet are those
    of a fresh one: none, or zeros."""
    plan = make_plan(c)

    def work(communicator):
        trainer, seen = trainer_of(c, plan, communicator), []
        if c.train.ema:
            trainer.weights.begin_averages()
        assert not trainer.updates_early, "nothing is launched on a CPU"
        trainer.updates_early = early
        state = RankTrainingState(trainer)
        for step, how in enumerate(STEPS, 1):
            report = trainer.step(step, **how)
            blocks = {block.name: block.tensor.detach().clone() for block in state.live_blocks()}
            values = state.read_values()
            counts = {name: x for name, x in values.pop("optimizer", {}).items() if x}
            numbers = report.skipped, report.loss, report.grad_norm, report.loss_scale, values, counts
            seen.append((*numbers, blocks))
        return seen

    return run_threads(plan.mesh, work)


def check_equal(c: Config) -> None:
    assert not reason_against_early_update(c)
    changed = False
    for early, late in zip(run(c, True), run(c, False), strict=True):
        assert [skipped for skipped, *_ in early] == [True, False] * 3
        for ours, waited in zip(early, late, strict=True):
            *numbers, blocks = ours
            *wanted, kept = waited
            assert str(numbers) == str(wanted)  # NaN too
            assert blocks.keys() == kept.keys()
            assert not [name for name in blocks if not torch.equal(blocks[name], kept[name])]
        changed |= any(not torch.equal(early[0][-1][n], early[-1][-1][n]) for n in early[0][-1])
    assert changed


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("plan", PLANS)
def test_equals_the_update_that_waits(plan, precision, clip):
    check_equal(configured("adamw", plan, precision, clip))


# of each kind one plan, in turn; all others are full
TURNS = [(kind, plan, (i - j) % len(PLANS)) for i, kind in enumerate([*KINDS][1:]) for j, plan in enumerate(PLANS)]
EACH = [pytest.param(kind, plan, marks=[pytest.mark.full] * bool(turn)) for kind, plan, turn in TURNS]


@pytest.mark.parametrize(("kind", "plan"), EACH)
def test_whatever_is_kept_equals_the_update_that_waits(kind, plan):
    check_equal(configured(kind, plan, "fp32", 0.5))


def test_numbers_of_64_bits_too():
    check_equal(configured("adamw", "zero 1", "fp64", 0.5))


def test_negative_control_a_device_that_skips_nothing(monkeypatch):
    c = configured("adamw", "whole", "fp32", 0.5)
    monkeypatch.setattr(torch.Tensor, "logical_not", lambda x: torch.zeros_like(x))
    (((*_, first), (*_, second), (*_, third), *_),) = run(c, True)
    assert first["model.embedding"].isnan().all() and third["model.embedding"].isnan().all()


@pytest.mark.parametrize(
    "kind",
    ["averages", "router", "sgd", *(pytest.param(k, marks=pytest.mark.full) for k in ("lion", "muon", "adafactor"))],
)
def test_negative_control_what_is_kept_is_not_held(kind, monkeypatch):
    """Each part that holds numbers as they are, taken away."""
    broken = {
        "averages": lambda: monkeypatch.setattr(
            "platform.train.rank_parameters.RankWeights.update_averages",
            lambda self, decay, skipped=None: [a.lerp_(self.read_master(n), 0.1) for n, a in self.averages.items()],
        ),
        "sgd": lambda: monkeypatch.setattr(update_rules.Sgd, "step", torch.optim.SGD.step),
        "router": lambda: monkeypatch.setattr(
            "platform.train.trainer.update_router_states", lambda router, states, load, _: states["choice"].add_(1)
        ),
    }
    break_it = broken.get(kind, lambda: monkeypatch.setattr(update_rules.Skip, "hold", lambda self, x, moment: x))
    break_it()
    with pytest.raises(AssertionError):
        check_equal(configured(kind, "whole", "fp32", 0.5))


def test_where_it_waits_it_says_why(monkeypatch):
    c = configured("adamw", "whole", "fp32", 0.5)
    c.optimizer.early = "off"
    assert reason_against_early_update(c) == "optimizer.early=off"
    own = OptimizerKind(lambda groups, o: torch.optim.Adagrad(groups), moments=1)
    monkeypatch.setitem(OPTIMIZERS, "own", own)
    c.optimizer.kind = "own"
    assert reason_against_early_update(c) == "optimizer=own cannot skip an update on the device"

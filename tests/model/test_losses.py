"""What is refused of a loss that a user registers, and of an objective that names one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.config.fields import training_loss_name
from platform.config.validation import violations_of_configuration
from platform.data.objectives import Causal, register_objective
from platform.model.losses import register_loss
from platform.predict.make_plan import make_plan
from tests.harness.oracle import configure
from tests.harness.registries import as_before


@pytest.fixture(autouse=True)
def taken_back() -> Iterator[None]:
    with as_before():
        yield


def refused(c) -> str:
    """All lines with which a configuration is refused, by itself or for its plan."""
    lines = violations_of_configuration(c)
    if not lines:
        with pytest.raises(ConfigError) as caught:
            make_plan(c)
        lines = caught.value.violations
    return "\n".join(lines)


WRONG = {
    "raises AttributeError: 'Likelihood' object has no attribute 'entropy'": lambda of: of.entropy,
    "raises ValueError: [] for 6 labels, of which each needs one number": lambda of: of.log_probability.mean(),
    "raises ValueError: [6, 1] for 6 labels, of which each needs one number": lambda of: of.log_sum_exp[:, None],
    "raises ValueError: float for 6 labels, of which each needs one number": lambda of: 1.0,
    "raises RuntimeError: element 0 of tensors does not require grad": lambda of: of.log_probability.detach(),
    "is not finite, or its gradient is not": lambda of: (of.log_probability - of.log_probability).sqrt(),
    "gives a label another value beside other labels": lambda of: of.log_probability - of.log_probability.mean(),
    "or another time": lambda of: of.log_probability * torch.rand(len(of.log_probability)),
}


@pytest.mark.parametrize("reason", WRONG)
def test_what_is_no_loss(reason):
    register_loss("mine", WRONG[reason])
    c = configure()
    c.train.loss = "mine"
    assert (line := refused(c)).startswith("train.loss=mine: the loss mine ") and reason in line


def test_a_name_that_nobody_registers():
    c = configure()
    c.train.loss = "mine"
    assert refused(c) == "train.loss=mine: unknown; nearest legal: '', cross_entropy, dpo, ipo, simpo"
    c.train.loss, c.data.objective = "", "own"
    register_objective("own", lambda shape: Causal(shape.length), loss="theirs")
    expected = "data.objective=own: comes with the loss theirs, which nothing registers; nearest legal: a name that"
    expected += " register_loss has"
    assert refused(c) == expected


def test_an_objective_comes_with_a_loss_unless_another_is_named():
    register_loss("mine", lambda of: -of.log_probability)
    register_objective("own", lambda shape: Causal(shape.length), loss="mine")
    c = configure()
    assert training_loss_name(c) == "cross_entropy"
    c.data.objective = "own"
    assert (
        training_loss_name(c) == "mine" and make_plan(c).operations["cross_entropy", "loss"].operation["loss"] == "mine"
    )
    c.train.loss = "cross_entropy"
    assert training_loss_name(c) == "cross_entropy"
    assert "label_weights" not in make_plan(c).reader_layouts
    register_objective("own", lambda shape: Causal(shape.length), weighted=True)
    assert "label_weights" in make_plan(c).reader_layouts


def test_smoothing_is_not_for_it():
    register_loss("mine", lambda of: -of.log_probability)
    c = configure(label_smoothing=0.1)
    c.train.loss = "mine"
    constraint = "the loss mine says itself what a label costs; nearest legal: 0, train.loss=cross_entropy"
    assert refused(c) == f"model.label_smoothing=0.1: {constraint}"

"""An optimizer that needs whole tensors gets them, or the plan is refused: never other numbers in silence."""

from __future__ import annotations

import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config
from platform.optimizer import optimizers
from platform.optimizer.optimizers import register_optimizer
from platform.predict.make_plan import make_plan
from tests.harness.oracle import compare, configure, run
from tests.harness.registries import as_before


class Orthogonal(torch.optim.Optimizer):
    """Momentum whose matrices are orthogonalised by Newton and Schulz, as Muon does."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for w in group["params"]:
                momentum = self.state[w].setdefault("momentum", torch.zeros_like(w)).mul_(0.9).add_(w.grad)
                x = momentum.flatten(1) if w.ndim > 1 else momentum
                if w.ndim > 1:
                    x = x / x.norm()
                    for _ in range(5):
                        x = 1.5 * x - 0.5 * x @ x.t() @ x
                w.sub_(x.view_as(w), alpha=group["lr"])


def make(groups, o):
    return Orthogonal(groups, o.lr)


@pytest.fixture(autouse=True)
def registry():
    """Optimizers that are known for a test alone."""
    with as_before():
        yield


def configured(needs, *scheme, **more) -> Config:
    register_optimizer("orthogonal", make, 1, **({"needs": needs} if needs else {}))
    c = configure(*scheme, **more)
    c.optimizer.kind = "orthogonal"
    return c


SPLIT = {
    "t": (("1d", {"t": 2}), {}),
    "data": (("serial", {}), {"data": 2, "zero": 1}),
    "data ": (("serial", {}), {"data": 2, "zero": 3}),
    "t+data": (("1d", {"t": 2}), {"data": 2, "zero": 1}),
}


@pytest.mark.parametrize("needs", ["tensor", "matrix", None])
@pytest.mark.parametrize("axes", SPLIT)
def test_a_plan_that_splits_tensors_is_refused(axes, needs):
    scheme, more = SPLIT[axes]
    with pytest.raises(ConfigError) as refused:
        make_plan(configured(needs, *scheme, **more))
    [line] = refused.value.violations
    assert line.startswith("optimizer.kind=orthogonal: updates each ") and "as a whole, and " in line
    assert {*line.partition("is split over ")[2].partition(";")[0].split("+")} == {*axes.strip().split("+")}
    assert "nearest legal: adamw" in line and ("parallel.zero=0" in line) == ("t" not in axes.split("+"))


@pytest.mark.parametrize("more", [{"data": 2}, {"pipeline": "1f1b", "stages": 2, "microbatch": 2}], ids=str)
def test_whole_tensors_give_the_numbers_of_one_process(more):
    c = configured("matrix", bias=False, **more)  # the gradient of a key bias is noise around zero
    plan, results = run(c)
    compare(c, plan, results, run(configured("matrix", bias=False))[1][0])


def test_padded_rows_are_no_part_of_a_tensor():
    c = configured("tensor", "layout", {"a": 2}, vocab=61)
    c.tensor.regions, c.tensor.parameters = {"logits": {"vocab": ["a"]}}, {"all": {}}
    with pytest.raises(ConfigError, match=r"embedding.* is split over padding"):
        make_plan(c)


def test_what_is_not_declared_is_found_by_trying():
    assert optimizers.update_granularity(configured(None).optimizer) == "tensor"
    o = Config().optimizer
    for name, elementwise in {"plain": torch.optim.SGD, "rms": torch.optim.RMSprop, "adam": torch.optim.Adam}.items():
        register_optimizer(name, lambda groups, o, kind=elementwise: kind(groups, o.lr), 1)
        o.kind = name
        assert optimizers.update_granularity(o) == "element"
    register_optimizer("factor", lambda groups, o: torch.optim.Adafactor(groups, o.lr), 1)
    o.kind = "factor"
    assert optimizers.update_granularity(o) == "tensor"


def test_groups_that_an_optimizer_forgets_are_refused():
    """Their factors would have no effect."""
    c = configured("element")
    c.optimizer.groups = [{"match": ".*", "lr": 0.5}]
    make_plan(c)
    register_optimizer("orthogonal", lambda groups, o: make([w for g in groups for w in g["params"]], o), 1, "element")
    with pytest.raises(ConfigError, match=r"optimizer.groups=.*kind=orthogonal does not keep the groups"):
        make_plan(c)


def test_other_words_are_refused():
    with pytest.raises(ValueError, match="must be element, tensor or matrix"):
        register_optimizer("orthogonal", make, 1, needs="row")

"""An operation of a user's own, one class and its form in the check: planned, priced, metered, checked and run."""

from __future__ import annotations

import pytest
import torch

from platform.model import build_model, register_model
from platform.model.transformer import LOGITS
from platform.plan.model_types import Parameter, Spec
from platform.plan.operation_forms import FORMS
from platform.plan.operations.op import BlockOp
from platform.plan.operations.registry import OPERATIONS, Ops
from platform.plan.plan_builder import forget_planned
from platform.plan.plan_check import find_unsoundness
from platform.predict.footprint import count_saved_elements
from platform.predict.make_plan import make_plan
from platform.predict.sketch import sketch_model
from platform.predict.step_price import read_hardware, step_price
from tests.harness.oracle import configure, prove
from tests.runtime.test_memory import measured

STREAM = Spec.of("stream", "length batch d_model")
HIDDEN = Spec.of("mlp", "length batch d_ff")


class SurgeOp(BlockOp):
    """relu(x[t] - x[t - 1])^2 along length, element by element, with x[-1] = 0. A rank needs length whole."""

    memory_accesses = (2, 5)

    def record_operation(self, ops, name, x, spec):
        return ops.record_operation(self.kind, name, [x], [spec], [spec])

    def whole_dims(self, operation):
        return ("length",)

    def run_on_blocks(self, ops, planned, name, x, spec):
        return torch.diff(x, dim=0, prepend=torch.zeros_like(x[:1])).relu() ** 2

    def meter_memory(self, ops, planned, name, x, spec):
        return ops.plain(ops.tensor(x.elements), [x], (ops.new(x.elements),))


class Surging:
    """Next-token model: softmax(down(surge(up(x))) + x)."""

    inputs = ("tokens", "labels")

    def __init__(self, config):
        self.sizes = {"length": config.length, "d_model": config.d_model, "d_ff": 64, "vocab": config.vocab}
        self.table = Parameter("table", ("vocab", "d_model"), "in", std=0.5, decay=True)
        self.up = Parameter("up", ("d_ff", "d_model"), "in", std=0.5, decay=True)
        self.down = Parameter("down", ("d_model", "d_ff"), "out", std=0.5, decay=True)

    def parameters(self):
        return [self.table, self.up, self.down]

    def forward(self, ops, inputs):
        x = ops.lookup("embedding", self.table, inputs["tokens"], STREAM)
        (up,) = ops.project(x, STREAM, (self.up,), (HIDDEN,))
        (y,) = ops.project(ops.surge("surge", up, HIDDEN), HIDDEN, (self.down,), (STREAM,))
        (logits,) = ops.project(ops.pointwise("add", x, y), STREAM, (self.table,), (LOGITS,))
        return ops.cross_entropy("loss", logits, LOGITS, inputs["labels"])


register_model("surging", Surging)

SERIAL = configure(kind="surging", vocab=64)
LAYOUTS = {
    "1d": configure("1d", {"t": 2}, kind="surging", vocab=64),
    "length": configure("layout", {"c": 2}, rules={"length": ["c"]}, kind="surging", vocab=64),
}
LENGTH = LAYOUTS["length"]


@pytest.fixture(autouse=True)
def surge(monkeypatch):
    """The operation among those of `Ops`, and its form, that of another that needs length whole, in the check."""
    op = SurgeOp()
    op.kind = "surge"
    monkeypatch.setattr(Ops, op.kind, op, raising=False)
    monkeypatch.setitem(OPERATIONS, op.kind, op)
    monkeypatch.setitem(FORMS, op.kind, FORMS["recurrence"])
    yield op
    forget_planned()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_planned_checked_and_run_as_on_one_process(layout):
    plan, _ = prove(LAYOUTS[layout])
    collectives = {c.op for c in plan.operations["surge", "surge"].collectives}
    assert collectives == ({"all_gather"} if layout == "length" else set())
    assert find_unsoundness(plan) == []


@pytest.mark.parametrize("config", [SERIAL, *LAYOUTS.values()], ids=["serial", *LAYOUTS])
def test_metered_bytes_are_those_that_a_run_keeps(config, monkeypatch):
    plan, kept = measured(config)
    assert set(kept) == {count_saved_elements(plan, build_model(config.model)).total_elements}
    monkeypatch.setattr(SurgeOp, "meter_memory", lambda self, ops, planned, name, x, spec: ops.plain(x, [x]))
    assert set(kept) != {count_saved_elements(plan, build_model(config.model)).total_elements}


def test_is_priced_by_what_its_class_says(monkeypatch):
    hardware, plan = read_hardware("h100"), make_plan(LENGTH)
    seconds = step_price(LENGTH, plan, hardware).seconds
    sketch = sketch_model(LENGTH.model, plan.scheme, ["c"])
    monkeypatch.setattr(SurgeOp, "memory_accesses", (0, 0))
    assert 0 < step_price(LENGTH, plan, hardware).seconds < seconds
    sketched, without = (
        [k.times for k in s.numbers.kinds] for s in (sketch, sketch_model(LENGTH.model, plan.scheme, ["c"]))
    )
    assert (2, 5) in sketched and (2, 5) not in without


def test_negative_control_a_length_that_ranks_split(monkeypatch):
    """An operation that says nothing of what it needs whole is refused by the check, and computes another number."""
    monkeypatch.setattr(SurgeOp, "whole_dims", lambda self, operation: ())
    forget_planned()
    assert any("surge" in line for line in find_unsoundness(make_plan(LENGTH)))
    with pytest.raises(AssertionError):
        prove(LENGTH)


def test_negative_control_a_kind_without_a_form(monkeypatch):
    monkeypatch.delitem(FORMS, "surge")
    assert any("has no form" in line for line in find_unsoundness(make_plan(LENGTH)))

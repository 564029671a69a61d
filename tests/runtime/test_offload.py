"""Inputs of blocks in host memory until the backward pass (recompute_offload): no bit changes, the memory there is used
again, and what comes back is one block ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from platform.config.fields import Config
from platform.plan.operation_plan import OffloadedActivation
from platform.predict.make_plan import make_plan
from platform.runtime.recompute import ActivationOffload
from tests.harness.oracle import MODELS, configure, prove, run, trainer_of
from tests.harness.threads import run_threads

PAIR: dict[str, Any] = {"stages": 2, "microbatch": 2}
T: dict[str, Any] = {"axes": {"t": 2}}
CASES: dict[str, dict[str, Any]] = {
    "serial, two blocks at a time": {"layers": 4, "every": 2, "dropout": 0.1},
    "1d_sp, zero 3": {"tensor": "1d_sp", **T, "data": 2, "zero": 3, "microbatch": 2},
    "1d, whose ranks keep parts": {"tensor": "1d", **T},
    "1f1b, bf16": {"pipeline": "1f1b", **PAIR, "layers": 4, "precision": "bf16"},
    "interleaved, fp16": {"pipeline": "interleaved", **PAIR, "chunks": 2, "layers": 4, "precision": "fp16"},
    "zb_h1, 1d": {"pipeline": "zb_h1", **PAIR, "tensor": "1d", **T},
    "encoder and decoder, dropout": {**MODELS["t5"], "dropout": 0.1},
    "experts of two replicas": {**MODELS["experts"], "data": 2, "experts_of": 2, "microbatch": 2},
}
PROVED = ("1d, whose ranks keep parts", "zb_h1, 1d")


def offloading(on: bool = True, **plan: Any) -> Config:
    return configure(**{"recompute": "full", **plan}, offload=on)


@pytest.mark.parametrize("name", CASES)
def test_no_bit_changes(name):
    pairs = zip(*(run(offloading(on, **CASES[name]))[1] for on in (True, False)), strict=True)
    for one, other in pairs:
        assert (one.losses, one.grad_norm, one.moved) == (other.losses, other.grad_norm, other.moved)
        for actual, wanted in ((one.gradients, other.gradients), (one.final, other.final)):
            assert actual.keys() == wanted.keys() and all(torch.equal(actual[n], wanted[n]) for n in actual)


@pytest.mark.parametrize("name", PROVED)
def test_it_is_what_one_process_computes(name):
    prove(offloading(**CASES[name]))


def test_negative_control_memory_that_is_given_to_two(monkeypatch):
    """Of what leaves, the first is overwritten by the second."""
    one = torch.empty(1 << 16, dtype=torch.uint8)
    monkeypatch.setattr(ActivationOffload, "_take_host_bytes", lambda self, count: one[:count])
    with pytest.raises(AssertionError):
        prove(offloading(layers=3))


@pytest.mark.parametrize("name", ["1f1b, bf16", "encoder and decoder, dropout"])
def test_the_memory_there_is_what_is_planned_and_is_used_again(name):
    from platform.predict.memory_budget import predict_footprints

    c = offloading(**CASES[name])
    plan = make_plan(c)

    def held(communicator) -> tuple[int, list[int]]:
        trainer, nbytes = trainer_of(c, plan, communicator), []
        for step in (1, 2):
            trainer.step(step)
            nbytes.append(sum(size * len(free) for size, free in trainer.ops.offload._free.items()))
        return communicator.coordinates["stage"], nbytes

    planned = [f.host for f in predict_footprints(c, plan)]
    assert all(nbytes == [planned[stage]] * 2 for stage, nbytes in run_threads(plan.mesh, held)) and min(planned) > 0


def test_what_is_needed_next_is_under_way():
    started: list[int] = []

    def fetch(number: int) -> int:
        started.append(number)
        return number

    last: OffloadedActivation[int] | None = None
    passed = [last := OffloadedActivation(lambda i=i: fetch(i), last) for i in range(3)]
    assert passed[2].take_back() == 2 and started == [2, 1]
    assert passed[1].take_back() == 1 and started == [2, 1, 0]
    assert passed[0].take_back() == 0 and started == [2, 1, 0]


def test_a_pass_does_not_fetch_what_another_has_left():
    offload = ActivationOffload(torch.device("cpu"))
    first, _ = offload.offload_activation(torch.ones(3))
    offload.begin_pass()
    second, _ = offload.offload_activation(torch.zeros(3))
    assert torch.equal(second.take_back()(), torch.zeros(3)) and len(offload._free[12]) == 1
    assert torch.equal(first.take_back()(), torch.ones(3)) and len(offload._free[12]) == 2

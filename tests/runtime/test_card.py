"""What one rank does on a device, seen without one: a whole step of every shipped experiment on a card that is not
there, its synchronisations, the kernels and bytes of a layer, and the shapes of its products."""

from __future__ import annotations

from functools import cache
from math import prod
from threading import current_thread

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from platform.config.fields import Config
from platform.launch import CONF, compose_config
from platform.plan.accelerators import nominal_memory
from platform.plan.chunks import ADDS_WIDE
from platform.plan.plan import Plan
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_peak_bytes
from tests.harness.card import CARD, Counted, KernelCounter, alone, per_layer, ranks, shrunk
from tests.harness.oracle import validation_loss

EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
ON_GPUS = [name for name in EXPERIMENTS if "device: cuda" in (CONF / "experiment" / f"{name}.yaml").read_text()]


@cache
def composed(name: str) -> Config:
    return compose_config([f"+experiment={name}"])


def small(name: str) -> Config:
    return shrunk(composed(name))


def route_by_stage(plan: Plan) -> list[bool]:
    """Whether a stage has layers with experts: `shrunk` leaves some stages none."""
    parts = map(plan.stage_part, range(plan.num_stages))
    return [any("experts" in p.dims for p in part.parameters) for part in parts]


@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.full)], ids=["few ranks", "the others"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_whole_step_reads_its_device_once(name, rest, record_count):
    """Fake tensors have no numbers: whatever else would wait for the device raises."""
    c = small(name)
    every = ranks(c)
    few = {every[0], every[-1]}
    if not rest and len(few) < len(every):
        record_count(f"whole steps on the card, ranks of {name}", len(few), len(every))
    for rank in [r for r in every if (r in few) != rest]:
        reads: list[int] = []
        with alone(c, rank, reads) as trainer, KernelCounter(trainer.communicator) as counter:
            report = trainer.step(1)
            routes = route_by_stage(trainer.plan)
            assert any(routes) is bool(c.model.experts)
            first = 2 + 2 * c.model.experts * routes[trainer.communicator.coordinates["stage"]]
            assert reads == [first], "sums of loss and squared norm, and tokens by expert, together"
            assert report.loss > 0 and not report.skipped and counter.sections["backward"].launched > 0
            validation_loss(trainer)
        assert reads == [first, 2]


WAITS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x.any()),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "index by mask": lambda x: x.masked_select(x > 0),
    "to the host": lambda x: x.cpu(),
    "another device": lambda x: x + torch.ones(4),
    "made elsewhere": lambda x: torch.zeros(1),
}


@pytest.mark.parametrize("name", WAITS)
def test_negative_control_what_waits_for_the_card_or_is_elsewhere(name):
    with alone(small("two_layer"), 0, []) as trainer, KernelCounter(trainer.communicator):
        x = torch.ones(4, device=CARD)
        x += x  # what a step may do
        with pytest.raises((RuntimeError, AssertionError), match="makes a tensor on|device|aten"):
            WAITS[name](x)


def test_the_backward_pass_runs_in_the_thread_of_the_card():
    """As on CUDA, and not in the one that called it; fused AdamW updates there."""
    with alone(small("one_gpu"), 0, []) as trainer, KernelCounter(trainer.communicator) as counter:
        trainer.step(1)
    forward, backward, update = (counter.sections[name] for name in ("forward", "backward", "optimizer"))
    assert forward.threads == update.threads == {current_thread().name}
    assert len(backward.threads - forward.threads) == 1
    assert "_fused_adamw_" in update.kernels


DROPS = ["+experiment=one_gpu", "model.dropout=0.1"]
HUGE = ["+experiment=gpt175b", "pipeline=none", "recompute=none"]  # 4096 tokens on 8 GPUs
# What a layer and a microbatch launch and move (MB): forward, backward, and backward where gradients are added to those
# of earlier microbatches.
BUDGETS = {
    "gpt2_124m": (["+experiment=one_gpu"], (10, 492), (21, 1037), (22, 1065)),
    # eager; compiled, each mask is part of one kernel: tests/runtime/kernels/test_compiled.py
    "gpt2_124m dropout": ([*DROPS, "model.fused_dropout=false"], (152, 30394), (156, 31465), (157, 31494)),
    "gpt2_124m fused dropout": ([*DROPS, "model.fused_dropout=true"], (52, 3613), (61, 4158), (62, 4186)),
    "gpt175b t=8 1d": (HUGE, (12, 2567), (21, 4292), (22, 5199)),
    "gpt175b t=8 1d_sp": ([*HUGE, "tensor=1d_sp"], (12, 1334), (21, 3058), (22, 3965)),
}


def budget(section: Counted) -> tuple[int, int]:
    return section.launched, round(section.nbytes / 1e6)


@pytest.mark.parametrize("name", BUDGETS)
def test_a_layer_s_kernels_and_bytes(name):
    overrides, *budgets = BUDGETS[name]
    sections = per_layer(compose_config(overrides))
    assert [budget(section) for section in sections.values()] == budgets


def test_negative_control_products_that_are_rounded_and_added_later(monkeypatch):
    """4 bytes more for each of the layer's 227 million parameters, whether it is the first microbatch or not."""
    monkeypatch.setitem(ADDS_WIDE, "cuda", False)
    overrides, *budgets = BUDGETS["gpt175b t=8 1d"]
    actual = [budget(section) for section in per_layer(compose_config(overrides)).values()]
    assert actual == [budgets[0], (21, 5198), (21, 6104)]


class NarrowSums(TorchDispatchMode):
    """Collects the sizes of buffers that are made in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ == "empty" and out.itemsize == 2:
            self.sizes.add(out.numel())
        return out


@pytest.mark.parametrize("wide", [True, False], ids=["as on CUDA", "negative control"])
@pytest.mark.parametrize("more", ["", "tensor=1d tensor.axes.t=2", "pipeline=1f1b pipeline.stages=2"])
def test_no_sum_of_gradients_is_in_16_bits(wide, more, monkeypatch):
    monkeypatch.setitem(ADDS_WIDE, "cuda", wide)
    c = shrunk(compose_config(["+experiment=one_gpu", *more.split()]))
    c.train.global_batch = 2 * c.train.microbatch
    with alone(c, 0, []) as trainer, NarrowSums() as narrow:
        trainer._run_forward_backward(1)
        buckets = {flat.bucket.elements for flat in trainer.weights.buckets}
        assert {g.dtype for g in trainer.weights.local_gradients.values()} == {torch.float32}
    assert narrow.sizes.isdisjoint(buckets) is wide


@cache
def planned(experiment: str) -> tuple[Config, Plan]:
    c = composed(experiment)
    return c, make_plan(c)


@pytest.mark.parametrize("experiment", ON_GPUS)
def test_an_experiment_fits_the_gpu_that_it_names(experiment):
    c, plan = planned(experiment)
    assert c.cluster.gpu and predict_peak_bytes(c, plan) <= nominal_memory(c.cluster.gpu)


def test_what_does_not_fit_is_seen():
    c = compose_config(["+experiment=one_gpu", "train.microbatch=64"])
    assert predict_peak_bytes(c, make_plan(c)) > nominal_memory(c.cluster.gpu)


def unaligned(plan: Plan) -> set[str]:
    """The parameters whose products have a size that is no multiple of 8: of 16 bytes in bf16, without which tensor
    cores are several times slower. A matrix has d_model on one side, and all its other dims on the other."""
    tables = {"position", "relative_bias"}  # looked up, not multiplied
    names = set()
    for p in plan.parameters:
        if "d_model" in p.dims and len(p.dims) > 1:
            shape = plan.local_shape(p)
            side = shape[p.dims.index("d_model")]
            if side % 8 or prod(shape) // side % 8:
                names.add(p.name.rpartition(".")[2])
    return {name for name in names - tables if not name.endswith("_bias")}


@pytest.mark.parametrize("experiment", ON_GPUS)
def test_the_products_of_an_experiment_have_aligned_sizes(experiment):
    assert not unaligned(planned(experiment)[1])


def test_an_unaligned_size_is_seen():
    c = compose_config(["+experiment=one_gpu", "model.d_ff=3070"])
    assert "up" in unaligned(make_plan(c))

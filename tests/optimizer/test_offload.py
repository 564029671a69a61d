"""States and masters in host memory (optimizer.offload): no bit of any update changes, whatever passes through the two
buffers."""

from __future__ import annotations

import re

import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.boundary.storage import open_storage
from platform.config.fields import Config
from platform.optimizer import stored_states
from platform.optimizer.optimizers import PIECES
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_footprints
from platform.runtime import flat_buffers, staged_memory
from platform.runtime.flat_buffers import join_halves
from platform.runtime.staged_memory import StagingBuffers
from platform.train import rank_parameters
from tests.harness.oracle import trainer_of
from tests.harness.threads import run_threads
from tests.optimizer.test_split_masters import PLANS, configured, trained
from tests.optimizer.test_stored_resume import restored, saved

STATES, MASTERS = "states", "states+masters"


def offloaded(offload: str, plan: str = "serial", masters: str = "fp32", **more) -> Config:
    c = configured(masters, plan, **more)
    c.optimizer.offload = offload
    return c


def check_alike(ours: Config, theirs: Config) -> None:
    for one, other in zip(trained(ours), trained(theirs), strict=True):
        assert one[0].keys() == other[0].keys() and one[1] == other[1]
        assert all(torch.equal(x, other[0][name]) for name, x in one[0].items())


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Several pieces of each stretch, so that buffers are used again."""
    monkeypatch.setitem(PIECES, "cpu", 1 << 10)


@pytest.mark.parametrize("offload", [STATES, MASTERS])
@pytest.mark.parametrize("plan", PLANS)
def test_it_is_the_training_without_it(plan, offload):
    """With clipped gradients, moving averages, and an evaluation by these."""
    pair = offloaded(offload, plan), offloaded("none", plan)
    for c in pair:
        c.train.ema, c.eval.averaged, c.eval.batches = 0.75, True, 1
    check_alike(*pair)


FORMS = [
    ("lion", "fp32", "fp32", MASTERS), ("sgd", "fp32", "fp32", STATES), ("adamw", "int8", "fp32", MASTERS),
    ("adamw", "bf16", "split", MASTERS), ("adamw", "fp32", "split", STATES), ("lion", "int8", "split", MASTERS),
]  # fmt: skip


@pytest.mark.parametrize("kind, moments, masters, offload", FORMS)
def test_with_other_optimizers_and_forms(kind, moments, masters, offload):
    pair = (offloaded(word, "zero1", masters, kind=kind, moments=moments) for word in (offload, "none"))
    check_alike(*pair)


@pytest.mark.parametrize(
    "precision, masters", [("fp16", "fp32"), ("fp32", "fp32"), ("fp8", "fp32"), ("fp8", "split"), ("mxfp8", "split")]
)
def test_in_other_precisions(precision, masters):
    """Of 8 bits too, whose weights are bf16."""
    offload = STATES if precision == "fp32" else MASTERS
    pair = offloaded(offload, "zero2", masters), offloaded("none", "zero2", masters)
    for c in pair:
        c.precision = precision
    assert make_plan(pair[0]).has_scaled_products == ("fp8" in precision)
    check_alike(*pair)


@pytest.mark.parametrize(
    "source, target",
    [
        ((MASTERS, "zero3", "fp32"), ("none", "1d", "split")), (("none", "zero1", "fp32"), (MASTERS, "zero3", "fp32")),
        ((STATES, "1d", "split"), (MASTERS, "stages", "split")),
    ],
    ids=str,
)  # fmt: skip
def test_checkpoints_hold_the_numbers(source, target, tmp_path):
    storage = open_storage(str(tmp_path))
    directory, stored = saved(offloaded(*source), storage)
    have = restored(offloaded(*target), storage, directory)

    def numbers(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        high, low = tensors[f"model.{name}"], tensors.get(f"low.{name}")
        return high if low is None else join_halves(high.bfloat16(), low.short()).double()

    names = [name.removeprefix("model.") for name in have if name.startswith("model.")]
    assert all(torch.equal(numbers(have, name), numbers(stored, name)) for name in names)
    assert all(torch.equal(x, stored[name]) for name, x in have.items() if name.startswith("exp_avg"))


@pytest.mark.parametrize("offload", [STATES, MASTERS])
def test_what_lies_in_host_memory_is_what_is_planned(offload, monkeypatch):
    """And a GPU needs as much less."""
    c, bare = offloaded(offload, "zero1"), offloaded("none", "zero1")
    for one in (c, bare):
        one.train.ema, one.cluster.device = 0.9, "cuda"
    plan, hosted = make_plan(c), list[int]()
    allocate = staged_memory.allocate_host_zeros

    def counted(shape, dtype, device):
        hosted.append((x := allocate(shape, dtype, device)).nbytes)
        return x

    for module in (flat_buffers, rank_parameters, stored_states):
        monkeypatch.setattr(module, "allocate_host_zeros", counted)
    run_threads(plan.mesh, lambda communicator: trainer_of(c, plan, communicator).step(1) and None)
    planned, less = predict_footprints(c, plan)[0], predict_footprints(bare, make_plan(bare))[0]
    padding = sum(b.elements - sum(b.sizes) for b in plan.buckets) * 16
    assert 2 * planned.host - padding <= sum(hosted) <= 2 * planned.host
    assert planned.parameters + planned.optimizer + planned.host == less.parameters + less.optimizer
    assert planned.host > 0.5 * less.optimizer and less.host == 0


REFUSED = [
    ({"kind": "muon"}, "states", "muon reads whole states; nearest legal: none, optimizer=adamw"),
    ({"kind": "adafactor"}, "states", "adafactor reads whole states"),
    ({"kind": "sgd", "momentum": 0.0}, "states", "sgd keeps no moments"),
    (
        {},
        "states+masters",
        "precision=fp32 computes with the masters themselves; nearest legal: states, precision=bf16",
    ),
]


@pytest.mark.parametrize("more, offload, line", REFUSED, ids=str)
def test_what_cannot_lie_there_is_refused(more, offload, line):
    c = offloaded(offload, **more)
    c.precision = "bf16" if more else "fp32"
    with pytest.raises(ConfigError, match=f"optimizer.offload={re.escape(offload)}: {line}"):
        make_plan(c)


def test_negative_controls_what_does_not_come_or_does_not_leave(monkeypatch):
    start = StagingBuffers._start_copies
    for lost in (0, 1):
        for way in (STATES, MASTERS):
            with monkeypatch.context() as patch, pytest.raises(AssertionError):
                patch.setattr(
                    StagingBuffers,
                    "_start_copies",
                    lambda self, to, targets, sources, before, lost=lost: start(
                        self, to, targets[: len(targets) - (to == lost)], sources[: len(sources) - (to == lost)], before
                    ),
                )
                ours = trained(offloaded(way))
                patch.undo()
                for one, other in zip(ours, trained(offloaded("none")), strict=True):
                    assert all(torch.equal(x, other[0][name]) for name, x in one[0].items())

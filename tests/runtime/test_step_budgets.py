"""What a step launches and moves beside its layers, on a card that is not there: the loss, the norm of the gradients,
their clipping, the update, and the compute weights that it makes. Equalities, from types and numbers of elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from platform.config.fields import Config
from platform.launch import compose_config
from platform.optimizer import optimizers
from platform.runtime import flat_buffers
from platform.runtime.chunked_loss import LossClasses
from platform.runtime.flat_buffers import FlatBucket
from platform.train.trainer import Trainer
from tests.harness.card import CARD, Counted, alone, of_an_update, of_the_loss
from tests.harness.launches import moved
from tests.harness.oracle import configure

FOUR = ["parallel.data=4"]
# command line -> bytes that an update moves per element that a rank updates
UPDATES = {
    "adamw": (["optimizer.clip=0"], 28),  # weight, both moments: read and written; gradient: read
    "adamw, clipped": (["optimizer.clip=0.5"], 28 + 4),  # torch's kernels write what they have divided
    "adamw, late": (["optimizer.clip=0", "optimizer.early=off"], 28),
    "adamw, late, clipped": (["optimizer.clip=0.5", "optimizer.early=off"], 28 + 4),
    "sgd": (["optimizer=sgd", "optimizer.clip=0"], 20),
    "sgd, clipped": (["optimizer=sgd", "optimizer.clip=0.5"], 20 + 4),
    "sgd, late": (["optimizer=sgd", "optimizer.clip=2", "optimizer.early=off"], 20),
    "sgd, late, clipped": (["optimizer=sgd", "optimizer.clip=0.5", "optimizer.early=off"], 20 + 4),
    # in five launches, of which the floor is 20
    "lion, late": (["optimizer=lion", "optimizer.clip=2", "optimizer.early=off"], 52),
    "lion, late, clipped": (["optimizer=lion", "optimizer.clip=0.5", "optimizer.early=off"], 52 + 8),
}
SHARDS = {"whole": [], "data": FOUR, **{f"zero {n}": [*FOUR, f"parallel.zero={n}"] for n in (1, 2, 3)}}
NARROW = {"bf16": 4 + 2, "fp32": 4 + 4}  # precision -> bytes to make a compute weight of its master


def composed(*more: str) -> Config:
    c = compose_config(["+experiment=one_gpu", *more])
    c.model.layers = 2
    return c


def of_types(trainer: Trainer) -> dict[str, tuple[int, int]]:
    """Kernels and bytes of the norm, of the launches of an update that are alike for all optimizers, and of compute
    weights, by the numbers of a rank's buckets and of what these have."""
    weights, buckets = trainer.weights, trainer.weights.buckets
    stretches = [s for ranges in trainer._counted.values() for s in ranges]
    counted = sum(s.stop - s.start for s in stretches)
    refreshed = [flat for flat in buckets if flat.part is not flat.masters]
    each = NARROW[trainer.plan.precision]
    together = trainer.plan.mesh.world_size > 1  # the sum over the world is taken of a copy
    return {
        # a norm for each stretch; then 8 bytes each are stacked, squared, added to what a fault adds, and to the loss
        "norm": (5 + together, 4 * counted + 40 * len(stretches) + 56 + 32 * together),
        "refresh": (len(refreshed), each * sum(flat.masters.numel() for flat in refreshed)),
        "elements": (len(trainer.optimizer.state), sum(w.numel() for w in weights.trainable_masters.values())),
    }


def budget_of(name: str, trainer: Trainer) -> dict[str, tuple[int, int]]:
    """Kernels and bytes of the sections of a step in which weights are updated by one of UPDATES."""
    _, each = UPDATES[name]
    known, groups = of_types(trainer), len(trainer.optimizer.param_groups)
    (parts, elements), (copies, copied), clips = known["elements"], known["refresh"], "clipped" in name
    kernels, nbytes = groups, each * elements
    if name.startswith("adamw"):  # counts its steps, in a number of fp32 for each stretch
        kernels, nbytes = 2 * groups, nbytes + parts * (8 + 4)
    if name.startswith("lion"):
        kernels = 5 * lists(trainer) + clips  # all gradients are multiplied first
    elif clips:  # the factor is a number on the device, which each launch reads
        kernels, nbytes = kernels + 1, nbytes + 4 + 4 * groups
    if "late" not in name:
        # eight launches say whether it is to be skipped, whose word each kernel reads
        kernels, nbytes = kernels + 8, nbytes + 112 + 4 * groups
        if name.startswith("adamw"):  # and takes off the counts of steps
            kernels, nbytes = kernels + groups, nbytes + parts * (8 + 4)
        if clips:  # four make the factor, in place of one
            kernels, nbytes = kernels + 4 - 1, nbytes + 60 - 4
    return {"reduce": known["norm"], "optimizer": (kernels + copies, nbytes + copied)}


def lists(trainer: Trainer) -> int:
    """How many lists of parameters Lion updates: no larger than the largest parameter, and of one group."""
    every = [[w.numel() for w in group["params"]] for group in trainer.optimizer.param_groups]
    most, count = max(map(max, every)), 0
    for group in every:
        room = 0
        for n in group:
            count, room = (count, room - n) if n <= room else (count + 1, most - n)
    return count


def found_in(sections: dict[str, Counted]) -> dict[str, tuple[int, int]]:
    return {name: (sections[name].launched, sections[name].nbytes) for name in ("reduce", "optimizer")}


FEW = {("adamw", shards) for shards in SHARDS} | {(name, "zero 1") for name in UPDATES}
CASES = [
    pytest.param(name, shards, marks=() if (name, shards) in FEW else pytest.mark.full)
    for name in UPDATES
    for shards in SHARDS
]


@pytest.mark.parametrize(("name", "shards"), CASES)
def test_the_norm_the_update_and_the_weights_of_a_step(name, shards):
    trainer, sections = of_an_update(composed(*UPDATES[name][0], *SHARDS[shards]))
    assert found_in(sections) == budget_of(name, trainer)


@pytest.mark.parametrize(("shards", "each"), [("whole", 0), ("data", 0), ("zero 1", 8), ("zero 2", 8), ("zero 3", 0)])
def test_compute_weights_in_fp32_are_their_masters_or_shards_of_the_gathered_buffer(shards, each):
    trainer, sections = of_an_update(composed("precision=fp32", *SHARDS[shards]))
    _, nbytes = of_types(trainer)["refresh"]
    assert nbytes == each * sum(flat.masters.numel() for flat in trainer.weights.buckets)
    assert found_in(sections) == budget_of("adamw, clipped", trainer)


def test_a_deeper_model_launches_no_more_but_for_its_buckets():
    """10 layers more."""
    counts = {}
    for layers in (2, 12):
        c = composed("optimizer.early=off", "optimizer.clip=0")
        c.model.layers = layers
        trainer, sections = of_an_update(c)
        copies, _ = of_types(trainer)["refresh"]
        counts[layers] = len(trainer.weights.trainable_masters), found_in(sections)["optimizer"][0] - copies
        assert copies <= layers + 3
    (few, kernels), (many, same) = counts.values()
    assert many - few == 10 * 16 and kernels == same == 4


Controls = dict[str, tuple[str, Callable[[pytest.MonkeyPatch], object]]]


def adamw(**how: bool) -> Callable[[pytest.MonkeyPatch], object]:
    def make(groups: Any, o: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, o.lr, tuple(o.betas), o.eps, capturable=True, **how)

    kind = optimizers.OptimizerKind(make, moments=2)
    return lambda patch: patch.setitem(optimizers.OPTIMIZERS, "adamw", kind)


def one_by_one(flat: FlatBucket) -> None:
    for name, w in flat._master_views(flat.masters).items():
        flat.compute[name].copy_(w)


CONTROLS: Controls = {
    "an update of one parameter after the other": ("optimizer", adamw(foreach=False, fused=False)),
    "an update in lists that is not fused": ("optimizer", adamw(foreach=True, fused=False)),
    "weights that are copied one by one": (
        "optimizer", lambda patch: patch.setattr(FlatBucket, "refresh_compute_copies", one_by_one)
    ),
    "gradients that are widened before they are squared": (
        "reduce", lambda patch: patch.setattr(flat_buffers, "_sum_squares_at_once", lambda gradients: torch.stack(
            [x.double().square().sum() for x in gradients]
        ).sum())
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", CONTROLS)
def test_negative_controls_exceed_the_budget(how, monkeypatch):
    section, broken = CONTROLS[how]
    broken(monkeypatch)
    trainer, sections = of_an_update(composed())
    kernels, nbytes = found_in(sections)[section]
    most, limit = budget_of("adamw", trainer)[section]
    assert kernels > most, f"{kernels} kernels"
    assert nbytes > limit or "one by one" in how, f"{nbytes} bytes"


LOGITS = 8192, 50304
# type, label smoothing, with the gradient -> kernels, bytes per logit. Eager, in 8 chunks, in the type of statistics;
# compiled, they are two kernels of 2 and 4 bytes: tests/gpu_rules/test_ahead.py.
LOSSES = {
    (torch.bfloat16, 0.0, False): (61, 14),
    (torch.bfloat16, 0.0, True): (133, 34),
    (torch.bfloat16, 0.1, True): (155, 34 + 4 + 8),
    (torch.float32, 0.0, False): (53, 8),
    (torch.float32, 0.0, True): (117, 24),
}


def of_logits(dtype: torch.dtype, smoothing: float, gradient: bool) -> tuple[int, float]:
    """Kernels, and the bytes that each further logit of a token moves."""
    tokens, vocab = LOGITS
    one, two = (
        of_the_loss(configure(), (tokens, n), dtype, LossClasses((), 0, n, smoothing), gradient)
        for n in (vocab, 2 * vocab)
    )
    assert one.launched == two.launched
    return one.launched, (two.nbytes - one.nbytes) / (tokens * vocab)


@pytest.mark.parametrize(("dtype", "smoothing", "gradient"), LOSSES, ids=str)
def test_the_loss_of_logits(dtype, smoothing, gradient):
    assert of_logits(dtype, smoothing, gradient) == LOSSES[dtype, smoothing, gradient]


def test_negative_control_a_loss_that_keeps_what_it_computes(monkeypatch):
    """All probabilities are written once more where the label's is put among them."""
    scatter = torch.Tensor.scatter
    monkeypatch.setattr(torch.Tensor, "scatter_", lambda x, *at: x.copy_(scatter(x, *at)))
    _, nbytes = LOSSES[torch.bfloat16, 0.0, True]
    assert of_logits(torch.bfloat16, 0.0, True)[1] >= nbytes + 8


def lists_of(*names: str) -> list[list[torch.Tensor]]:
    return [[torch.empty(n, device=CARD) for n in (3, 5)] for _ in names]


KERNELS: dict[str, tuple[Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]], int]] = {
    "a list is added to": (lambda: (torch.ops.aten._foreach_add_.List, tuple(lists_of("w", "g")), {}), 3 * 32),
    "a list is copied into": (lambda: (torch.ops.aten._foreach_copy_.default, tuple(lists_of("w", "g")), {}), 2 * 32),
    "a list is made": (lambda: (torch.ops.aten._foreach_add.List, tuple(lists_of("w", "g")), {}), 3 * 32),
    "fused": (lambda: (torch.ops.aten._fused_sgd_.default, tuple(lists_of("w", "g", "m")), SGD), 5 * 32),
    "fused, divided": (
        lambda: (
            torch.ops.aten._fused_sgd_.default, tuple(lists_of("w", "g", "m")),
            {**SGD, "grad_scale": torch.empty((), device=CARD)},
        ), 6 * 32 + 4,
    ),
    "in place": (lambda: (torch.ops.aten.add_.Tensor, (torch.empty(4, device=CARD),) * 2, {}), 3 * 16),
    "overwritten": (lambda: (torch.ops.aten.zero_.default, (torch.empty(4, device=CARD),), {}), 16),
    "into memory": (
        lambda: (torch.ops.aten.mm.out, (torch.empty(2, 2, device=CARD),) * 2, {"out": torch.empty(2, 2, device=CARD)}),
        3 * 16,
    ),
    "rows of a table": (
        lambda: (torch.ops.aten.embedding.default,
                 (torch.empty(99, 4, device=CARD), torch.empty(2, dtype=torch.int64, device=CARD)), {}),
        2 * 2 * 16 + 16,
    ),
}  # fmt: skip
SGD = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False,
       "is_first_step": False}  # fmt: skip


@pytest.mark.parametrize("what", KERNELS)
def test_the_bytes_of_a_kernel_are_those_that_it_reads_and_writes(what):
    with alone(configure(), 0, []):
        (function, args, kwargs), expected = KERNELS[what][0](), KERNELS[what][1]
        assert moved(function, args, kwargs, function(*args, **kwargs)) == expected

"""Random plans as GPUs run them: on groups that are as strict as NCCL may be, against one process in fp64, and on a
card that is not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from random import Random
from threading import current_thread
from typing import Any

import pytest

from platform.cluster.crew.job import worker_environment
from platform.config.fields import Config
from platform.plan.layout import is_at_index_zero
from platform.plan.plan import Plan
from platform.plan.step_collectives import process_groups
from platform.runtime.communicator import Communicator
from platform.train.rehearsal import rehearse_steps
from platform.train.trainer import Trainer
from tests.doubles.strict_nccl import CONNECTIONS, run_strictly
from tests.fuzz import plans
from tests.fuzz.draw_data import open_data
from tests.fuzz.plans import CLASSES
from tests.harness.card import KernelCounter, alone
from tests.harness.oracle import trainer_of
from tests.harness.tape import recording

__all__ = ["CLASSES", "opened"]

PRECISIONS = ("bf16", "bf16", "fp16", "fp32", "fp64")


def opened() -> AbstractContextManager[Callable[[int], str]]:
    """Yield `attempt`."""
    return plans.opened(check)


def on_strict_nccl(c: Config, plan: Plan, work: Callable[[Communicator], Any], early: bool = False) -> list[Any]:
    """Do some work on every rank of a plan, each a thread with as many connections to its device as its worker has.
    `early`: collectives begin as early as they may, else as late."""
    connections = int(worker_environment(c, "cuda").get("CUDA_DEVICE_MAX_CONNECTIONS", CONNECTIONS))
    axes, neighbours = process_groups(plan), plan.neighbour_stages
    with pytest.MonkeyPatch.context() as patch:
        return run_strictly(patch, plan.mesh, work, axes, neighbours, connections=connections, early=early)[1]


def check(r: Random, configs: Sequence[Config], planned: Sequence[Plan]) -> None:
    """Run the plans under the rules of GPUs, by graphs of passes where they can be recorded, then a whole step of one
    rank of each on the card. Raises AssertionError naming what differs."""
    ranks = partial(on_strict_nccl, early=r.random() < 0.5)
    with recording(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "trainer_of", recording_trainer_of)
        plans.check(r, configs, planned, ranks, asks=False)
    for c, plan in zip(configs, planned, strict=True):
        in_device = replace(c.optimizer, offload="none")  # as what is offloaded fills memory of the host
        on_card = replace(c, precision=r.choice(PRECISIONS), recompute_offload=False, optimizer=in_device)
        step_on_card(with_rows_for_all(on_card), r.randrange(plan.mesh.world_size))


def recording_trainer_of(c: Config, plan: Plan, communicator: Communicator, *data: Any) -> Trainer:
    """A rank's trainer, whose passes are recorded where they can be if it is not alone, as the oracle is."""
    trainer = trainer_of(c, plan, communicator, *data)
    trainer.records &= plan.mesh.world_size > 1
    if trainer.records:
        trainer.config = replace(c, train=replace(c.train, graphs="on"))
        rehearse_steps(trainer, c.train.steps)
    return trainer


def with_rows_for_all(c: Config) -> Config:
    """A run with a token for each expert of a rank and more, as on the card each has one, and one token comes there."""
    if not c.model.experts or c.model.capacity_factor:
        return c
    seats = min(c.model.experts, c.model.experts // c.parallel.experts + c.parallel.lent_experts)
    if c.model.experts_per_token < seats:
        c = replace(c, model=replace(c.model, experts_per_token=seats, router_groups=1, router_groups_kept=1))
    names = ("microbatch", "global_batch", "ramp_from", "ramp_by", "ramp_samples")
    return replace(c, train=replace(c.train, **{n: getattr(c.train, n) * c.model.experts for n in names}))


def passes_of_rows(trainer: Trainer) -> int:
    """How often a rank sends rows to experts in the first step."""
    stage, at = trainer.stage, trainer.communicator.coordinates
    sends = [o for (kind, _), o in stage.operations.items() if kind == "dispatch_rows" and is_at_index_zero(o.only, at)]
    microbatches = len({action.microbatch for action in trainer.stage_actions(1)})  # a batch may grow
    return microbatches * sum(1 + o.operation.recomputed for o in sends)


def step_on_card(c: Config, rank: int) -> None:
    """Take a whole step of one rank on a card that is not there. Raises AssertionError where it waits for the card more
    than once, or works elsewhere; any error where its tensors are on two devices."""
    reads: list[int] = []
    with alone(c, rank, reads, corpus=open_data(c)) as trainer, KernelCounter(trainer.communicator) as counter:
        trainer.weights.refresh_copies()  # as a restored rank does
        report = trainer.step(1)
    loads = len(trainer.plan.load_dependent_routes) * c.model.experts if trainer.plan.scheme.lent else 0
    *rows, end = reads  # numbers of rows, where experts have as many as choose them
    end -= c.model.predict_ahead  # losses
    once = end in (2 + loads, 2 + 2 * c.model.experts + loads)  # some ranks count what experts are chosen
    once &= len(rows) == passes_of_rows(trainer)
    assert once and not report.skipped, f"rank {rank} on the card reads {reads}"
    threads, main = counter.sections["backward"].threads, current_thread().name
    assert threads - {main} or not trainer.weights.trainable_masters, f"rank {rank} on the card: backward in {threads}"
    fused = c.optimizer.kind == "adamw" and c.optimizer.moments == "fp32"  # others are rounded in an order of their own
    updates = fused and any(x.numel() for x in trainer.weights.trainable_masters.values())
    assert not updates or "_fused_adamw_" in counter.sections["optimizer"].kernels, f"rank {rank} on the card: no AdamW"

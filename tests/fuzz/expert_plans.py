"""Random plans with experts, against one process in fp64, and in narrower types: their bytes, and a loss near that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from random import Random

import torch

from platform.config.fields import Config
from platform.plan.plan import Plan
from platform.runtime.communicator import Communicator, SingleRank
from tests.fuzz import plans
from tests.fuzz.draw_data import open_data
from tests.fuzz.plans import CLASSES
from tests.harness.oracle import Result, counted, trainer_of
from tests.harness.replayed_bytes import replay_traffic

__all__ = ["CLASSES", "opened"]

NARROW = {"fp32": 1e-3, "bf16": 0.3, "fp16": 0.3}  # how far a loss may be from that in fp64


def opened() -> AbstractContextManager[Callable[[int], str]]:
    """Yield `attempt`."""
    return plans.opened(check, experts=1.0)


def check(r: Random, configs: Sequence[Config], planned: Sequence[Plan]) -> None:
    """Compare the plans with one process and, of some cases, a step of the first with one in a narrower type. Raises
    AssertionError naming what differs."""
    plans.check(r, configs, planned)
    if r.random() < 0.75:
        return
    precision = r.choice(list(NARROW))
    losses = [step(replace(configs[0], precision=name)) for name in ("fp64", precision)]
    apart = abs(losses[1] - losses[0])
    assert apart <= NARROW[precision] * abs(losses[0]), f"{precision}: losses {losses}"


def step(c: Config) -> float:
    """Return the loss of a first step, whose bytes are those of the plan, unless it is skipped as a gradient overflows
    in fp16. Raises AssertionError naming what differs."""
    (plan,) = plans.planned([c])
    corpus, skipped = open_data(c), list[bool]()

    def work(communicator: Communicator) -> Result:
        trainer = trainer_of(c, plan, communicator, corpus)
        trainer.enter_step(1).ops.routing = routing = {}
        report = trainer.step(1)
        skipped.append(report.skipped)
        moved = Counter(report.comm_bytes)
        return Result(communicator.rank, report.loss, 0.0, {}, {}, {}, [], moved, [], routing=routing)

    results = [work(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else plans.on_threads(c, plan, work)
    first = plans.of_step(c, plan, 1)
    moved = replay_traffic(first, [result.routing for result in results])
    assert any(skipped) or counted(results) == moved, f"bytes moved in {c.precision}"
    assert torch.tensor([result.loss for result in results]).unique().numel() == 1, f"losses of ranks in {c.precision}"
    return results[0].loss

"""Aggregation of the ranks' step reports by the workers themselves: the driver gets one report, whatever their
number."""

from __future__ import annotations

from dataclasses import replace

import torch

from platform.parallel.communicator.base import Communicator
from platform.plan.communication.traffic import label
from platform.plan.core.plan import Plan
from platform.plan.core.step_collectives import step_collectives
from platform.train.protocol.answers import SlowRank, StepReport, Taken
from platform.train.step.trainer import SECTIONS

OWN_WORK = ("data", "forward", "backward", "optimizer")  # sections in which a rank does not wait for others


class Combiner:
    """Combines every rank's report on a training step into one on rank 0, through `communicator`, so that the driver
    reads one whatever the number of ranks. A rank whose own work (without waiting for others) takes more than `slow`
    times the median of its pipeline stage is reported as slow; `slow` = 0 reports none."""

    def __init__(self, plan: Plan, communicator: Communicator, slow: float):
        self._communicator, self._slow = communicator, slow
        self._stages = torch.tensor([plan.mesh.coordinates(rank)["stage"] for rank in range(plan.mesh.size)])
        moved = {label(c.op, plan.mesh.ordered(c.axes)) for _, c, _ in step_collectives(plan)}
        self._moved = sorted(moved)

    def together(self, mine: StepReport) -> StepReport | Taken:
        """Combine the ranks' reports on a training step, of which `mine` is this rank's, returned by `Trainer.step`;
        all ranks call it together. Return on rank 0 its own report with `seconds` as means over the ranks, `comm_bytes`
        as sums, `peak_memory_bytes` as the maximum, and the slow ranks; on the others an acknowledgement."""
        seconds, moved = mine.seconds, mine.comm_bytes
        assert moved.keys() <= set(self._moved), f"not planned: {moved.keys() - set(self._moved)}"
        own = sum(seconds[section] for section in OWN_WORK)
        told = [own, mine.peak_memory_bytes, *(seconds[s] for s in SECTIONS)]
        numbers = told + [moved.get(key, 0) for key in self._moved]
        ranks = self._communicator.collect(torch.tensor(numbers, dtype=torch.float64))
        if ranks is None:
            return Taken(mine.step, mine.timeline)
        work, memory, sections, sums = ranks.split([1, 1, len(SECTIONS), len(self._moved)], 1)
        total = dict(zip(self._moved, map(int, sums.sum(0).tolist()), strict=True))
        return replace(
            mine,
            seconds=dict(zip(SECTIONS, sections.mean(0).tolist(), strict=True)),
            comm_bytes={key: n for key, n in total.items() if n},
            peak_memory_bytes=int(memory.max()),
            slow=self._slower(work.flatten()),
        )

    def _slower(self, work: torch.Tensor) -> list[SlowRank]:
        """Return the slow ranks, given the seconds of each rank's own work [ranks], in a training step."""
        usual = torch.stack([work[self._stages == stage].median() for stage in self._stages])
        ratios = (work / usual.clamp_min(1e-9)).tolist()
        return [SlowRank(rank, ratio) for rank, ratio in enumerate(ratios) if self._slow and ratio > self._slow]

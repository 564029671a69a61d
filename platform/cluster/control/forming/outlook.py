"""Reasons to re-form the mesh that are checked between steps: workers leaving, slow workers, new workers."""

from __future__ import annotations

from typing import NamedTuple

from platform.cluster.control.forming.context import Run
from platform.cluster.control.forming.former import Generation
from platform.cluster.control.forming.muster import Muster
from platform.cluster.crew.base.crew import Crew
from platform.train.protocol.answers import StepReport

STEPS = 5  # consecutive steps in which a worker must be slow to be reported


class Wish(NamedTuple):
    """Proposal to re-form the mesh: the reason, and the members that are barred from the next generation."""

    reason: str
    barred: frozenset[int] = frozenset()


class Outlook:
    """Watches a run between steps and proposes re-forming the mesh."""

    def __init__(self, run: Run, muster: Muster):
        self._replace, self._muster = run.config.elastic.replace_slow, muster
        self._journal, self._say = run.journal, run.monitor.say
        self._slow: dict[int, int] = {}  # member -> consecutive steps in which it was slow

    def needed(self, crew: Crew, generation: Generation) -> Wish | None:
        """Return a wish to re-form if the cluster is about to take away a seated worker; also journals the notice."""
        leaving = sorted(crew.leaving & set(generation.seats))
        if not leaving:
            return None
        self._journal.event("notice", numbers=leaving)
        return Wish(f"{len(leaving)} of {generation.size} workers are about to be taken away")

    def better(self, crew: Crew, generation: Generation, report: StepReport) -> Wish | None:
        """Return a wish to re-form if a spare can replace a slow worker, or the mesh can grow; also hires missing
        workers. `report`: of the step just done."""
        self._muster.refill(crew)
        slow = self._slow_ones(generation, report)
        alive = self._muster.count(crew)
        if slow and self._replace and alive > generation.size:
            rank = generation.seats.index(slow[0])
            return Wish(f"rank {rank} is slow and gives its place to a spare", frozenset(slow[:1]))
        found = self._muster.best(alive) if alive > generation.size else None
        if found is None or found.plan.mesh.size <= generation.size:
            return None
        return Wish(f"{alive} workers are there: the mesh grows from {generation.size} to {found.plan.mesh.size}")

    def _slow_ones(self, generation: Generation, report: StepReport) -> list[int]:
        """Return the members that were slow in the last STEPS steps; report each once."""
        ratios = {generation.seats[rank]: ratio for rank, ratio in report.slow}
        self._slow = {number: self._slow.get(number, 0) + 1 for number in ratios}
        for number in (n for n, steps in self._slow.items() if steps == STEPS):
            rank, ratio = generation.seats.index(number), ratios[number]
            node = generation.formed.domains[rank]
            self._journal.event("slow", number=number, rank=rank, node=node, ratio=ratio)
            self._say(f"rank {rank} on {node} is slow: {ratio:.1f} times its stage's median")
        return [number for number, steps in self._slow.items() if steps >= STEPS]

"""Reasons to re-form the mesh that are checked between steps: workers leaving, slow workers, new workers."""

from __future__ import annotations

from typing import NamedTuple

from platform.cluster.control.forming.context import Generation, RunContext
from platform.cluster.control.forming.recruiter import Recruiter
from platform.cluster.crew.base.crew import Crew
from platform.monitor.records import events
from platform.plan.language.numbers import count_of
from platform.train.protocol.replies import StepReport

SLOW_STEPS = 5  # consecutive steps in which a worker must be slow to be reported


class ReformProposal(NamedTuple):
    """Proposal to re-form the mesh: the reason, for the user, and the numbers of the members that are barred from then
    on."""

    reason: str
    barred: frozenset[int] = frozenset()


class ReformAdvisor:
    """Watches a run's workers between training steps and proposes re-forming the mesh if others, or more, should be
    seated."""

    def __init__(self, run: RunContext, recruiter: Recruiter):
        """Watch the workers of a run for reasons to re-form its mesh. `recruiter`: chooses and hires its members."""
        self._replace, self._recruiter = run.config.elastic.replace_slow, recruiter
        self._journal, self._say = run.journal, run.monitor.say
        self._slow: dict[int, int] = {}  # member -> consecutive steps in which it was slow

    def needed_reform(self, crew: Crew, generation: Generation) -> ReformProposal | None:
        """Propose to re-form the mesh, and journal the notice, if a seated worker is to be taken away; else None."""
        leaving = sorted(crew.leaving & set(generation.seats))
        if not leaving:
            return None
        self._journal.write(events.Notice(numbers=leaving))
        return ReformProposal(f"about to be taken away: {len(leaving)} of {count_of(generation.size, 'worker')}")

    def optional_reform(self, crew: Crew, generation: Generation, report: StepReport) -> ReformProposal | None:
        """Propose to re-form the mesh if a spare worker can replace a slow one (elastic.replace_slow), or a larger mesh
        can form from the workers there; else return None. Also hires missing workers, and ends those without a seat
        whose machines are about to go: other members hold their state now. `report`: rank 0's on the training step just
        committed."""
        crew.dismiss(crew.leaving - set(generation.seats))
        self._recruiter.refill(crew)
        slow = self._slow_ones(generation, report)
        alive = len(self._recruiter.usable(crew))
        if slow and self._replace and alive > generation.size:
            rank = generation.seats.index(slow[0])
            return ReformProposal(f"rank {rank} is slow and gives its place to a spare", frozenset(slow[:1]))
        found = self._recruiter.best(alive) if alive > generation.size else None
        if found is None or found.plan.mesh.size <= generation.size:
            return None
        return ReformProposal(
            f"{alive} workers are there: the mesh grows from {generation.size} to {found.plan.mesh.size}"
        )

    def _slow_ones(self, generation: Generation, report: StepReport) -> list[int]:
        """Return the numbers of the workers that `report` and the SLOW_STEPS - 1 reports before it all show as slow;
        journal and print each worker's when it is first found slow."""
        found = {generation.seats[slow.rank]: slow for slow in report.slow}
        self._slow = {number: self._slow.get(number, 0) + 1 for number in found}
        for number in (n for n, steps in self._slow.items() if steps == SLOW_STEPS):
            rank, ratio, section = found[number]
            node = generation.formed.domains[rank]
            self._journal.write(events.Slow(number=number, rank=rank, node=node, ratio=ratio, section=section or None))
            self._say(f"rank {rank} on {node} is slow: {ratio:.1f} times its stage's median")
        return [number for number, steps in self._slow.items() if steps >= SLOW_STEPS]

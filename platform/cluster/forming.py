"""FORMING: from the workers that are alive to a mesh that goes on where the run was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic, perf_counter, sleep
from typing import Any

from platform.cluster import preflight
from platform.cluster.context import Run
from platform.cluster.crew import ByRank, Crew, seating
from platform.cluster.failures import GaveUp, Reform
from platform.cluster.held import Held
from platform.config import ConfigError
from platform.monitor import Timeline
from platform.plan.hardware import dense_bf16_peak
from platform.plan.plan import Plan
from platform.plan.rows import rows
from platform.plan.schedule import Schedule, table
from platform.plan.simulate import simulate
from platform.train.pipeline import schedule_of
from platform.train.replan import Replanned, most_workers, replan
from platform.train.survivors import find_source, take_seats

_LOOK_SECONDS = 0.05  # between two looks at who is there
_WIDTH = 300  # of a table


@dataclass
class Generation:
    """A formed mesh. `step`: updates that its state holds; `peak_flops` of a worker, None where unknown."""

    number: int
    plan: Plan
    stage_of: list[int]
    seats: list[int]
    domains: list[str]
    config: dict[str, Any]
    step: int
    peak_flops: float | None
    timeline: Timeline | None

    def __post_init__(self) -> None:
        self.size = len(self.seats)


class Former:
    """Makes generations of one run. `held`: what is in the workers' memory. `shunned`: members that get no seat."""

    def __init__(self, run: Run):
        self._run, self._config, self._plan, self._job = run, run.config, run.plan, run.job
        self._journal, self._monitor, self._checkpoints = run.journal, run.monitor, run.checkpoints
        self.held = Held()
        self.shunned: set[int] = set()
        self._proven: set[int] = set()
        self._formed = False
        self._shown: Plan | None = run.plan  # the plan that the user has seen

    def usable(self, crew: Crew) -> list[int]:
        """The members that may get a seat, in the order in which ranks are best dealt."""
        passed_over = self.shunned | crew.leaving
        return [number for number in seating(crew.members) if number not in passed_over]

    def best(self, members: int) -> Replanned | None:
        """What the run becomes with so many."""
        if members >= self._plan.mesh.size >= most_workers(self._config):
            return Replanned(self._config, self._plan, "")
        return replan(self._config, members)

    def form(self, crew: Crew, done: int) -> Generation:
        """The next generation, after `done` committed steps. Raises WorkerFailed, GaveUp, Stopped, ConfigError."""
        members, found = self._wait(crew)
        plan, size = found.plan, found.plan.mesh.size
        schedule = schedule_of(found.config, plan.mesh.axes["data"])
        number = self._journal.next_generation()
        mesh = dict(plan.mesh.axes)
        self._journal.event("forming", world_size=size, mesh=mesh, reason=found.reason, alive=len(members))
        self._show(plan, schedule, found.reason)
        source, reasons = find_source(self.held.by(members), self.held.formed, size)
        for reason in reasons:
            self._journal.event("not_whole", reason=reason)
        seats = members[:size]
        if source:
            having = {member for _, member in source["members"]}
            seats, source = take_seats(source, [m for m in members if m not in having], size)
            if source["gathered"]:
                self._gather(crew, source, number)
        job = replace(self._job, coordinates=[plan.mesh.coordinates(rank) for rank in range(size)])
        crew.seat(job, seats)
        self._prove(crew, seats)
        config, stage_of = found.config.to_dict(), list(schedule.placement)
        ranks = ByRank(range(size))
        workers = crew.call("form", ranks, size, config, crew.store, number, stage_of)
        self._journal.event("formed", workers=[w | {"number": n} for w, n in zip(workers, seats, strict=True)])
        domains = [crew.members[n].node if n in crew.members else "" for n in seats]
        of_stage = rows(schedule)
        plain = [stage.plain() for stage in of_stage]
        build = "build", ByRank(plain[c["stage"]] for c in job.coordinates), domains
        built = crew.call(*build)[0]
        step = self._recover(crew, source) if source else self._restore(crew, build)
        self._formed = True
        if source or (step and self._config.elastic.snapshot_every):
            self.held.add(number, step, config, stage_of, domains, seats)
        self._journal.event("running", step=step + 1, parameters_per_worker=built["parameters"])
        timeline = None
        if self._config.monitor.timeline:
            names, stages = [job.name(rank) for rank in range(size)], [c["stage"] for c in job.coordinates]
            timeline = Timeline(schedule, [stage.step for stage in of_stage], names, stages)
        peak = dense_bf16_peak(built["device"])
        return Generation(number, plan, stage_of, seats, domains, config, step, peak, timeline)

    def _wait(self, crew: Crew) -> tuple[list[int], Replanned]:
        """The members to seat and the plan for them, once there are enough: elastic.min_workers, for which it waits
        elastic.wait seconds."""
        least = self._config.elastic.min_workers
        begin, waiting = monotonic(), False
        while True:
            members = self.usable(crew)
            found = self.best(len(members)) if members else None
            if found and found.plan.mesh.size >= least:
                return members, found
            lack = f"{len(members)} workers are there, and elastic.min_workers={least}"
            if found is None and len(members) >= least:
                lack = f"there is no legal plan for {len(members)} workers"
            if not crew.starting:
                self.refill(crew)
            if monotonic() - begin >= self._config.elastic.wait or not (crew.starting or crew.can_hire):
                raise GaveUp(f"{lack}; waited {monotonic() - begin:.0f} s for more")
            if not waiting:
                self._journal.event("waiting", alive=len(members), reason=lack)
                self._monitor.say(f"{lack}: waiting up to {self._config.elastic.wait:g} s for more")
                waiting = True
            self._run.signals.check()
            sleep(_LOOK_SECONDS)

    def refill(self, crew: Crew) -> None:
        """Starts a worker for every one that is missing to the largest mesh and its spares."""
        e = self._config.elastic
        for failure in crew.unstarted:
            self._journal.event("not_started", number=failure.member.number, cause=str(failure))
            self._monitor.say(f"a new worker did not start: {failure}")
        unstarted, crew.unstarted = len(crew.unstarted), []
        missing = most_workers(self._config) + e.spares - len(self.usable(crew)) - len(crew.starting) - unstarted
        if e.replace and crew.can_hire and missing > 0:
            self._journal.event("hiring", count=missing)
            crew.hire(missing)

    def _show(self, plan: Plan, schedule: Schedule, reason: str) -> None:
        if plan is not self._shown and reason:
            self._monitor.say(reason)
        self._shown = plan
        if schedule.stages > 1:
            self._monitor.say(_described(schedule))

    def _gather(self, crew: Crew, source: dict[str, Any], number: int) -> None:
        """Some that hold state get no seat: they hand it over first, in a group of their own."""
        order = [member for _, member in source["gathered"]]
        crew.seat(replace(self._job, coordinates=[{"data": i} for i in range(len(order))]), order)
        crew.call("gather", source, ByRank(range(len(order))), crew.store, f"{number}/gather")
        crew.release()

    def _prove(self, crew: Crew, seats: Sequence[int]) -> None:
        """That new members see and run what the driver does. Those of a later generation that do not are shunned."""
        new = set(seats) - self._proven
        if not new:
            return
        try:
            preflight.check(crew, self._config, self._job.run_dir)
        except ConfigError as error:
            if not self._proven:
                raise
            self.shunned |= new
            self._journal.event("shunned", numbers=sorted(new), reasons=error.violations)
            raise Reform(f"new workers get no place: {error.violations[0]}") from None
        self._proven |= new

    def _recover(self, crew: Crew, source: dict[str, Any]) -> int:
        start = perf_counter()
        crew.call("recover", source)
        step: int = source["step"]
        self._journal.event("restored", step=step, source="memory", seconds=perf_counter() - start)
        return step

    def _restore(self, crew: Crew, build: tuple[Any, ...]) -> int:
        """From storage, the last resort, or from nothing."""
        if self._formed:
            self._checkpoints.look_again()
        while not self._checkpoints.restore(crew):
            crew.call(*build)
        return self._checkpoints.step


def _described(schedule: Schedule) -> str:
    """What a pipeline should cost, and its table, where a terminal can show it."""
    bubble = simulate(schedule).bubble
    title = f"schedule  {schedule.name}: {schedule.stages} stages x {schedule.chunks} chunks, {schedule.microbatches}"
    lines = [f"{title} microbatches; bubble {bubble:.1%} of the work", *table(schedule.rows).splitlines()]
    return "\n".join(lines[: None if max(map(len, lines)) <= _WIDTH else 1])

"""Choice of the members and the plan of the next generation, and hiring of missing workers."""

from __future__ import annotations

from math import inf
from time import monotonic, sleep

from platform.cluster.control.forming.context import RunContext
from platform.cluster.control.forming.examination import Doctor
from platform.cluster.crew.base.crew import Crew
from platform.cluster.crew.base.failures import GaveUp, Member
from platform.costs.machine import Hardware
from platform.monitor.records import events
from platform.plan.language.numbers import count_of
from platform.planning.replan import Replanned, most_workers, replan

LOOK_SECONDS = 0.05  # between two looks at the members
HIRE_AGAIN_SECONDS = 10.0  # pause after a new worker did not start


class Recruiter:
    """Chooses the members and the plan of a run's next generation, and hires missing workers. `barred`: numbers of
    members that get no seat any more; `memory`: bytes of the smallest device among all workers so far, inf if
    unknown; `hardware`: fitted to the run's own steps, None until one is."""

    def __init__(self, run: RunContext):
        """Prepare to choose the members and plan of each mesh that a run forms, and to hire workers; none is barred
        yet."""
        self._config, self._plan = run.config, run.plan
        self._journal, self._say, self._signals = run.journal, run.monitor.say, run.signals
        self._most = max(run.plan.mesh.size, most_workers(run.config))
        self._limit = run.places.limit
        self._least = run.config.elastic.min_workers or run.plan.mesh.size  # workers that the first generation needs
        self._plans: dict[tuple[int, float], Replanned | None] = {}
        self._hire_from = -inf  # time from which to hire again
        self._doctor = Doctor(run)
        self._unsound: dict[int, str] = {}  # barred because of that
        self.barred: set[int] = set()
        self.memory = inf
        self.hardware: Hardware | None = None

    def usable(self, crew: Crew) -> dict[int, Member]:
        """Return the crew members that may get a rank, by number: neither barred nor about to be taken away."""
        out = self.barred | crew.leaving
        return {number: member for number, member in sorted(crew.members.items()) if number not in out}

    def best(self, members: int) -> Replanned | None:
        """Choose the configuration and plan of the run's next mesh for at most `members` workers, with devices of
        `memory` bytes; None if no legal plan fits. The plan of the run's start, if it has `members` workers, or fewer
        and the run may not grow; else, as `replan` does, the one with another number of data replicas alone; if none is
        legal, the one with the most workers, of these the fewest bytes moved per step, of these the nearest to the
        configured sizes of the axes. On a `hardware`, the one that is quickest there."""
        size, fitted = self._plan.mesh.size, self.hardware
        if not fitted and (members == size or members > size == self._most):
            return Replanned(self._config, self._plan, "")
        key = members, self.memory
        if key not in self._plans:
            found = replan(self._config, members, memory=self.memory, hardware=fitted) if members else None
            self._plans[key] = found
        return self._plans[key]

    def fit_to(self, hardware: Hardware) -> None:
        """Choose plans for a hardware that was fitted to the run's own steps, from now on."""
        self.hardware = hardware
        self._plans.clear()

    def wait(self, crew: Crew) -> tuple[dict[int, Member], Replanned]:
        """Wait for enough workers to form the next mesh, at most elastic.wait seconds; return the members that
        may be seated, by number, and their plan. The doctor examines new ones, and bars unsound ones. Enough is
        elastic.min_workers; if that is not set, the whole mesh at the start, and later any number. If a stop is
        requested one worker is enough, because only the last checkpoint remains to be saved.

        Raises GaveUp if too few come in time, or no more can come; Stopped if a stop is requested and no mesh can form;
        WorkerFailed if one fails while it is examined.
        """
        e, begin, said = self._config.elastic, monotonic(), False
        while True:
            coming = crew.starting  # read first: a worker that gets ready meanwhile is among the members
            members = self.usable(crew)
            found = self.best(len(members))
            least = 1 if self._signals.requested else self._least
            if found and found.plan.mesh.size >= least:
                if not self._signals.requested and (unsound := self._doctor.unsound(crew, list(members))):
                    self._unsound |= unsound
                    self.barred |= unsound.keys()
                    continue
                self._least = max(1, e.min_workers)
                return members, found
            self._signals.check()
            hired = self.refill(crew)
            lack = f"{len(members)} of {count_of(least, 'worker')} there, and elastic.min_workers is not set"
            if e.min_workers:
                lack = f"{count_of(len(members), 'worker')} there, and elastic.min_workers={least}"
            if found is None and len(members) >= least:
                lack = f"there is no legal plan for {count_of(len(members), 'worker')}"
            if self._unsound:
                lack += f"; left out: {'; '.join(self._unsound.values())}"
            hope = bool(coming or hired or (e.replace and crew.can_hire and self._missing(crew) > 0))
            if hope and not said:
                self._journal.write(events.Waiting(alive=len(members), reason=lack))
                self._say(f"{lack}: waiting up to {e.wait:g} s for more")
                said = True
            waited = monotonic() - begin
            if waited >= e.wait or not hope:
                raise GaveUp(f"{lack}; {f'waited {waited:.0f} s for more' if hope or said else 'no more can come'}")
            sleep(LOOK_SECONDS)

    def refill(self, crew: Crew) -> int:
        """Hire as many workers as are missing from the largest mesh that the run may form and elastic.spares, as far as
        the cluster has room, and return that number; report hired ones that did not start. Barred members are not
        replaced: a new worker might be no better, and the run would be re-formed for ever."""
        for failure in crew.unstarted:
            self._journal.write(events.NotStarted(number=failure.member.number, cause=failure.cause))
            self._say(f"a new worker did not start: {failure}")
            self._hire_from = monotonic() + HIRE_AGAIN_SECONDS
        crew.unstarted.clear()
        if not (self._config.elastic.replace and crew.can_hire) or monotonic() < self._hire_from:
            return 0
        if (missing := max(0, self._missing(crew))) > 0:
            self._journal.write(events.Hiring(count=missing))
            crew.hire(missing)
        return missing

    def _missing(self, crew: Crew) -> int:
        """Return how many more workers to start for the largest mesh and spares, as far as the cluster has room."""
        coming = len(crew.starting)  # read first: a worker that gets ready meanwhile counts twice, not never
        wanted = int(min(self._most + self._config.elastic.spares, self._limit))
        return wanted - coming - len(crew.members.keys() - crew.leaving)

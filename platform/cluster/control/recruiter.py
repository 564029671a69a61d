"""Choice of the members and the plan of the next generation, and hiring of missing workers.

`ReformAdvisor` checks between steps for reasons to re-form the mesh: workers leaving, slow workers, new workers.
`arrange_seats` chooses the members that sit at the ranks, such that ranks that communicate most are nearest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf
from operator import mul
from time import monotonic, sleep
from typing import NamedTuple

from platform.cluster.control.examination import Doctor
from platform.cluster.control.run_context import Generation, RunContext
from platform.cluster.crew.crew import Crew
from platform.cluster.crew.failures import ClusterLost, GaveUp, Member
from platform.monitor import events
from platform.plan.layout import Mesh, format_count
from platform.predict.hardware import Hardware
from platform.predict.replan import Replanned, most_workers, replan
from platform.predict.tier_traffic import NetworkTiers
from platform.train.replies import StepReport

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
        self._most = max(run.plan.mesh.world_size, most_workers(run.config))
        self._limit = run.places.limit
        # workers that the first generation needs
        self._least = run.config.elastic.min_workers or run.plan.mesh.world_size
        self._plans: dict[tuple[int, float], Replanned | None] = {}
        self._hire_from = -inf  # time from which to hire again
        self._doctor = Doctor(run)
        self._unsound: dict[int, str] = {}  # barred because of that
        self.barred: set[int] = set()
        self.memory = inf
        self.hardware: Hardware | None = None

    def usable_members(self, crew: Crew) -> dict[int, Member]:
        """Return the crew members that may get a rank, by number: neither barred nor about to be taken away."""
        excluded = self.barred | crew.leaving_members
        return {
            number: member for number, member in sorted(crew.ready_members_by_number.items()) if number not in excluded
        }

    def choose_best_plan(self, members: int) -> Replanned | None:
        """Choose the configuration and plan of the run's next mesh for at most `members` workers, with devices of
        `memory` bytes; None if no legal plan fits. The plan of the run's start, if it has `members` workers, or fewer
        and the run may not grow; else, as `replan` does, the one with another number of data replicas alone; if none is
        legal, the one with the most workers, of these the fewest bytes moved per step, of these the nearest to the
        configured sizes of the axes. On a `hardware`, the one that is quickest there."""
        size, fitted = self._plan.mesh.world_size, self.hardware
        if not fitted and (members == size or members > size == self._most):
            return Replanned(self._config, self._plan, "")
        key = members, self.memory
        if key not in self._plans:
            replanned = replan(self._config, members, memory=self.memory, hardware=fitted) if members else None
            self._plans[key] = replanned
        return self._plans[key]

    def use_fitted_hardware(self, hardware: Hardware) -> None:
        """Choose plans for a hardware that was fitted to the run's own steps, from now on."""
        self.hardware = hardware
        self._plans.clear()

    def await_members(self, crew: Crew) -> tuple[dict[int, Member], Replanned]:
        """Wait for enough workers to form the next mesh, at most elastic.wait seconds; return the members that
        may be seated, by number, and their plan. The doctor examines new ones, and bars unsound ones. Enough is
        elastic.min_workers; if that is not set, the whole mesh at the start, and later any number. If a stop is
        requested one worker is enough, because only the last checkpoint remains to be saved.

        Raises GaveUp if too few come in time, or no more can come; Stopped if a stop is requested and no mesh can form,
        ClusterLost if the cluster is lost;
        WorkerFailed if one fails while it is examined.
        """
        e, begin, said = self._config.elastic, monotonic(), False
        while True:
            coming = crew.starting_members  # read first: a worker that gets ready meanwhile is among the members
            members = self.usable_members(crew)
            replanned = self.choose_best_plan(len(members))
            ends = self._signals.stop_requested or crew.lost
            least = 1 if ends else self._least
            if replanned and replanned.plan.mesh.world_size >= least:
                if not ends and (unsound := self._doctor.find_unsound(crew, list(members))):
                    self._unsound |= unsound
                    self.barred |= unsound.keys()
                    continue
                self._least = max(1, e.min_workers)
                return members, replanned
            self._signals.raise_if_requested()
            if crew.lost:
                raise ClusterLost(crew.lost)
            hired = self.hire_missing_workers(crew)
            lack = f"{len(members)} of {format_count(least, 'worker')} there, and elastic.min_workers is not set"
            if e.min_workers:
                lack = f"{format_count(len(members), 'worker')} there, and elastic.min_workers={least}"
            if replanned is None and len(members) >= least:
                lack = f"there is no legal plan for {format_count(len(members), 'worker')}"
            if self._unsound:
                lack += f"; left out: {'; '.join(self._unsound.values())}"
            hope = bool(coming or hired or (e.replace and crew.can_hire and self._count_missing_workers(crew) > 0))
            if hope and not said:
                self._journal.write(events.Waiting(alive=len(members), reason=lack))
                self._say(f"{lack}: waiting up to {e.wait:g} s for more")
                said = True
            waited = monotonic() - begin
            if waited >= e.wait or not hope:
                raise GaveUp(f"{lack}; {f'waited {waited:.0f} s for more' if hope or said else 'no more can come'}")
            sleep(LOOK_SECONDS)

    def hire_missing_workers(self, crew: Crew) -> int:
        """Hire as many workers as are missing from the largest mesh that the run may form and elastic.spares, as far as
        the cluster has room, and return that number; report hired ones that did not start. Barred members are not
        replaced: a new worker might be no better, and the run would be re-formed for ever."""
        for failure in crew.unstarted:
            self._journal.write(events.NotStarted(number=failure.member.number, cause=failure.cause))
            self._say(f"a new worker did not start: {failure}")
            self._hire_from = monotonic() + HIRE_AGAIN_SECONDS
        crew.unstarted.clear()
        if not (self._config.elastic.replace and crew.can_hire) or crew.lost or monotonic() < self._hire_from:
            return 0
        if (missing := max(0, self._count_missing_workers(crew))) > 0:
            self._journal.write(events.Hiring(count=missing))
            crew.hire_workers(missing)
        return missing

    def _count_missing_workers(self, crew: Crew) -> int:
        """Return how many more workers to start for the largest mesh and spares, as far as the cluster has room."""
        coming = len(crew.starting_members)  # read first: a worker that gets ready meanwhile counts twice, not never
        member_limit = int(min(self._most + self._config.elastic.spares, self._limit))
        return member_limit - coming - len(crew.ready_members_by_number.keys() - crew.leaving_members)


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

    def propose_needed_reform(self, crew: Crew, generation: Generation) -> ReformProposal | None:
        """Propose to re-form the mesh, and journal the notice, if a seated worker is to be taken away; else None."""
        leaving = sorted(crew.leaving_members & set(generation.seats))
        if not leaving:
            return None
        self._journal.write(events.Notice(numbers=leaving))
        return ReformProposal(f"about to be taken away: {len(leaving)} of {format_count(generation.size, 'worker')}")

    def propose_optional_reform(self, crew: Crew, generation: Generation, report: StepReport) -> ReformProposal | None:
        """Propose to re-form the mesh if a spare worker can replace a slow one (elastic.replace_slow), or a larger mesh
        can form from the workers there; else return None. Also hires missing workers, and ends those without a seat
        whose machines are about to go: other members hold their state now. `report`: rank 0's on the training step just
        committed."""
        crew.dismiss_members(crew.leaving_members - set(generation.seats))
        self._recruiter.hire_missing_workers(crew)
        slow = self._find_slow_members(generation, report)
        alive = len(self._recruiter.usable_members(crew))
        if slow and self._replace and alive > generation.size:
            rank = generation.seats.index(slow[0])
            return ReformProposal(f"rank {rank} is slow and gives its place to a spare", frozenset(slow[:1]))
        larger_plan = self._recruiter.choose_best_plan(alive) if alive > generation.size else None
        if larger_plan is None or larger_plan.plan.mesh.world_size <= generation.size:
            return None
        size = larger_plan.plan.mesh.world_size
        return ReformProposal(f"{alive} workers are there: the mesh grows from {generation.size} to {size}")

    def _find_slow_members(self, generation: Generation, report: StepReport) -> list[int]:
        """Return the numbers of the workers that `report` and the SLOW_STEPS - 1 reports before it all show as slow;
        journal and print each worker's when it is first found slow."""
        slow_members = {generation.seats[slow.rank]: slow for slow in report.slow}
        self._slow = {number: self._slow.get(number, 0) + 1 for number in slow_members}
        for number in (n for n, steps in self._slow.items() if steps == SLOW_STEPS):
            rank, ratio, section = slow_members[number]
            node = generation.formed.domains[rank]
            self._journal.write(events.Slow(number=number, rank=rank, node=node, ratio=ratio, section=section or None))
            self._say(f"rank {rank} on {node} is slow: {ratio:.1f} times its stage's median")
        return [number for number, steps in self._slow.items() if steps >= SLOW_STEPS]


Path = tuple[str, ...]  # from the outermost tier to the node


def member_paths(members: Mapping[int, Member]) -> dict[int, Path]:
    """Return crew member -> its place in the cluster: its tiers (rack, ...) that all members report, and its node."""
    depth = min((len(member.tiers) for member in members.values()), default=0)
    return {number: (*member.tiers[:depth], member.node) for number, member in members.items()}


def find_rank_tiers(seats: Sequence[int], paths: Mapping[int, Path]) -> NetworkTiers:
    """Return the cluster tiers (rack, node) of the ranks of workers `seats`, without outer tiers that all share."""
    rank_paths = [paths[number] for number in seats]
    names = [tier.partition("=")[0] for tier in rank_paths[0][:-1]] + ["node"]
    apart = [i for i, values in enumerate(zip(*rank_paths, strict=True)) if len(set(values)) > 1 or i == len(names) - 1]
    return NetworkTiers(tuple(names[i] for i in apart), tuple(tuple(path[i] for i in apart) for path in rank_paths))


def arrange_seats(paths: Mapping[int, Path], mesh: Mesh, previous_members: Mapping[int, int]) -> list[int]:
    """Return the number of the crew member at every rank of a mesh, chosen so that ranks that communicate most are near
    each other in the cluster. `paths`: member -> its place (see `member_paths`), of at least as many members as there
    are ranks.

    Consecutive ranks, which differ along the innermost axes, are a block: of 2, of 2 x 4, and so on, as the sizes of
    the axes say. From the largest block to the smallest, each is put into the innermost tier, within the tier of the
    block around it, that has room for all of it: first where most of its ranks' members are, then where the least room
    would be left. `previous_members`: rank -> member that had it in the mesh before and keeps it if possible; a member
    whose rank does not exist any more takes one that no such member keeps."""
    return _Seating(paths, mesh, previous_members).seats


class _Seating:
    """Work of `arrange_seats`. `seats`: its result."""

    def __init__(self, paths: Mapping[int, Path], mesh: Mesh, keep: Mapping[int, int]):
        """Seat the members of `paths` at all ranks of a mesh, as `arrange_seats` describes; `seats` has the result."""
        self._sizes = list(dict.fromkeys(accumulate((n for _, n in reversed(mesh.shape)), mul, initial=1)))
        self._keep, self._rank_of = keep, {member: rank for rank, member in keep.items()}
        self._here: dict[Path, list[int]] = {}  # by tier: its members, by number
        for number in sorted(paths):
            for depth in range(len(paths[number]) + 1):
                self._here.setdefault(paths[number][:depth], []).append(number)
        self._paths, self._world = paths, mesh.world_size
        self._room = Counter({tier: len(numbers) for tier, numbers in self._here.items()})
        self._taken: set[int] = set()
        self.seats: list[int] = []
        self._seat_block(len(self._sizes) - 1, ())

    def _seat_block(self, level: int, within: Path) -> None:
        """Seat crew members at the next block of consecutive ranks, of the block size number `level` of the mesh (0: a
        single rank), in the cluster tier `within`."""
        ranks = range(len(self.seats), len(self.seats) + self._sizes[level])
        tier = self._choose_tier(within, ranks)
        if level:
            for _ in range(self._sizes[level] // self._sizes[level - 1]):
                self._seat_block(level - 1, tier)
            return
        [rank] = ranks
        free = (m for m in self._here[tier] if m not in self._taken)
        member = min(free, key=lambda m: (self._seat_mismatch(m, rank), m))
        self._taken.add(member)
        self.seats.append(member)
        for depth in range(len(self._paths[member]) + 1):
            self._room[self._paths[member][:depth]] -= 1

    def _choose_tier(self, within: Path, ranks: range) -> Path:
        """Choose the innermost cluster tier within `within` with room for the workers of `ranks`, of least cost."""
        fits = [tier for tier in self._list_inner_tiers(within) if self._room[tier] >= len(ranks)]
        deepest = max(map(len, fits))
        return min((tier for tier in fits if len(tier) == deepest), key=lambda tier: self._tier_cost(tier, ranks))

    def _list_inner_tiers(self, within: Path) -> list[Path]:
        """Return the cluster tiers (racks, nodes, ...) inside the tier `within`, itself among them."""
        return [tier for tier in self._here if tier[: len(within)] == within]

    def _tier_cost(self, tier: Path, ranks: range) -> tuple[float, ...]:
        """Return a cluster tier's sort key for seating workers at `ranks`: members that keep or lost theirs, room."""
        had = [self._rank_of.get(m, -1) for m in self._here[tier] if m not in self._taken]
        stay, late = sum(rank in ranks for rank in had), sum(rank >= self._world for rank in had)
        around = (self._room[tier[:depth]] for depth in range(len(tier), -1, -1))
        return (-stay, -late, *around, self._here[tier][0])

    def _seat_mismatch(self, member: int, rank: int) -> int:
        """Return how badly a worker suits a rank: 0 had it before, 1 had one now gone, 2 had none, 3 had another."""
        had = self._rank_of.get(member, -1)
        if had < 0:
            return 2
        return 0 if had == rank else 1 if had >= self._world else 3

"""Examination of members of a crew by the doctor: each by itself, then with partners, then all beside each other."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from platform.cluster.control.forming.context import RunContext
from platform.cluster.crew.base.crew import ByRank, Crew
from platform.cluster.crew.base.failures import WorkerFailed
from platform.cluster.crew.base.job import Job
from platform.monitor.records import events
from platform.train.health.partners import groups_by_check
from platform.train.health.symptoms import best_of, symptoms
from platform.train.protocol.replies import Findings

PARTNERS = 3  # most partners of a member
ATTEMPTS = 3  # at most: whoever looks bad is examined again, and is bad if it is every time
EXAMINE_SECONDS = 120.0  # without progress, after which a member hangs
LINK_SECONDS = 60.0


@dataclass(frozen=True)
class Examined:
    """Outcome of the examination of a crew. `findings`: findings by member number; `bad`: symptoms of each unsound
    member, check -> why; `shared`: symptoms of most members, and so not their own."""

    findings: Mapping[int, Findings]
    bad: Mapping[int, Mapping[str, str]]
    shared: Mapping[str, str]

    def reason(self, number: int) -> str:
        """Return the symptoms that the doctor found on an unsound crew member, in one line for the user."""
        return "; ".join(f"{name}: {why}" for name, why in self.bad[number].items())


def examine(crew: Crew, job: Job, numbers: Sequence[int], *, thorough: bool) -> Examined:
    """Examine the members `numbers`, in the order of their ranks, before they are seated: with small sizes and alone, a
    fraction of a second, on GPUs also with one partner and with all of the node; or, if `thorough`, with large sizes
    and several partners. If any is unsound, all are examined again, up to ATTEMPTS times and with several partners, and
    the best findings count: other load on a machine passes, and the partner of a slow worker is not slow with others.
    Raises WorkerFailed if one dies or hangs."""
    found: dict[int, Findings] = {}
    for attempt in range(ATTEMPTS):
        crew.seat(replace(job, coordinates=[{"data": i} for i in range(len(numbers))]), numbers)
        alone = _alone(crew, numbers, thorough)
        crew.release()
        partners = PARTNERS if thorough or attempt else 1
        together = _together(crew, job, numbers, thorough, partners) if thorough or job.device == "cuda" else {}
        for number in numbers:
            one = _joined(alone[number], together.get(number, {}))
            found[number] = best_of(found[number], one) if number in found else one
        bad, shared = symptoms(found, job.device)
        if not any(bad.values()) and not shared:
            break
    return Examined(found, {number: why for number, why in bad.items() if why}, shared)


def _alone(crew: Crew, numbers: Sequence[int], thorough: bool) -> dict[int, Findings]:
    """Return the doctor's findings on each seated worker by itself, by member number. Its clock is among them: the
    seconds that it is behind the driver's clock before the call, or ahead of it after the call, however long that took.
    `numbers`: the members, by rank."""
    before = time.time()
    clocks = crew.call("read_clock", within=EXAMINE_SECONDS)
    after = time.time()
    found = crew.call("examine", thorough, within=EXAMINE_SECONDS)
    for findings, clock in zip(found, clocks, strict=True):
        findings.readings["clock"] = max(0.0, before - clock, clock - after)
    return dict(zip(numbers, found, strict=True))


def _together(
    crew: Crew, job: Job, numbers: Sequence[int], thorough: bool, partners: int
) -> dict[int, dict[str, Findings]]:
    """Return the doctor's findings on the network connections of each worker, by member number and check: with up to so
    many `partners`, of which the best counts, and with its node. One round of groups is measured after the other. Of a
    group that hangs all members have the error. `numbers`: the members, by rank."""
    members = crew.members
    nodes = [members[number].node if number in members else "" for number in numbers]
    found: dict[int, dict[str, Findings]] = {number: {} for number in numbers}
    for number_of_round, (check, groups) in enumerate(groups_by_check(nodes, partners, job.device == "cuda")):
        seats = [numbers[rank] for group in groups for rank in group]
        crew.seat(replace(job, coordinates=[{"data": i} for i in range(len(seats))]), seats)
        index = ByRank(i for group in groups for i in range(len(group)))
        sizes = ByRank(len(group) for group in groups for _ in group)
        names = ByRank(f"{number_of_round}/{i}" for i, group in enumerate(groups) for _ in group)
        try:
            each = crew.call(
                "examine_connection", check, index, sizes, names, crew.store, thorough, within=LINK_SECONDS
            )
        except WorkerFailed as failed:
            if any(failure.kind != "hung" for failure in failed.failures):
                raise
            why = {failure.member.number: Findings(errors={check: failure.cause}) for failure in failed.failures}
            each = [why.get(number, Findings()) for number in seats]
        crew.release()
        for number, one in zip(seats, each, strict=True):
            its = found[number]
            its[check] = best_of(its[check], one) if check in its else one
    return found


def _joined(alone: Findings, together: Mapping[str, Findings]) -> Findings:
    """Merge the doctor's findings on a worker alone with those on its network connections, a map by check."""
    joined = Findings(dict(alone.readings), dict(alone.errors), alone.facts)
    for one in together.values():
        wrong = joined.readings.get("wrong", 0.0) + one.readings.get("wrong", 0.0)
        joined.readings.update(one.readings, wrong=wrong)
        joined.errors.update(one.errors)
    return joined


class Doctor:
    """Doctor of one run: examines members before they get a seat, as cluster.doctor says; by default where they have
    GPUs of their own or are on several nodes."""

    def __init__(self, run: RunContext):
        """Prepare to examine the crew members of a run before they are seated; none is known yet."""
        self._job, self._asked = run.job, run.config.cluster.doctor
        self._journal, self._say = run.journal, run.monitor.say
        self._known: set[int] = set()  # members examined before

    def unsound(self, crew: Crew, members: Sequence[int]) -> dict[int, str]:
        """Examine `members` if some of them are new; return the unsound new ones, each with its symptoms, and report
        them to journal and user. Symptoms of most members are reported, and bar no member. Raises WorkerFailed if one
        dies or hangs."""
        new = [number for number in members if number not in self._known]
        if not new or not self._examines(crew):
            return {}
        start, there = time.perf_counter(), crew.members
        outcome = examine(crew, self._job, members, thorough=self._asked == "full")
        self._known.update(new)
        bad = {n: f"worker {n} on {there[n].node}: {outcome.reason(n)}" for n in new if n in outcome.bad}
        self._journal.write(
            events.Examined(
                numbers=new,
                unsound=list(bad),
                reasons=list(bad.values()),
                shared=[f"{check}: {why}" for check, why in outcome.shared.items()],
                seconds=time.perf_counter() - start,
            )
        )
        for line in bad.values():
            self._say(f"doctor  {line}: it gets no seat")
        for check, why in outcome.shared.items():
            self._say(f"doctor  warning: most workers are alike in this, and none is left out: {check}: {why}")
        return bad

    def _examines(self, crew: Crew) -> bool:
        """Return True if the doctor examines this crew: by cluster.doctor, or if auto, on GPUs or several nodes."""
        if self._asked != "auto":
            return self._asked != "off"
        return self._job.device == "cuda" or len({member.node for member in crew.members.values()}) > 1

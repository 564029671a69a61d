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
from platform.train.health.partners import rounds
from platform.train.health.symptoms import best_of, symptoms
from platform.train.protocol.replies import Findings

ATTEMPTS = 3  # at most: whoever looks bad is examined again, and is bad if it is every time
PARTNERS = 3  # most partners of a member
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
    fraction of a second, or, if `thorough`, with large ones and with partners too. If any is unsound, all are examined
    again, up to ATTEMPTS times, and the best findings count: other load on a machine passes. Raises WorkerFailed if one
    dies or hangs."""
    found: dict[int, Findings] = {}
    for _ in range(ATTEMPTS):
        crew.seat(replace(job, coordinates=[{"data": i} for i in range(len(numbers))]), numbers)
        alone = _alone(crew, numbers, thorough)
        crew.release()
        pairs = _in_pairs(crew, job, numbers) if thorough else {}
        for number in numbers:
            one = _joined(alone[number], *pairs.get(number, ()))
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


def _in_pairs(crew: Crew, job: Job, numbers: Sequence[int]) -> dict[int, list[Findings]]:
    """Return the doctor's findings on the connection of each worker with each of its partners, by member number, one
    round of pairs after the other. A member that hangs in one shares the error with its partner. `numbers`: the
    members."""
    members = crew.members
    nodes = [members[number].node if number in members else "" for number in numbers]
    found: dict[int, list[Findings]] = {number: [] for number in numbers}
    for number_of_round, pairs in enumerate(rounds(nodes, PARTNERS)):
        ranks = [rank for pair in pairs for rank in pair]
        seats = [numbers[rank] for rank in ranks]
        crew.seat(replace(job, coordinates=[{"data": i} for i in range(len(seats))]), seats)
        index = ByRank(i % 2 for i in range(len(seats)))
        names = ByRank(f"{number_of_round}/{i // 2}" for i in range(len(seats)))
        try:
            each = crew.call("pass_to_partner", index, names, crew.store, True, within=LINK_SECONDS)
        except WorkerFailed as failed:
            if any(failure.kind != "hung" for failure in failed.failures):
                raise
            why = {failure.member.number: Findings(errors={"link": failure.cause}) for failure in failed.failures}
            each = [why.get(number, Findings()) for number in seats]
        crew.release()
        for number, one in zip(seats, each, strict=True):
            found[number].append(one)
    return found


def _joined(alone: Findings, *in_pairs: Findings) -> Findings:
    """Merge the doctor's findings on a worker by itself with the findings beside each partner, of which the best
    count."""
    if not in_pairs:
        return alone
    link = in_pairs[0]
    for one in in_pairs[1:]:
        link = best_of(link, one)
    wrong = alone.readings.get("wrong", 0.0) + link.readings.get("wrong", 0.0)
    readings = {**alone.readings, **link.readings, "wrong": wrong}
    return Findings(readings, {**alone.errors, **link.errors}, alone.facts)


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

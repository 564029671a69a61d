"""Examination of members of a crew by the doctor: each by itself, then with partners, then all beside each other.

`compare_worker_environments` checks, before a run forms, that every worker sees the driver's run directory and storage,
and runs the same code."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from platform.boundary.redaction import redact_secrets
from platform.boundary.refusals import format_violation, refuse_failures
from platform.boundary.storage import Storage, open_storage
from platform.cluster.control.run_context import RunContext
from platform.cluster.crew.crew import ByRank, Crew, Worker
from platform.cluster.crew.failures import WorkerFailed
from platform.cluster.crew.job import Job
from platform.config.fields import Config, flatten_config
from platform.config.identity import find_checkpoint_url, saves_checkpoints
from platform.monitor import events
from platform.train.environment_proof import describe_environment
from platform.train.health import groups_by_check, judge_workers, merge_findings
from platform.train.replies import Findings, Proof

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

    def describe_symptoms(self, number: int) -> str:
        """Return the symptoms that the doctor found on an unsound crew member, in one line for the user."""
        return "; ".join(f"{name}: {why}" for name, why in self.bad[number].items())


def examine_members(crew: Crew, job: Job, numbers: Sequence[int], *, thorough: bool) -> Examined:
    """Examine the members `numbers`, in the order of their ranks, before they are seated: with small sizes and alone, a
    fraction of a second, on GPUs also with one partner and with all of the node; or, if `thorough`, with large sizes
    and several partners. If any is unsound, all are examined again, up to ATTEMPTS times and with several partners, and
    the best findings count: other load on a machine passes, and the partner of a slow worker is not slow with others.
    Raises WorkerFailed if one dies or hangs."""
    findings_by_member: dict[int, Findings] = {}
    for attempt in range(ATTEMPTS):
        crew.assign_ranks(replace(job, coordinates=[{"data": i} for i in range(len(numbers))]), numbers)
        alone = _examine_alone(crew, numbers, thorough)
        crew.release_members()
        partners = PARTNERS if thorough or attempt else 1
        together = (
            _examine_connections(crew, job, numbers, thorough, partners) if thorough or job.device == "cuda" else {}
        )
        for number in numbers:
            one = _merge_findings(alone[number], together.get(number, {}))
            before = findings_by_member.get(number)
            findings_by_member[number] = merge_findings(before, one) if before else one
        bad, shared = judge_workers(findings_by_member, job.device)
        if not any(bad.values()) and not shared:
            break
    return Examined(findings_by_member, {number: why for number, why in bad.items() if why}, shared)


def _examine_alone(crew: Crew, numbers: Sequence[int], thorough: bool) -> dict[int, Findings]:
    """Return the doctor's findings on each seated worker by itself, by member number. Its clock is among them: the
    seconds that it is behind the driver's clock before the call, or ahead of it after the call, however long that took.
    `numbers`: the members, by rank."""
    before = time.time()
    clocks = crew.call_ranks(Worker.read_clock, within=EXAMINE_SECONDS)
    after = time.time()
    findings_by_rank = crew.call_ranks(Worker.examine_device, thorough, within=EXAMINE_SECONDS)
    for findings, clock in zip(findings_by_rank, clocks, strict=True):
        findings.readings["clock"] = max(0.0, before - clock, clock - after)
    return dict(zip(numbers, findings_by_rank, strict=True))


def _examine_connections(
    crew: Crew, job: Job, numbers: Sequence[int], thorough: bool, partners: int
) -> dict[int, dict[str, Findings]]:
    """Return the doctor's findings on the network connections of each worker, by member number and check: with up to so
    many `partners`, of which the best counts, and with its node. One round of groups is measured after the other. Of a
    group that hangs all members have the error. `numbers`: the members, by rank."""
    members = crew.ready_members_by_number
    nodes = [members[number].node if number in members else "" for number in numbers]
    findings_by_member: dict[int, dict[str, Findings]] = {number: {} for number in numbers}
    for number_of_round, (check, groups) in enumerate(groups_by_check(nodes, partners, job.device == "cuda")):
        seats = [numbers[rank] for group in groups for rank in group]
        crew.assign_ranks(replace(job, coordinates=[{"data": i} for i in range(len(seats))]), seats)
        index = ByRank(i for group in groups for i in range(len(group)))
        sizes = ByRank(len(group) for group in groups for _ in group)
        names = ByRank(f"{number_of_round}/{i}" for i, group in enumerate(groups) for _ in group)
        try:
            groups_of_ranks = index, sizes, names, crew.store, thorough
            each = crew.call_ranks(Worker.examine_connection, check, *groups_of_ranks, within=LINK_SECONDS)
        except WorkerFailed as failed:
            if any(failure.kind != "hung" for failure in failed.failures):
                raise
            why = {failure.member.number: Findings(errors={check: failure.cause}) for failure in failed.failures}
            each = [why.get(number, Findings()) for number in seats]
        crew.release_members()
        for number, one in zip(seats, each, strict=True):
            its = findings_by_member[number]
            its[check] = merge_findings(its[check], one) if check in its else one
    return findings_by_member


def _merge_findings(alone: Findings, together: Mapping[str, Findings]) -> Findings:
    """Merge the doctor's findings on a worker alone with those on its network connections, a map by check."""
    merged = Findings(dict(alone.readings), dict(alone.errors), alone.facts)
    for one in together.values():
        wrong_values = merged.readings.get("wrong", 0.0) + one.readings.get("wrong", 0.0)
        merged.readings.update(one.readings, wrong=wrong_values)
        merged.errors.update(one.errors)
    return merged


class Doctor:
    """Doctor of one run: examines members before they get a seat, as cluster.doctor says; by default where they have
    GPUs of their own or are on several nodes."""

    def __init__(self, run: RunContext):
        """Prepare to examine the crew members of a run before they are seated; none is known yet."""
        self._job, self._asked = run.job, run.config.cluster.doctor
        self._journal, self._say = run.journal, run.monitor.say
        self._known: set[int] = set()  # members examined before

    def find_unsound(self, crew: Crew, members: Sequence[int]) -> dict[int, str]:
        """Examine `members` if some of them are new; return the unsound new ones, each with its symptoms, and report
        them to journal and user. Symptoms of most members are reported, and bar no member. Raises WorkerFailed if one
        dies or hangs."""
        new = [number for number in members if number not in self._known]
        if not new or not self._should_examine(crew):
            return {}
        start, crew_members = time.perf_counter(), crew.ready_members_by_number
        outcome = examine_members(crew, self._job, members, thorough=self._asked == "full")
        self._known.update(new)
        names = {n: f"worker {n} on {crew_members[n].node}" for n in new if n in outcome.bad}
        bad = {n: f"{name}: {outcome.describe_symptoms(n)}" for n, name in names.items()}
        shared, reasons = [f"{check}: {why}" for check, why in outcome.shared.items()], list(bad.values())
        seconds = time.perf_counter() - start
        event = events.Examined(numbers=new, unsound=list(bad), reasons=reasons, shared=shared, seconds=seconds)
        self._journal.write(event)
        for line in bad.values():
            self._say(f"doctor  {line}: it gets no seat")
        for check, why in outcome.shared.items():
            self._say(f"doctor  warning: most workers are alike in this, and none is left out: {check}: {why}")
        return bad

    def _should_examine(self, crew: Crew) -> bool:
        """Return True if the doctor examines this crew: by cluster.doctor, or if auto, on GPUs or several nodes."""
        if self._asked != "auto":
            return self._asked != "off"
        return self._job.device == "cuda" or len({member.node for member in crew.ready_members_by_number.values()}) > 1


_ALWAYS = {"train.compile": ["auto", "off"], "train.attention_kernel": ["auto", "math"]}  # what every worker can do


def compare_worker_environments(crew: Crew, config: Config, run_dir: Path) -> dict[int, list[str]]:
    """Return rank -> lines on how its environment differs from the driver's (storage, code, versions), for the ranks
    that differ. The probe files that this writes to run directory and checkpoint storage are deleted afterwards. Raise
    ConfigError if the driver itself cannot write them."""
    storages = {"run.dir": open_storage(str(run_dir))}
    if saves_checkpoints(config):
        storages["checkpoint.url"] = open_storage(find_checkpoint_url(config))
    with _write_probe_files(storages) as name:
        driver_proof = describe_environment(config, run_dir, name)
        worker_proofs = crew.call_ranks(Worker.prove_environment, name)
    lines_by_rank = {rank: list_disagreements(driver_proof, proof, config) for rank, proof in enumerate(worker_proofs)}
    return {rank: lines for rank, lines in lines_by_rank.items() if lines}


@contextmanager
def _write_probe_files(storages: Mapping[str, Storage]) -> Iterator[str]:
    """Write a file of random bytes to each storage, for the members of a generation to read, yield the file's name, and
    delete the files at the end. `storages`: configuration key -> storage. Raise ConfigError, naming the key, for one
    that cannot be written."""
    name = f".probe-{secrets.token_hex(8)}"
    try:
        for key, storage in storages.items():
            with refuse_failures(key, storage.url, OSError, why="cannot be written to: {}"):
                storage.write(name, [memoryview(secrets.token_bytes(16))], durable=False)
        yield name
    finally:
        for storage in storages.values():
            with suppress(OSError):
                storage.delete(name, durable=False)


def list_disagreements(driver_proof: Proof, worker_proof: Proof, config: Config) -> list[str]:
    """Return one line for each difference that keeps a generation from forming, between a worker's environment,
    `worker_proof`, and the driver's, `driver_proof` (storage, hashes of code, versions of libraries), and for each
    feature that the worker lacks."""
    where = {
        "run.dir": config.run.dir,
        "checkpoint.url": redact_secrets(find_checkpoint_url(config)),
        "checkpoint.resume": redact_secrets(config.checkpoint.resume),
    }
    lines = []
    kinds = ("sees", "code", "versions")
    for kind, name, value in ((k, n, v) for k in kinds for n, v in getattr(driver_proof, k).items()):
        if (worker_value := getattr(worker_proof, kind).get(name)) != value:
            how = f"{worker_value} on node {worker_proof.node}, {value} at the driver"
            if kind == "sees":
                lines.append(format_violation(name, where[name], f"{how}; all nodes must see the same"))
            else:
                lines.append(f"cluster: {kind} of {name}: {how}; all nodes must run the same")
    for key, legal in _ALWAYS.items():
        if why := worker_proof.lacks.get(key):
            why += f" on node {worker_proof.node}"
            lines.append(format_violation(key, flatten_config(config)[key], why, legal))
    return lines

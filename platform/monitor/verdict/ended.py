"""Verdicts on a run that has ended, and on the failures of its workers, from its journal alone."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

from platform.monitor.records import events
from platform.monitor.records.journal_event import End
from platform.monitor.verdict import causes
from platform.monitor.verdict.evidence import GONE, STOPPED, Evidence
from platform.monitor.verdict.verdict import CERTAIN, LIKELY, Verdict
from platform.plan.language.numbers import count_of

_KILL = "SIGKILL"
_BY_OTHERS = "nothing in the run sends it: a user, the scheduler, or the kernel for want of memory"


def of_failure(evidence: Evidence, failure: events.Failure) -> Verdict:
    """Return the verdict on the failure of a worker: how it failed, in which call, seen from whom."""
    who = evidence.name(failure.rank, failure.number, failure.node, failure.coordinates)
    last, details = causes.last_line(failure.cause), [f"seen: {line}" for line in failure.seen or ()]
    sure, why, what = CERTAIN, failure.kind, f"{failure.kind} in {failure.method}: {last}"
    if failure.kind == "failed" and causes.is_out_of_memory(failure.cause):
        why, what = "memory", f"had no memory left in {failure.method}: {last}"
    elif failure.kind == "failed" and causes.blames_others(failure.cause):
        why, sure = "lost peers", LIKELY
        what = f"lost its peers in {failure.method}: {last}; no other worker was found dead or hung"
    elif failure.kind == "damaged":
        what = f"has damaged memory, found in {failure.method}: {last}"
    if purpose := _on_purpose(evidence, failure.step, failure.rank):
        details += purpose
    elif failure.kind == "died" and _KILL in failure.cause:
        details.append(f"{_KILL}: {_BY_OTHERS}")
    if failure.dump:
        details.append(f"stacks and collectives of every worker that answered: {failure.dump}")
    if failure.log:
        details.append(f"its log: {failure.log}")
    return Verdict(
        why,
        f"{who} {what}",
        rank=failure.rank,
        number=failure.number,
        node=failure.node,
        step=failure.step,
        since=failure.time,
        sure=sure,
        details=details,
        stack=failure.stack or causes.frames(failure.cause),
    )


def _on_purpose(evidence: Evidence, step: int | None, rank: int | None = None) -> list[str]:
    """Return a line on the faults that the run injected into a step, or into a rank there, if it did, for a verdict."""
    injected = [e for e in evidence.life if isinstance(e, events.Injected) and e.step == step]
    found = [f for e in injected for f in e.faults if rank is None or f.split(":")[2:3] == [str(rank)]]
    return [f"on purpose: elastic.faults={','.join(found)}"] if found else []


def because_of_failure(evidence: Evidence) -> str:
    """Return how the last worker of a run failed, to be added to a verdict on too few workers; "" if none has."""
    failure = evidence.last(events.Failure)
    return f"; {of_failure(evidence, failure).line}" if failure else ""


def of_spike(evidence: Evidence, spike: events.Spike) -> Verdict:
    """Return the verdict on a step whose loss or gradient norm is too large or no number."""
    finite = isfinite(spike.limit) and isfinite(spike.loss) and isfinite(spike.grad_norm)
    above = f", above the limit of {spike.limit:g}" if finite else ""
    often = f", {count_of(spike.attempt, 'time')} in a row" if spike.attempt > 1 else ""
    line = f"step {spike.step} has {spike.number}{above}{often}: train.on_spike={spike.policy}"
    details = [f"loss {spike.loss:g}, gradient norm {spike.grad_norm:g}", *_on_purpose(evidence, spike.step)]
    return Verdict("loss", line, step=spike.step, since=spike.time, details=details)


def of_undecided(evidence: Evidence, found: events.Undecided) -> Verdict:
    """Return the verdict on replicas that differ, of which nothing shows the right one."""
    ranks, tensor = found.tensors[0]
    names = " and ".join(evidence.name(rank) for rank in ranks)
    line = f"{names} hold different {tensor} before step {found.step}, and nothing shows which is right"
    details = [f"{name}: ranks {', '.join(map(str, who))}" for who, name in found.tensors[1:9]]
    return Verdict("damaged", line, step=found.step, since=found.time, details=details)


def of_storage(evidence: Evidence, failed: events.CheckpointFailed) -> Verdict:
    """Return the verdict on checkpoints that cannot be written."""
    line = f"the checkpoint after step {failed.step} cannot be written: {failed.reason}"
    return Verdict("storage", line, step=failed.step, since=failed.time, details=_saved(evidence))


def _saved(evidence: Evidence) -> list[str]:
    """Return a line on the newest checkpoint of a run, for the details of a verdict."""
    newest = next((e for e in reversed(evidence.journal) if isinstance(e, events.Checkpoint)), None)
    return [f"newest checkpoint: step {newest.step}, {newest.directory}"] if newest else ["no checkpoint is recorded"]


def _of_error(evidence: Evidence, end: events.GaveUp) -> Verdict:
    """Return the verdict on a run that an error ended: on what it names."""
    causes_of: tuple[tuple[type[Any], Callable[[Evidence, Any], Verdict]], ...] = (
        (events.Failure, of_failure),
        (events.Undecided, of_undecided),
        (events.Spike, of_spike),
        (events.CheckpointFailed, of_storage),
    )
    before = evidence.life[: evidence.life.index(end)]
    for event in reversed(before):  # the last that the run could not get over
        if isinstance(event, events.FirstStep):
            break
        for kind, judged in causes_of:
            if isinstance(event, kind) and _explains(event, end):
                found = judged(evidence, event)
                return Verdict(**vars(found) | {"line": f"the run gave up: {found.line}"})
    line = f"the run gave up after step {end.step}: {causes.last_line(end.cause)}"
    if causes.is_too_few(end.cause):
        line += because_of_failure(evidence)
        return Verdict("places", line, step=end.step, since=end.time, details=_saved(evidence))
    return Verdict("driver", line, step=end.step, since=end.time, details=["a traceback, if any: logs/driver.log"])


def _explains(event: Any, end: events.GaveUp) -> bool:
    """Return True if an event is what a run gave up for, by the words of its end."""
    match event:
        case events.Failure():
            return causes.last_line(event.cause) in end.cause or event.method in end.cause
        case events.Undecided():
            return "differ" in end.cause
        case events.Spike():
            return f"step {event.step} has a loss" in end.cause
        case events.CheckpointFailed():
            return event.reason in end.cause
    return False


def _of_stop(evidence: Evidence, end: events.Stopped) -> Verdict:
    """Return the verdict on a run that was stopped with steps that none has saved."""
    line = f"stopped by {end.signal} after step {end.step}: nothing of it is saved"
    return Verdict("stopped", line, step=end.step, since=end.time)


def _of_drain(evidence: Evidence, end: events.Drained) -> Verdict:
    """Return the verdict on a run that was stopped, and can go on."""
    notice = evidence.last(events.Notice)
    who = f": {_nodes(evidence, notice.numbers)}" if notice else ""
    line = f"drained by {end.signal} after step {end.step}{who}; the same command goes on"
    return Verdict("drained", line, attention=False, step=end.step, since=end.time, details=_saved(evidence))


def _nodes(evidence: Evidence, numbers: list[int]) -> str:
    """Name the workers of these numbers, by their ranks and nodes, for the verdict on a drained run."""
    ranks = {worker.get("number"): rank for rank, worker in evidence.workers.items()}
    return ", ".join(evidence.name(ranks.get(number), number) for number in numbers[:4])


def _of_no_places(evidence: Evidence, end: events.NoPlaces) -> Verdict:
    """Return the verdict on a run for whose workers the cluster had no room."""
    return Verdict("places", f"no places for the workers: {end.cause}", step=end.step, since=end.time)


def _of_unsaved(evidence: Evidence, end: events.Unsaved) -> Verdict:
    """Return the verdict on a run whose last step could not be saved."""
    failed = evidence.last(events.CheckpointFailed)
    reason = f": {failed.reason}" if failed else ""
    line = f"step {end.step}, the last one, is done and could not be saved{reason}"
    return Verdict("storage", line, step=end.step, since=end.time, details=_saved(evidence))


def _of_refusal(evidence: Evidence, end: events.Refused) -> Verdict:
    """Return the verdict on a run whose configuration was refused."""
    first, *others = end.reasons or ["no reason was recorded"]
    return Verdict("refused", f"refused: {first}", since=end.time, details=others)


_ENDS: dict[type[Any], Callable[[Evidence, Any], Verdict]] = {
    events.GaveUp: _of_error,
    events.Stopped: _of_stop,
    events.Drained: _of_drain,
    events.NoPlaces: _of_no_places,
    events.Unsaved: _of_unsaved,
    events.Refused: _of_refusal,
}


def of_end(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a run's end; None if it has not ended, or all is well."""
    end = evidence.end
    return _ENDS[type(end)](evidence, end) if type(end) in _ENDS else None


def of_driver(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a run whose driver process is gone without an end, or stopped by a signal."""
    step = evidence.step
    after = f"after step {step}" if step else "before its first step"
    if isinstance(evidence.end, End | events.Refused) or not evidence.life:
        return None
    if evidence.driver == GONE:
        line = f"the driver died without an end {after}: {evidence.owner} is gone"
        details = [f"{_KILL}: {_BY_OTHERS}", *_saved(evidence), "the same command goes on"]
        return Verdict("driver", line, step=step, since=evidence.wrote, sure=LIKELY, details=details)
    if evidence.driver == STOPPED:
        line = f"the driver is stopped by a signal {after}: {evidence.owner}"
        return Verdict("driver", line, step=step, since=evidence.wrote, details=["kill -CONT lets it go on"])
    return None

"""Verdicts on a run that has ended, and on the failures of its workers, from its journal alone; and on the network
between workers, from the kernel's counters of their connections, as the driver saw them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from typing import Any

from platform.monitor import events
from platform.monitor.events import End
from platform.monitor.journal import LiveState, SeenLink
from platform.monitor.verdict import evidence as causes
from platform.monitor.verdict.evidence import CERTAIN, GONE, GUESS, LIKELY, STOPPED, Evidence, Verdict
from platform.plan.layout import format_count

_KILL = "SIGKILL"
_BY_OTHERS = "nothing in the run sends it: a user, the scheduler, or the kernel for want of memory"


def judge_failure(evidence: Evidence, failure: events.Failure) -> Verdict:
    """Return the verdict on the failure of a worker: how it failed, in which call, seen from whom."""
    worker_name = evidence.name_worker(failure.rank, failure.number, failure.node, failure.coordinates)
    last, details = events.last_error_line(failure.cause), [f"seen: {line}" for line in failure.seen or ()]
    sure, why, outcome = CERTAIN, failure.kind, f"{failure.kind} in {failure.method}: {last}"
    if failure.kind == "failed" and causes.is_out_of_memory(failure.cause):
        why, outcome = "memory", f"had no memory left in {failure.method}: {last}"
    elif failure.kind == "failed" and causes.blames_others(failure.cause):
        why, sure = "lost peers", LIKELY
        outcome = f"lost its peers in {failure.method}: {last}; no other worker was found dead or hung"
    elif failure.kind == "damaged":
        outcome = f"has damaged memory, found in {failure.method}: {last}"
    if purpose := _list_injected_faults(evidence, failure.step, failure.rank):
        details += purpose
    elif failure.kind == "died" and _KILL in failure.cause:
        details.append(f"{_KILL}: {_BY_OTHERS}")
    if failure.dump:
        details.append(f"stacks and collectives of every worker that answered: {failure.dump}")
    if failure.log:
        details.append(f"its log: {failure.log}")
    line, stack = f"{worker_name} {outcome}", failure.stack or causes.innermost_frames(failure.cause)
    verdict = Verdict(why, line, step=failure.step, since=failure.time, sure=sure, details=details, stack=stack)
    return replace(verdict, rank=failure.rank, number=failure.number, node=failure.node)


def _list_injected_faults(evidence: Evidence, step: int | None, rank: int | None = None) -> list[str]:
    """Return a line on the faults that the run injected into a step, or into a rank there, if it did, for a verdict."""
    injected = [e for e in evidence.last_driver_events if isinstance(e, events.Injected) and e.step == step]
    faults = [f for e in injected for f in e.faults if rank is None or f.split(":")[2:3] == [str(rank)]]
    return [f"on purpose: elastic.faults={','.join(faults)}"] if faults else []


def last_failure_clause(evidence: Evidence) -> str:
    """Return how the last worker of a run failed, to be added to a verdict on too few workers; "" if none has."""
    failure = evidence.last_event(events.Failure)
    return f"; {judge_failure(evidence, failure).line}" if failure else ""


def judge_spike(evidence: Evidence, spike: events.Spike) -> Verdict:
    """Return the verdict on a step whose loss or gradient norm is too large or no number."""
    finite = isfinite(spike.limit) and isfinite(spike.loss) and isfinite(spike.grad_norm)
    above = f", above the limit of {spike.limit:g}" if finite else ""
    often = f", {format_count(spike.attempt, 'time')} in a row" if spike.attempt > 1 else ""
    line = f"step {spike.step} has {spike.number_text}{above}{often}: train.on_spike={spike.policy}"
    details = [f"loss {spike.loss:g}, gradient norm {spike.grad_norm:g}", *_list_injected_faults(evidence, spike.step)]
    return Verdict("loss", line, step=spike.step, since=spike.time, details=details)


def judge_undecided(evidence: Evidence, undecided: events.Undecided) -> Verdict:
    """Return the verdict on replicas that differ, of which nothing shows the right one."""
    ranks, tensor = undecided.tensors[0]
    names = " and ".join(evidence.name_worker(rank) for rank in ranks)
    line = f"{names} hold different {tensor} before step {undecided.step}, and nothing shows which is right"
    details = [f"{name}: ranks {', '.join(map(str, holders))}" for holders, name in undecided.tensors[1:9]]
    return Verdict("damaged", line, step=undecided.step, since=undecided.time, details=details)


def judge_storage(evidence: Evidence, failed: events.CheckpointFailed) -> Verdict:
    """Return the verdict on checkpoints that cannot be written."""
    line = f"the checkpoint after step {failed.step} cannot be written: {failed.reason}"
    return Verdict("storage", line, step=failed.step, since=failed.time, details=_newest_checkpoint_line(evidence))


def _newest_checkpoint_line(evidence: Evidence) -> list[str]:
    """Return a line on the newest checkpoint of a run, for the details of a verdict."""
    newest = next((e for e in reversed(evidence.journal) if isinstance(e, events.Checkpoint)), None)
    return [f"newest checkpoint: step {newest.step}, {newest.directory}"] if newest else ["no checkpoint is recorded"]


def _judge_error(evidence: Evidence, end: events.GaveUp) -> Verdict:
    """Return the verdict on a run that an error ended: on what it names."""
    causes_of: tuple[tuple[type[Any], Callable[[Evidence, Any], Verdict]], ...] = (
        (events.Failure, judge_failure),
        (events.Undecided, judge_undecided),
        (events.Spike, judge_spike),
        (events.CheckpointFailed, judge_storage),
    )
    before = evidence.last_driver_events[: evidence.last_driver_events.index(end)]
    for event in reversed(before):  # the last that the run could not get over
        if isinstance(event, events.FirstStep):
            break
        for kind, judged in causes_of:
            if isinstance(event, kind) and _explains_end(event, end):
                verdict = judged(evidence, event)
                return replace(verdict, line=f"the run gave up: {verdict.line}")
    line = f"the run gave up after step {end.step}: {events.last_error_line(end.cause)}"
    if causes.is_too_few(end.cause):
        line += last_failure_clause(evidence)
        return Verdict("places", line, step=end.step, since=end.time, details=_newest_checkpoint_line(evidence))
    return Verdict("driver", line, step=end.step, since=end.time, details=["a traceback, if any: logs/driver.log"])


def _explains_end(event: Any, end: events.GaveUp) -> bool:
    """Return True if an event is what a run gave up for, by the words of its end."""
    match event:
        case events.Failure():
            return events.last_error_line(event.cause) in end.cause or event.method in end.cause
        case events.Undecided():
            return "differ" in end.cause
        case events.Spike():
            return f"step {event.step} has a loss" in end.cause
        case events.CheckpointFailed():
            return event.reason in end.cause
    return False


def _judge_unsaved_stop(evidence: Evidence, end: events.Stopped) -> Verdict:
    """Return the verdict on a run that was stopped with steps that none has saved."""
    line = f"stopped by {end.signal} after step {end.step}: nothing of it is saved"
    return Verdict("stopped", line, step=end.step, since=end.time)


def _judge_drain(evidence: Evidence, end: events.Drained) -> Verdict:
    """Return the verdict on a run that was stopped, and can go on."""
    notice = evidence.last_event(events.Notice)
    leaving_workers = f": {_name_workers(evidence, notice.numbers)}" if notice else ""
    line = f"drained by {end.signal} after step {end.step}{leaving_workers}; the same command goes on"
    details = _newest_checkpoint_line(evidence)
    return Verdict("drained", line, attention=False, step=end.step, since=end.time, details=details)


def _name_workers(evidence: Evidence, numbers: list[int]) -> str:
    """Name the workers of these numbers, by their ranks and nodes, for the verdict on a drained run."""
    ranks = {worker.get("number"): rank for rank, worker in evidence.workers_by_rank.items()}
    return ", ".join(evidence.name_worker(ranks.get(number), number) for number in numbers[:4])


def _judge_no_places(evidence: Evidence, end: events.NoPlaces) -> Verdict:
    """Return the verdict on a run for whose workers the cluster had no room."""
    return Verdict("places", f"no places for the workers: {end.cause}", step=end.step, since=end.time)


def _judge_lost_cluster(evidence: Evidence, end: events.ClusterLost) -> Verdict:
    """Return the verdict on a run whose cluster was of no use to it any more."""
    details = [*_newest_checkpoint_line(evidence), "the same command goes on"]
    return Verdict("cluster", f"the cluster is lost: {end.cause}", step=end.step, since=end.time, details=details)


def _judge_unsaved(evidence: Evidence, end: events.Unsaved) -> Verdict:
    """Return the verdict on a run whose last step could not be saved."""
    failed = evidence.last_event(events.CheckpointFailed)
    reason = f": {failed.reason}" if failed else ""
    line = f"step {end.step}, the last one, is done and could not be saved{reason}"
    return Verdict("storage", line, step=end.step, since=end.time, details=_newest_checkpoint_line(evidence))


def _judge_refusal(evidence: Evidence, end: events.Refused) -> Verdict:
    """Return the verdict on a run whose configuration was refused."""
    first, *others = end.reasons or ["no reason was recorded"]
    return Verdict("refused", f"refused: {first}", since=end.time, details=others)


_ENDS: dict[type[Any], Callable[[Evidence, Any], Verdict]] = {
    events.GaveUp: _judge_error,
    events.Stopped: _judge_unsaved_stop,
    events.Drained: _judge_drain,
    events.NoPlaces: _judge_no_places,
    events.ClusterLost: _judge_lost_cluster,
    events.Unsaved: _judge_unsaved,
    events.Refused: _judge_refusal,
}


def judge_end(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a run's end; None if it has not ended, or all is well."""
    end = evidence.end_event
    return _ENDS[type(end)](evidence, end) if type(end) in _ENDS else None


def judge_driver(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a run whose driver process is gone without an end, or stopped by a signal."""
    step = evidence.last_step
    after = f"after step {step}" if step else "before its first step"
    if isinstance(evidence.end_event, End | events.Refused) or not evidence.last_driver_events:
        return None
    if evidence.driver == GONE:
        line = f"the driver died without an end {after}: {evidence.owner} is gone"
        cause = f"by a library in its process, or by {_KILL}: {_BY_OTHERS}"
        details = [cause, *_newest_checkpoint_line(evidence), "the same command goes on"]
        return Verdict("driver", line, step=step, since=evidence.wrote, sure=LIKELY, details=details)
    if evidence.driver == STOPPED:
        line = f"the driver is stopped by a signal {after}: {evidence.owner}"
        return Verdict("driver", line, step=step, since=evidence.wrote, details=["kill -CONT lets it go on"])
    return None


QUIET_SECONDS = 1.5  # without an acknowledgement of bytes that were sent
_SLOWER = 4.0  # times slower than the link was before, or than most others are
_MOST = 0.8  # of the links are as slow as the one that others are compared with, or slower


def judge_cut_link(live: LiveState) -> Verdict | None:
    """Return the verdict on links over which nothing comes through; None if there are none."""
    nodes = _node_names(live)
    stuck = [link for link in live.links if link.queued and link.quiet >= QUIET_SECONDS]
    if not stuck:
        return None
    ends = _count_link_ends(stuck, nodes)
    silent = {worker.node.partition("/")[0] for worker in live.workers if worker.owes is not None}
    node = max(ends, key=lambda name: (ends[name], name in silent))
    often = ends[node]
    worst = max(stuck, key=lambda link: link.quiet)
    where = f"between {_node_name(worst.here, nodes)} and {_node_name(worst.there, nodes)}"
    who = f"the network of {node} is cut" if often > len(stuck) / 2 and len(ends) > 2 else "a link is cut"
    line = f"{who}: {worst.queued:,} bytes {where} were not acknowledged for {worst.quiet:.1f} s"
    since, details = live.time - worst.quiet, [_link_text(link, nodes) for link in stuck[:8]]
    return Verdict("link", line, node=node, step=live.step + 1, since=since, sure=CERTAIN, details=details)


def judge_slow_link(live: LiveState) -> Verdict | None:
    """Return the verdict on links that have become far slower than they were; None if there are none."""
    slow = [link for link in live.links if (link.rate or 0.0) * _SLOWER < (link.best or 0.0) and link.rate is not None]
    return _judge_slow_links(live, slow, LIKELY) if slow else None


def judge_slowest_link(live: LiveState) -> Verdict | None:
    """Return the verdict on links that are far slower than most; None if there are none."""
    known = sorted((link for link in live.links if link.rate is not None), key=lambda link: link.rate or 0.0)
    usual = known[int(_MOST * len(known))].rate or 0.0 if len(known) > 2 else 0.0
    slow = [replace(link, best=usual) for link in known if (link.rate or 0.0) * _SLOWER < usual]
    return _judge_slow_links(live, slow, GUESS) if slow else None


def _judge_slow_links(live: LiveState, slow: list[SeenLink], sure: str) -> Verdict:
    """Return the verdict on slow links: on the node at which most of them end. `best`: the speed to compare with.

    Of nodes that as many slow links join, the one is named at which others are as slow, though nobody knows what they
    were before, and at which fewest are well: of a ring 0 -> 2 -> 1 -> 0 whose link 0 -> 2 has become slow, node 2.
    """
    nodes, usual = _node_names(live), min(link.best or 0.0 for link in slow)
    ends, known = _count_link_ends(slow, nodes), {(link.here, link.there) for link in slow}
    others = [link for link in live.links if link.rate is not None and (link.here, link.there) not in known]
    alike = _count_link_ends([link for link in others if (link.rate or 0.0) * _SLOWER < usual], nodes)
    well = _count_link_ends([link for link in others if (link.rate or 0.0) * _SLOWER >= usual], nodes)
    node = max(ends, key=lambda name: (ends[name], alike[name], -well[name]))
    worst = min(slow, key=lambda link: link.rate or 0.0)
    who = f"the network of {node}" if ends[node] + alike[node] > 1 else f"a link of {node}"
    rate, best = ((speed or 0.0) * 8 / 1e6 for speed in (worst.rate, worst.best))
    line = f"{who} is slow: {rate:.3g} Mbit/s from {_node_name(worst.here, nodes)} to {_node_name(worst.there, nodes)}"
    line += f", not {best:.3g} as {'before' if sure == LIKELY else 'most others'}"
    details = [_link_text(link, nodes) for link in slow[:8]]
    return Verdict("link", line, node=node, step=live.step + 1, since=live.called, sure=sure, details=details)


def _count_link_ends(links: list[SeenLink], nodes: dict[str, str]) -> Counter[str]:
    """Count, for the verdict on slow links, how many of some begin or end at each node."""
    return Counter(node for link in links for node in (_node_name(link.here, nodes), _node_name(link.there, nodes)))


def _node_names(live: LiveState) -> dict[str, str]:
    """Return address -> name of the nodes whose workers the driver sees."""
    return {link.here: link.node.partition("/")[0] for link in live.links}


def _node_name(address: str, nodes: dict[str, str]) -> str:
    """Return the node that has an address, as far as a worker there is known; else the address."""
    return nodes.get(address, address)


def _link_text(link: SeenLink, nodes: dict[str, str]) -> str:
    """Format the speed and the queue of a link, for the details of a verdict."""
    rate = f"{link.rate * 8 / 1e6:.3g} Mbit/s" if link.rate is not None else "speed not known"
    quiet = f", {link.queued:,} bytes not acknowledged for {link.quiet:.1f} s" if link.queued else ""
    return f"{_node_name(link.here, nodes)} to {_node_name(link.there, nodes)}: {rate}{quiet}"


def judge_links(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a slow link of a run whose steps go on, seen in the last heartbeats."""
    return judge_slow_link(evidence.live) if evidence.live else None

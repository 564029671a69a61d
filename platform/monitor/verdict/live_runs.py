"""Verdicts on a run while it goes on; `judge_run` asks the judges of any run, most certain first, and the first that
finds a culprit speaks.

A standstill is judged by what the driver sees of its workers (live.json): who keeps the others waiting in the call
under way, in which collective or part of the code, and why. All else is judged by journal and metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from platform.monitor import events
from platform.monitor.journal import LiveState, SeenWorker
from platform.monitor.step_parts import describe_busy_processors
from platform.monitor.verdict import ended_runs
from platform.monitor.verdict.ended_runs import judge_cut_link, judge_slow_link, judge_spike, judge_storage
from platform.monitor.verdict.evidence import (
    ALIVE,
    CERTAIN,
    GUESS,
    LIKELY,
    Evidence,
    Verdict,
    format_activities,
    wait_text,
)
from platform.plan.layout import format_count

LEAST_SECONDS = 2.5  # of a call, before which it is no standstill
LONG = 3.0  # times the usual step, likewise
UNKNOWN_SECONDS = 10.0  # likewise, of a call whose usual time nobody knows
SILENT_SECONDS = 1.5  # without an answer to the question for a heartbeat
ANSWER_SECONDS = 0.5  # in which a worker answers that question
STILL_SECONDS = 1.5  # in one place
BUSY = 0.2  # share of its time from which a worker is at work
PULSE_SECONDS = 10.0  # without a new live.json, from which on the driver itself stands still
_SILENCE = {  # state of a silent worker's process by the kernel's letter, "" if not known -> why it is silent
    "T": ("its process is stopped by a signal", CERTAIN),
    "Z": ("its process has ended", CERTAIN),
    "D": ("its process waits for a disk", LIKELY),
    "S": ("something holds its interpreter", LIKELY),
    "R": ("something holds its interpreter", LIKELY),
    "": ("its process is stopped, something holds its interpreter, or its node is cut off", LIKELY),
}
_SECTIONS = {"data": "data", "checkpoint": "storage"}  # sections of a step -> why they take long


def judge_pulse(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a driver that lives and has not written for long: it, or its storage, stands still."""
    live = evidence.live
    if live is None or evidence.driver != ALIVE or evidence.now - live.time < PULSE_SECONDS:
        return None
    silent = evidence.now - max(live.time, evidence.wrote)
    if silent < PULSE_SECONDS:  # the journal or the metrics are written: a reader's copy of live.json may be old
        return None
    line = f"the driver has written nothing for {silent:.0f} s, {evidence.owner}: it, or the storage of the run"
    line += f" directory, stands still in {live.call or live.doing or 'its start'}"
    return Verdict("driver", line, step=evidence.last_step, since=evidence.now - silent, sure=LIKELY, stack=live.stack)


def is_late(live: LiveState) -> bool:
    """Return True if the call under way lasts longer than it should, by the usual step of the run, for a verdict."""
    if not live.call:
        return False
    elapsed, step = live.time - live.called, live.call.startswith("step(")
    if step and live.usual is not None:
        return elapsed >= max(LEAST_SECONDS, LONG * live.usual)
    return elapsed >= UNKNOWN_SECONDS


def is_call_stalled(evidence: Evidence) -> bool:
    """Return True if the call under way lasts too long."""
    return bool(evidence.live and evidence.now - evidence.live.time < PULSE_SECONDS and is_late(evidence.live))


def judge_call(evidence: Evidence) -> Verdict | None:
    """Return the verdict on the call under way if it lasts too long: on the worker that the others wait for."""
    live = evidence.live
    if live is None or not live.call or not live.workers or evidence.now - live.time >= PULSE_SECONDS:
        return None
    workers = [worker for worker in live.workers if not worker.answered]
    first = live.call.startswith("step(") and live.usual is None and live.time - live.called >= LEAST_SECONDS
    judges = [_judge_silent, _judge_blocked, _judge_busy, _judge_all_waiting]
    judges = judges if is_late(live) else judges[:2] if first else []
    return next(filter(None, (judged(evidence, live, workers) for judged in judges)), None)


def _blame_worker(
    evidence: Evidence, live: LiveState, worker: SeenWorker, why: str, what: str, seconds: float, sure: str = LIKELY
) -> Verdict:
    """Return a verdict on one worker that the others wait for, with what these do as its details."""
    worker_name = evidence.name_worker(worker.rank, worker.number, worker.node)
    others = [(w.rank, w.activity) for w in live.workers if w.number != worker.number and w.activity]
    details, since = [f"seen: {line}" for line in format_activities(others)], live.time - seconds
    verdict = Verdict(why, f"{worker_name} {what}", step=live.step + 1, since=since, sure=sure, details=details)
    stack = worker.activity.stack if worker.activity else []
    return replace(verdict, rank=worker.rank, number=worker.number, node=worker.node, stack=stack)


def _judge_silent(evidence: Evidence, live: LiveState, workers: Sequence[SeenWorker]) -> Verdict | None:
    """Return the verdict on workers that answer no question for a heartbeat: one, or all of a node."""
    silent = [worker for worker in workers if worker.owes is not None and worker.owes >= SILENT_SECONDS]
    if not silent:
        return None
    if link := judge_cut_link(live):
        return link
    worker, owes = silent[0], silent[0].owes or 0.0
    if not worker.process and (link := judge_slow_link(live)) and link.node == worker.node.partition("/")[0]:
        return link  # its answers wait behind what its network is slow to carry
    of_node = [other for other in live.workers if other.node == worker.node]
    if len(of_node) > 1 and len(of_node) == len([s for s in silent if s.node == worker.node]):
        who = f"all {len(of_node)} workers on {worker.node.partition('/')[0]} give no sign of life"
        line = f"{who} for {owes:.1f} s in {live.call}: their node is cut off, lost or frozen"
        return Verdict("hung", line, node=worker.node, step=live.step + 1, since=live.time - owes, sure=LIKELY)
    reason, sure = _SILENCE.get(worker.process, _SILENCE[""])
    what = f"hung in {live.call}: no sign of life for {owes:.1f} s: {reason}"
    return _blame_worker(evidence, live, worker, "hung", what, owes, sure)


def _judge_blocked(evidence: Evidence, live: LiveState, workers: Sequence[SeenWorker]) -> Verdict | None:
    """Return the verdict on a worker that stands still, neither at work nor waiting for others."""
    for worker in workers:
        beat = worker.activity
        if beat and not (beat.waiting or beat.preparing) and beat.call and beat.seconds >= STILL_SECONDS:
            if beat.busy >= BUSY:
                continue
            where = f"in {beat.section}" if beat.section else "before its first section"
            if beat.section in _SECTIONS:
                what = f"waits in {live.call} for its {'data' if beat.section == 'data' else 'storage'}"
                return _blame_worker(evidence, live, worker, _SECTIONS[beat.section], what, beat.seconds)
            what = f"hung in {live.call}: blocked for {beat.seconds:.1f} s {where}"
            return _blame_worker(evidence, live, worker, "hung", what, beat.seconds)
    return None


def _judge_busy(evidence: Evidence, live: LiveState, workers: Sequence[SeenWorker]) -> Verdict | None:
    """Return the verdict on workers that compute while others have long waited for them."""
    busy = [worker for worker in workers if worker.activity and not worker.activity.waiting]
    waiting = [worker for worker in live.workers if worker not in busy]
    if not busy or busy[0].activity is None:
        return None
    beat = busy[0].activity
    if beat.preparing:
        return None
    where = f" in {beat.section}" if beat.section else ""
    if not waiting:
        line = f"{live.call} takes {live.time - live.called:.1f} s: {format_count(len(busy), 'worker')} at work{where}"
        return Verdict("slow", line, step=live.step + 1, since=live.called, sure=GUESS, stack=beat.stack)
    what = f"is slow in {live.call}: at work{where} while {format_count(len(waiting), 'other')} wait"
    return _blame_worker(evidence, live, busy[0], "slow", what, beat.seconds)


def _judge_all_waiting(evidence: Evidence, live: LiveState, workers: Sequence[SeenWorker]) -> Verdict | None:
    """Return the verdict on workers that all wait for each other: a link, or ranks that wait for different things."""
    if link := judge_cut_link(live) or judge_slow_link(live) or ended_runs.judge_slowest_link(live):
        return link
    beats = [(worker, worker.activity) for worker in workers if worker.activity]
    if len(beats) < len(workers) or any((worker.owes or 0.0) >= ANSWER_SECONDS for worker in workers):
        return None  # they may wait for the one that says nothing, which is soon known
    if not beats:
        return None
    devices = [worker for worker, beat in beats if beat.device and not beat.device_waits]
    if devices and len(devices) < len(beats):
        beat = devices[0].activity
        what = f"hung in {live.call}: its device is at work in {beat.device if beat else ''} while the others' wait"
        return _blame_worker(evidence, live, devices[0], "hung", what, beat.seconds if beat else 0.0)
    waits = {wait_text(beat.wait) if beat.wait else beat.section for _, beat in beats}
    seconds = min(beat.seconds for _, beat in beats)
    line = f"{live.call}: all {len(beats)} workers wait for each other, in {' and '.join(sorted(waits)[:3])}"
    details = [f"seen: {text}" for text in format_activities((worker.rank, beat) for worker, beat in beats)]
    stack = beats[0][1].stack
    since = live.time - seconds
    return Verdict("link", line, step=live.step + 1, since=since, sure=GUESS, details=details, stack=stack)


def judge_idle_driver(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a driver that has called no worker for long although the run trains."""
    live = evidence.live
    if live is None or live.call or live.doing != "training" or evidence.phase_word != "training":
        return None
    seconds = live.time - live.called
    if not live.called or seconds < max(UNKNOWN_SECONDS, LONG * (live.usual or 0.0)):
        return None
    where = f" in {live.stack[-1]}" if live.stack else ""
    line = f"the driver itself stands still after step {live.step}: no call of a worker for {seconds:.0f} s{where}"
    return Verdict("driver", line, step=live.step, since=live.called, sure=LIKELY, stack=live.stack)


def judge_slow_save(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a checkpoint that has been under way for long, by the durations of those before."""
    live = evidence.live
    if live is None or live.saving is None or live.saving_since is None:
        return None
    before = evidence.save_seconds
    seconds = live.time - live.saving_since
    if seconds < max(UNKNOWN_SECONDS, LONG * before):
        return None
    than = f", {before:.1f} s for the one before" if before else ""
    line = f"storage is slow: the checkpoint after step {live.saving} has taken {seconds:.0f} s{than}"
    return Verdict("storage", line, step=live.saving, since=live.saving_since, sure=LIKELY)


_USUAL = 32  # steps that are compared with those before
_FEW = 4  # the last steps, which are slow if
_SLOWER = 2.0  # times the median of those before
_FAR = 0.15  # of the median of all workers, by which a gauge of one must differ to be worth a line
_GAUGES = {  # -> its name for people, and how a number is shown
    "cpu": ("use of processors", "{:.2f}"),
    "delayed": ("wait for processors", "{:.0%}"),
    "gpu": ("utilisation", "{:.0%}"),
    "power": ("power", "{:.0f} W"),
    "temperature": ("temperature", "{:.0f} °C"),
}
_SHARE = 0.3  # of a step, from which on waiting for data or storage is what makes it slow
_WORKS = {  # sections of a rank's own work
    "forward": "its forward passes",
    "backward": "its backward passes",
    "optimizer": "its update",
    "data": "waiting for its data",
    "other": "work outside of passes, update and data",
}
_PARTS = {  # of a step's time -> why, and who is to blame
    "data": ("data", "waits for data"),
    "checkpoint": ("storage", "waits for what is saved"),
    "exposed_comm": ("link", "waits for collectives: a link or a node's network is slow"),
    "reduce": ("link", "waits for the sum of gradients: a link or a node's network is slow"),
}


def judge_waiting(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a run that waits for workers, after failures or at its start."""
    if not isinstance(evidence.phase_event, events.Waiting):
        return None
    waiting = evidence.phase_event
    failure = ended_runs.last_failure_clause(evidence)
    line = f"waits for workers, {waiting.alive} of which are there: {waiting.reason}{failure}"
    lost = evidence.last_event(events.NotStarted)
    details = [f"worker {lost.number} did not start: {lost.cause}"] if lost else []
    refusals = (e.reasons for e in evidence.last_driver_events if isinstance(e, events.Barred | events.Examined))
    details += [f"gets no seat: {reason}" for reason in dict.fromkeys(r for reasons in refusals for r in reasons)]
    return Verdict("places", line, step=evidence.last_step, since=waiting.time, details=details)


def judge_unrecovered_failure(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a run that is re-forming after the failure of a worker."""
    failure, first = evidence.last_event(events.Failure), evidence.last_event(events.FirstStep)
    if failure is None or (first and first.time >= failure.time):
        return None
    verdict = ended_runs.judge_failure(evidence, failure)
    return replace(verdict, line=f"{verdict.line}; the others re-form")


def judge_slow_worker(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a worker of this generation that is slower than its peers."""
    slow, forming = evidence.last_event(events.Slow), evidence.last_event(events.Forming)
    if slow is None or (forming and slow.time < forming.time):
        return None
    worker_name = evidence.name_worker(slow.rank, slow.number, slow.node)
    line = f"{worker_name} is slow: its own work takes {slow.ratio:.1f} times its stage's median"
    line += f", mostly in {_WORKS.get(slow.section, slow.section)}" if slow.section else ""
    details = [*_list_extreme_gauges(evidence, slow.rank), "elastic.replace_slow=true gives its seat to a spare"]
    return Verdict("slow", line, rank=slow.rank, number=slow.number, node=slow.node, since=slow.time, details=details)


def _list_extreme_gauges(evidence: Evidence, rank: int) -> Iterator[str]:
    """Yield a line for each gauge in whose newest reading a worker of the run is far from the others."""
    row: Mapping[str, Any] = evidence.rows[-1] if evidence.rows else {}
    numbers, ranks = row.get("workers"), row.get("worker_ranks")
    if not isinstance(numbers, dict) or not isinstance(ranks, dict):  # anybody may have written them
        return
    for gauge, (word, shown) in _GAUGES.items():
        for end, most in (("min", "lowest"), ("max", "highest")):
            number, usual = numbers.get(f"{gauge}/{end}"), numbers.get(f"{gauge}/median")
            if ranks.get(f"{gauge}/{end}") != rank or not (isinstance(number, float) and isinstance(usual, float)):
                continue
            if abs(number - usual) > _FAR * abs(usual):
                yield f"{most} {word} of all workers: {shown.format(number)}, the median is {shown.format(usual)}"


def judge_busy_processors(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a run whose workers' threads wait for processors, and so for each other."""
    line = describe_busy_processors(evidence.rows[-1].get("workers")) if evidence.rows else ""
    return Verdict("slow", line, step=evidence.last_step, since=evidence.wrote, sure=LIKELY) if line else None


def judge_failed_saves(evidence: Evidence) -> Verdict | None:
    """Return the verdict on checkpoints that fail, if none has been written since."""
    failed, saved = evidence.last_event(events.CheckpointFailed), evidence.last_event(events.Checkpoint)
    return None if failed is None or (saved and saved.time > failed.time) else judge_storage(evidence, failed)


def judge_bad_loss(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a loss spike in one of the run's last steps."""
    spike = evidence.last_event(events.Spike)
    return judge_spike(evidence, spike) if spike and spike.step >= evidence.last_step - _USUAL else None


def judge_slow_steps(evidence: Evidence) -> Verdict | None:
    """Return the verdict on steps that have become slow: the part of a step that has grown, or that takes most."""
    rows = [row for row in evidence.rows if row.get("step_seconds") and isinstance(row.get("seconds"), dict)]
    rows = [row for row in rows if _is_same_work(row, rows[-1])][1:]  # the first one is cold
    if len(rows) < 2 * _FEW:
        return None
    last, before = rows[-_FEW:], rows[-_USUAL:-_FEW]
    now, then = (median(row["step_seconds"] for row in some) for some in (last, before))
    parts = last[-1]["seconds"]
    grown = {part: _median_part_seconds(last, part) - _median_part_seconds(before, part) for part in parts}
    part = max(grown, key=lambda name: grown[name])
    if now < _SLOWER * then:
        part = max(("data", "checkpoint"), key=lambda name: _median_part_seconds(last, name))
        if _median_part_seconds(last, part) < _SHARE * now:
            return None
    why, what = _PARTS.get(part, ("slow", f"spends its time in {part}"))
    line = f"steps take {now:.3g} s, {then:.3g} s before: a step {what} ({_median_part_seconds(last, part):.3g} s)"
    return Verdict(why, line, step=evidence.last_step, since=evidence.wrote, sure=LIKELY)


def _is_same_work(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if two rows of metrics are of steps that a verdict may compare: the same work on the same mesh."""
    first, last = ((r.get("generation"), r.get("length"), _count_samples(r)) for r in (row, other))
    return first == last


def _count_samples(row: Mapping[str, Any]) -> int:
    """Return the samples of a step, by its row of metrics, for the verdict on slow steps; 0 if it is not known."""
    first, end = row.get("samples") or (0, 0)
    return int(end - first)


def _median_part_seconds(rows: Sequence[Mapping[str, Any]], part: str) -> float:
    """Return the median seconds that steps spent in a part, by rows of metrics, for the verdict on slow steps."""
    return median(row["seconds"].get(part, 0.0) for row in rows)


JUDGES: tuple[Callable[[Evidence], Verdict | None], ...] = (
    ended_runs.judge_end,
    ended_runs.judge_driver,
    judge_pulse,
    judge_call,
    judge_idle_driver,
    judge_waiting,
    judge_unrecovered_failure,
    judge_failed_saves,
    judge_slow_save,
    judge_slow_worker,
    ended_runs.judge_links,
    judge_busy_processors,
    judge_slow_steps,
    judge_bad_loss,
)
_OF_A_RUN = JUDGES.index(ended_runs.judge_driver) + 1  # the judges from here on ask about a run that goes on


def judge_run(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a run: the culprit of its end, its standstill or its slowness; None if all is well."""
    judges = JUDGES[: _OF_A_RUN if evidence.end_event else None]
    return next(filter(None, (judged(evidence) for judged in judges)), None)

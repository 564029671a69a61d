"""Verdicts on a run that goes on, from its journal and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from platform.monitor.records import events
from platform.monitor.verdict.ended import because_of_failure, of_failure, of_spike, of_storage
from platform.monitor.verdict.evidence import Evidence
from platform.monitor.verdict.verdict import LIKELY, Verdict

_USUAL = 32  # steps that are compared with those before
_FEW = 4  # the last steps, which are slow if
_SLOWER = 2.0  # times the median of those before
_FAR = 0.15  # of the median of all workers, by which a gauge of one must differ to be worth a line
_GAUGES = {  # -> its name for people, and how a number is shown
    "cpu": ("use of processors", "{:.2f}"),
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


def of_waiting(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a run that waits for workers, after failures or at its start."""
    if not isinstance(evidence.phase, events.Waiting):
        return None
    waiting = evidence.phase
    line = f"waits for workers, {waiting.alive} of which are there: {waiting.reason}{because_of_failure(evidence)}"
    lost = evidence.last(events.NotStarted)
    details = [f"worker {lost.number} did not start: {lost.cause}"] if lost else []
    details += [f"gets no seat: {line}" for line in _left_out(evidence)]
    return Verdict("places", line, step=evidence.step, since=waiting.time, details=details)


def _left_out(evidence: Evidence) -> list[str]:
    """Return why workers of the run's last driver get no seat, a line each."""
    found = [e.reasons for e in evidence.life if isinstance(e, events.Barred | events.Examined)]
    return list(dict.fromkeys(line for lines in found for line in lines))


def of_recovery(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a run that is re-forming after the failure of a worker."""
    failure, first = evidence.last(events.Failure), evidence.last(events.FirstStep)
    if failure is None or (first and first.time >= failure.time):
        return None
    found = of_failure(evidence, failure)
    return Verdict(**vars(found) | {"line": f"{found.line}; the others re-form"})


def of_slow_worker(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a worker of this generation that is slower than its peers."""
    slow, forming = evidence.last(events.Slow), evidence.last(events.Forming)
    if slow is None or (forming and slow.time < forming.time):
        return None
    who = evidence.name(slow.rank, slow.number, slow.node)
    line = f"{who} is slow: its own work takes {slow.ratio:.1f} times its stage's median"
    line += f", mostly in {_WORKS.get(slow.section, slow.section)}" if slow.section else ""
    details = [*_extremes_of(evidence, slow.rank), "elastic.replace_slow=true gives its seat to a spare"]
    return Verdict("slow", line, rank=slow.rank, number=slow.number, node=slow.node, since=slow.time, details=details)


def _extremes_of(evidence: Evidence, rank: int) -> Iterator[str]:
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


def of_bad_save(evidence: Evidence) -> Verdict | None:
    """Return the verdict on checkpoints that fail, if none has been written since."""
    failed, saved = evidence.last(events.CheckpointFailed), evidence.last(events.Checkpoint)
    if failed is None or (saved and saved.time > failed.time):
        return None
    return of_storage(evidence, failed)


def of_bad_loss(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a loss spike in one of the run's last steps."""
    spike = evidence.last(events.Spike)
    return of_spike(evidence, spike) if spike and spike.step >= evidence.step - _USUAL else None


def of_slow_steps(evidence: Evidence) -> Verdict | None:
    """Return the verdict on steps that have become slow: the part of a step that has grown, or that takes most."""
    rows = [row for row in evidence.rows if row.get("step_seconds") and isinstance(row.get("seconds"), dict)]
    rows = [row for row in rows if _alike(row, rows[-1])][1:]  # the first one is cold
    if len(rows) < 2 * _FEW:
        return None
    last, before = rows[-_FEW:], rows[-_USUAL:-_FEW]
    now, then = (median(row["step_seconds"] for row in some) for some in (last, before))
    grown = {part: _seconds_in(last, part) - _seconds_in(before, part) for part in last[-1]["seconds"]}
    part = max(grown, key=lambda name: grown[name])
    if now < _SLOWER * then:
        part = max(("data", "checkpoint"), key=lambda name: _seconds_in(last, name))
        if _seconds_in(last, part) < _SHARE * now:
            return None
    why, what = _PARTS.get(part, ("slow", f"spends its time in {part}"))
    line = f"steps take {now:.3g} s, {then:.3g} s before: a step {what} ({_seconds_in(last, part):.3g} s)"
    return Verdict(why, line, step=evidence.step, since=evidence.wrote, sure=LIKELY)


def _alike(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if two rows of metrics are of steps that do the same work on the same mesh."""
    first, last = ((r.get("generation"), r.get("length"), _samples(r)) for r in (row, other))
    return first == last


def _samples(row: Mapping[str, Any]) -> int:
    """Return the number of samples of a step, of its row of metrics; 0 if it is not known."""
    first, end = row.get("samples") or (0, 0)
    return int(end - first)


def _seconds_in(rows: Sequence[Mapping[str, Any]], part: str) -> float:
    """Return the median seconds that steps spent in a part, of rows of metrics."""
    return median(row["seconds"].get(part, 0.0) for row in rows)

"""Facts of a run that was looked at: as plain data, and as a table for people."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from platform.config.key import format_hms
from platform.monitor import events
from platform.monitor.events import End
from platform.monitor.goodput import compute_goodput
from platform.monitor.verdict.ended_runs import judge_failure
from platform.monitor.verdict.evidence import GONE, STOPPED, Verdict
from platform.monitor.verdict.live_runs import is_call_stalled
from platform.plan.layout import format_count
from platform.status.seen_run import Look

_PIDS_SHOWN = 8  # process ids in the row of a node
_RATE_STEPS = 32  # last steps, whose median is the rate


def collect_run_facts(look: Look) -> dict[str, Any]:
    """Return a run's status: state, step, rate, time left, losses, mesh, checkpoint, goodput, as plain data. Unknown
    ones are None."""
    evidence, last = look.evidence, dict(look.evidence.rows[-1]) if look.evidence.rows else {}
    recent = [row for row in evidence.rows if row.get("step_seconds")][-_RATE_STEPS:]
    seconds = median(row["step_seconds"] for row in recent) if recent else None
    rates = [row["tokens_per_second"] for row in recent if row.get("tokens_per_second")]
    left = (evidence.steps - evidence.last_step) * seconds if seconds and evidence.steps else None
    saved = next((e for e in reversed(evidence.journal) if isinstance(e, events.Checkpoint)), None)
    validated: dict[str, Any] = next((dict(row) for row in reversed(evidence.rows) if row.get("val_loss")), {})
    forming, cost = evidence.last_event(events.Forming), compute_goodput(evidence.journal)
    return {
        "state": state_word(look),
        "since": evidence.phase_event.time if evidence.phase_event else None,
        "driver": evidence.owner or None,
        "driver_state": evidence.driver,
        "wrote": evidence.end_event.time if evidence.end_event else evidence.wrote or None,
        "step": evidence.last_step,
        "steps": evidence.steps,
        "step_seconds": seconds,
        "tokens_per_second": median(rates) if rates else None,
        "seconds_left": None if evidence.end_event or look.verdict and look.verdict.attention else left,
        "loss": last.get("loss"),
        "val_loss": validated.get("val_loss"),
        "val_step": validated.get("step"),
        "generation": forming.generation if forming else None,
        "workers": forming.world_size if forming else None,
        "processes": _list_worker_processes(look),
        "mesh": forming.mesh if forming else None,
        "plan": forming.plan if forming else None,
        "checkpoint_step": saved.step if saved else None,
        "checkpoint": saved.directory if saved else None,
        "checkpoint_time": saved.time if saved else None,
        "snapshot_step": _last_snapshot_step(look),
        "goodput": cost.goodput if evidence.end_event else None,
        "last_failure": failure.plain_fields() if (failure := last_failure_verdict(look)) else None,
        "failures": cost.failures,
        "restarts": cost.restarts,
        "steps_lost": cost.steps_lost,
        "torn": look.torn,
    }


def _list_worker_processes(look: Look) -> list[dict[str, Any]]:
    """Return, for a run's status, rank, process id and node of each worker; [] once its driver has ended."""
    formed, runs = look.evidence.last_event(events.Formed), not look.evidence.end_event and look.evidence.driver != GONE
    return [{name: w.get(name) for name in ("rank", "pid", "node")} for w in formed.workers] if formed and runs else []


def state_word(look: Look) -> str:
    """Return the state in a run's status in a word or two: forming, training, re-forming, waiting for workers, ended,
    died, ..."""
    evidence = look.evidence
    if isinstance(evidence.end_event, End):
        return f"ended: {evidence.end_event.word.replace('_', ' ')}"
    if evidence.end_event:
        return "ended: refused"
    if evidence.driver == GONE and evidence.last_driver_events:
        return "died"
    if evidence.driver == STOPPED:
        return "stopped"
    if evidence.live and is_call_stalled(evidence):
        return "stalled"
    live, phase = evidence.live, evidence.phase_event
    if live and live.doing and phase and live.time >= phase.time:
        return live.doing
    return evidence.phase_word or "starting"


def _last_snapshot_step(look: Look) -> int | None:
    """Return, for a run's status, the last step in the workers' memory, None if there is none or they are gone."""
    live, runs = look.evidence.live, not look.evidence.end_event and look.evidence.driver != GONE
    if live and live.held and runs:
        return live.held
    snapshot_every = look.config.elastic.snapshot_every if look.config else 0
    if not runs or not isinstance(snapshot_every, int) or not snapshot_every:
        return None
    return look.evidence.last_step // snapshot_every * snapshot_every or None


def list_status_rows(look: Look) -> Iterator[tuple[str, str]]:
    """Yield the table that shows a run's status, as (name, value); rows that nothing is known of are left out."""
    f, now = collect_run_facts(look), look.evidence.now
    yield "run", look.directory
    yield "state", f["state"] + (f", driver {f['driver']}" if f["driver"] and not look.evidence.end_event else "")
    if f["wrote"]:
        yield "ended" if look.evidence.end_event else "wrote last", ago_text(now, f["wrote"])
    yield "step", _progress_row(f)
    if f["loss"] is not None:
        validation = f", validation {f['val_loss']:.4f} at step {f['val_step']}" if f["val_loss"] is not None else ""
        yield "loss", f"{f['loss']:.4f}{validation}"
    if f["workers"]:
        axes = " x ".join(f"{axis} {n}" for axis, n in f["mesh"].items() if n > 1)
        scheme = f", {look.plan['scheme']}" if isinstance(look.plan.get("scheme"), str) else ""
        workers = format_count(f["workers"], "worker")
        yield "plan", f"generation {f['generation']}: {workers}{axes and ', '}{axes}{scheme}"
    for node in dict.fromkeys(str(w["node"]) for w in f["processes"]):
        pids = [f"{w['pid']} (rank {w['rank']})" for w in f["processes"] if str(w["node"]) == node]
        more = f" and {len(pids) - _PIDS_SHOWN} more" if len(pids) > _PIDS_SHOWN else ""
        yield "processes", f"{', '.join(pids[:_PIDS_SHOWN])}{more} on {node}"
    if f["checkpoint"]:
        yield "checkpoint", f"step {f['checkpoint_step']}, {ago_text(now, f['checkpoint_time'])}, {f['checkpoint']}"
    elif f["step"]:
        yield "checkpoint", "none is recorded"
    if f["snapshot_step"]:
        yield "snapshot", f"step {f['snapshot_step']}, in the workers' memory"
    if f["failures"] or f["restarts"] or f["goodput"] is not None:
        share = [f"{f['goodput']:.1%}"] if f["goodput"] is not None else []
        again = [f"{format_count(f['restarts'], 'restart')} of the driver"] if f["restarts"] else []
        lost = [format_count(f["failures"], "failure"), *again, f"{format_count(f['steps_lost'], 'step')} lost"]
        yield "goodput", ", ".join([*share, *lost])
    yield from _recovery_row(look)
    yield from (("torn", line) for line in look.torn)


def _progress_row(f: dict[str, Any]) -> str:
    """Format the row of a run's status on its step, rate and time left."""
    text = str(f["step"]) + (f" of {f['steps']}" if f["steps"] else "")
    if f["step_seconds"]:
        text += f", {f['step_seconds']:.3g} s each"
    if f["tokens_per_second"]:
        text += f", {f['tokens_per_second']:,.0f} tokens/s"
    return text + (f", {format_hms(round(f['seconds_left']))} left" if f["seconds_left"] is not None else "")


def last_failure_verdict(look: Look) -> Verdict | None:
    """Return, for a run's status, the verdict on a worker's last failure under its last driver, got over or not."""
    failure = look.evidence.last_event(events.Failure)
    return judge_failure(look.evidence, failure) if failure else None


def _recovery_row(look: Look) -> Iterator[tuple[str, str]]:
    """Yield the row of a run's status on the last failure that it has got over."""
    evidence = look.evidence
    if failure := evidence.last_event(events.Failure):
        steps = (e for e in evidence.last_driver_events if isinstance(e, events.FirstStep) and e.time > failure.time)
        if first := next(steps, None):
            verdict = judge_failure(evidence, failure)
            took = f"; training again after {first.time - failure.time:.2f} s"
            yield "got over", f"{verdict.line}, {ago_text(evidence.now, failure.time)}{took}"


def ago_text(now: float, moment: float) -> str:
    """Return in words how long ago a moment in a run's status was, both in seconds since the epoch."""
    seconds = max(0.0, now - moment)
    text = f"{seconds:.0f} s" if seconds < 100 else format_hms(int(seconds))
    return f"{text} ago" if seconds < 86400 else f"on {clock_text(moment)}"


def clock_text(moment: float) -> str:
    """Format a moment in a run's status, in seconds since the epoch, as a local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))

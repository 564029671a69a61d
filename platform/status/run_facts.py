"""Facts of a run that was looked at: as plain data, and as a table for people."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from platform.config.key import hms
from platform.monitor import events
from platform.monitor.events import End
from platform.monitor.verdict.ended_runs import of_failure
from platform.monitor.verdict.evidence import GONE, STOPPED, Verdict
from platform.monitor.verdict.live_runs import stalled_call
from platform.plan.layout import count_of
from platform.status.seen_run import Look, goodput_so_far

_RATE_STEPS = 32  # last steps, whose median is the rate


def facts(found: Look) -> dict[str, Any]:
    """Return how a run is: state, step, rate, time left, losses, mesh, checkpoint, goodput, as plain data. Unknown ones
    are None."""
    evidence, last = found.evidence, dict(found.evidence.rows[-1]) if found.evidence.rows else {}
    recent = [row for row in evidence.rows if row.get("step_seconds")][-_RATE_STEPS:]
    seconds = median(row["step_seconds"] for row in recent) if recent else None
    rates = [row["tokens_per_second"] for row in recent if row.get("tokens_per_second")]
    left = (evidence.steps - evidence.step) * seconds if seconds and evidence.steps else None
    saved = next((e for e in reversed(evidence.journal) if isinstance(e, events.Checkpoint)), None)
    validated: dict[str, Any] = next((dict(row) for row in reversed(evidence.rows) if row.get("val_loss")), {})
    forming, cost = evidence.last(events.Forming), goodput_so_far(evidence)
    return {
        "state": state_word(found),
        "since": evidence.phase.time if evidence.phase else None,
        "driver": evidence.owner or None,
        "driver_state": evidence.driver,
        "wrote": evidence.end.time if evidence.end else evidence.wrote or None,
        "step": evidence.step,
        "steps": evidence.steps,
        "step_seconds": seconds,
        "tokens_per_second": median(rates) if rates else None,
        "seconds_left": None if evidence.end or found.verdict and found.verdict.attention else left,
        "loss": last.get("loss"),
        "val_loss": validated.get("val_loss"),
        "val_step": validated.get("step"),
        "generation": forming.generation if forming else None,
        "workers": forming.world_size if forming else None,
        "mesh": forming.mesh if forming else None,
        "plan": forming.plan if forming else None,
        "checkpoint_step": saved.step if saved else None,
        "checkpoint": saved.directory if saved else None,
        "checkpoint_time": saved.time if saved else None,
        "snapshot_step": _snapshot(found),
        "goodput": cost.goodput if cost and evidence.end else None,
        "last_failure": failure.plain() if (failure := last_failure(found)) else None,
        "failures": cost.failures if cost else 0,
        "restarts": cost.restarts if cost else 0,
        "steps_lost": cost.steps_lost if cost else 0,
        "torn": found.torn,
    }


def state_word(found: Look) -> str:
    """Return a run's state in a word or two: forming, training, re-forming, waiting for workers, ended, died, ..."""
    evidence = found.evidence
    if isinstance(evidence.end, End):
        return f"ended: {evidence.end.word.replace('_', ' ')}"
    if evidence.end:
        return "ended: refused"
    if evidence.driver == GONE and evidence.life:
        return "died"
    if evidence.driver == STOPPED:
        return "stopped"
    if evidence.live and stalled_call(evidence):
        return "stalled"
    if evidence.live and evidence.live.doing and evidence.phase and evidence.live.time >= evidence.phase.time:
        return evidence.live.doing
    return evidence.phase_word or "starting"


def _snapshot(found: Look) -> int | None:
    """Return the last step that is in the workers' memory, None if there is none or the workers are gone."""
    live = found.evidence.live
    if live and live.held and not found.evidence.end and found.evidence.driver != GONE:
        return live.held
    every = found.config.elastic.snapshot_every if found.config else 0
    if found.evidence.end or found.evidence.driver == GONE or not isinstance(every, int) or not every:
        return None
    return found.evidence.step // every * every or None


def rows_of(found: Look) -> Iterator[tuple[str, str]]:
    """Yield the table that shows how a run is, as (name, value); rows that nothing is known of are left out."""
    f, now = facts(found), found.evidence.now
    yield "run", found.directory
    yield "state", f["state"] + (f", driver {f['driver']}" if f["driver"] and not found.evidence.end else "")
    if f["wrote"]:
        yield "ended" if found.evidence.end else "wrote last", ago_text(now, f["wrote"])
    yield "step", _progress_row(f)
    if f["loss"] is not None:
        validation = f", validation {f['val_loss']:.4f} at step {f['val_step']}" if f["val_loss"] is not None else ""
        yield "loss", f"{f['loss']:.4f}{validation}"
    if f["workers"]:
        axes = " x ".join(f"{axis} {n}" for axis, n in f["mesh"].items() if n > 1)
        scheme = f", {found.plan['scheme']}" if isinstance(found.plan.get("scheme"), str) else ""
        yield "plan", f"generation {f['generation']}: {count_of(f['workers'], 'worker')}{axes and ', '}{axes}{scheme}"
    if f["checkpoint"]:
        yield (
            "checkpoint",
            f"step {f['checkpoint_step']}, {ago_text(now, f['checkpoint_time'])}, {f['checkpoint']}",
        )
    elif f["step"]:
        yield "checkpoint", "none is recorded"
    if f["snapshot_step"]:
        yield "snapshot", f"step {f['snapshot_step']}, in the workers' memory"
    if f["failures"] or f["restarts"] or f["goodput"] is not None:
        share = [f"{f['goodput']:.1%}"] if f["goodput"] is not None else []
        again = [f"{count_of(f['restarts'], 'restart')} of the driver"] if f["restarts"] else []
        lost = [count_of(f["failures"], "failure"), *again, f"{count_of(f['steps_lost'], 'step')} lost"]
        yield "goodput", ", ".join([*share, *lost])
    yield from _failure_got_over(found)
    yield from (("torn", line) for line in found.torn)


def _progress_row(f: dict[str, Any]) -> str:
    """Format the row on a run's step, rate and time left."""
    text = str(f["step"]) + (f" of {f['steps']}" if f["steps"] else "")
    if f["step_seconds"]:
        text += f", {f['step_seconds']:.3g} s each"
    if f["tokens_per_second"]:
        text += f", {f['tokens_per_second']:,.0f} tokens/s"
    return text + (f", {hms(round(f['seconds_left']))} left" if f["seconds_left"] is not None else "")


def last_failure(found: Look) -> Verdict | None:
    """Return the verdict on the last failure of a worker under the run's last driver, got over or not."""
    failure = found.evidence.last(events.Failure)
    return of_failure(found.evidence, failure) if failure else None


def _failure_got_over(found: Look) -> Iterator[tuple[str, str]]:
    """Yield the row on the last failure that a run has got over."""
    evidence = found.evidence
    if failure := evidence.last(events.Failure):
        steps = (e for e in evidence.life if isinstance(e, events.FirstStep) and e.time > failure.time)
        if first := next(steps, None):
            verdict = of_failure(evidence, failure)
            took = f"; training again after {first.time - failure.time:.2f} s"
            yield "got over", f"{verdict.line}, {ago_text(evidence.now, failure.time)}{took}"


def ago_text(now: float, moment: float) -> str:
    """Return in words how long ago a moment was, both in seconds since the epoch."""
    seconds = max(0.0, now - moment)
    text = f"{seconds:.0f} s" if seconds < 100 else hms(int(seconds))
    return f"{text} ago" if seconds < 86400 else f"on {clock_text(moment)}"


def clock_text(moment: float) -> str:
    """Format a moment, in seconds since the epoch, as a local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))

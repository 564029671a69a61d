"""Cost of failures: goodput, steps lost and recovery times, computed from the events in `journal.jsonl`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, isfinite
from statistics import median
from typing import Any, NamedTuple

from platform.config.fields import Eval
from platform.monitor import events
from platform.monitor.events import Goodput, JournalEvent
from platform.plan.layout import format_count


def compute_goodput(journal: Iterable[JournalEvent]) -> Goodput:
    """Compute what failures cost a run from its journal's events, in order: goodput, steps lost, and recovery times.
    Useful seconds are the seconds of committed steps, less the steps that a rollback repeats or a driver leaves unsaved
    at its end or death."""
    failures = transitions = lost = restarts = 0
    useful = seconds = restarting = 0.0
    unsaved = 0.0  # of the useful seconds, those after the last checkpoint
    restarted: float | None = None  # start of a driver that took over and that no step has followed yet
    recoveries: list[float] = []
    failed: list[float] = []  # times of the failures that no step has followed yet
    begin: float | None = None
    last = 0.0  # time of the last event
    for event in journal:
        if isinstance(event, events.Starting):
            restarted = None
            if begin is not None:  # the previous driver was killed: it has no end event
                seconds += last - begin
                useful -= unsaved
                restarts, restarted = restarts + 1, event.time
            begin, unsaved = event.time, 0.0
            failed.clear()  # the previous driver did not survive these
        if begin is None:
            continue
        last = event.time
        if isinstance(event, events.Committed):
            useful += event.useful_seconds or 0.0
            unsaved = 0.0 if isinstance(event, events.Checkpoint) else unsaved + (event.useful_seconds or 0.0)
        if isinstance(event, events.RolledBack | events.End):
            useful -= event.lost_seconds or 0.0
            unsaved -= event.lost_seconds or 0.0
        if isinstance(event, events.RolledBack | events.End | events.TookOver):
            lost += event.steps_lost or 0
        if isinstance(event, events.Failure):
            failures += 1
            failed.append(event.time)
        elif isinstance(event, events.Reforming):
            transitions += 1
        elif isinstance(event, events.FirstStep):
            recoveries += [event.time - then for then in failed]
            failed.clear()
            restarting += event.time - restarted if restarted is not None else 0.0
            restarted = None
        elif isinstance(event, events.End):
            seconds += event.time - begin
            begin = None
    if begin is not None:  # the last driver is running, or was killed: count up to its last event
        seconds += last - begin
    return Goodput(
        failures=failures,
        transitions=transitions,
        steps_lost=lost,
        recoveries=recoveries,
        seconds=seconds,
        useful_seconds=useful,
        goodput=useful / seconds if seconds else 0.0,
        restarts=restarts,
        restart_seconds=restarting,
    )


def cost_line(cost: Goodput) -> str:
    """Format what failures cost a run as one line for people: failures of workers survived, restarts of the driver,
    steps lost, recovery times, goodput."""
    recovery = ""
    if cost.recoveries:
        recovery = f"; to the first new step {median(cost.recoveries):.2f} s median, {max(cost.recoveries):.2f} s"
        recovery += " longest"
    survived = len(cost.recoveries)
    of = f"{survived} of " if survived < cost.failures else ""
    failures = f"{of}{format_count(cost.failures, 'failure')} survived"
    lost = f"{format_count(cost.steps_lost, 'step')} lost"
    often = f"{format_count(cost.restarts, 'restart')} of the driver"
    restarts = f", {often} ({cost.restart_seconds:.2f} s to the first new step)" if cost.restarts else ""
    return f"{failures}{restarts}, {lost}{recovery}; goodput {cost.goodput:.1%} of {cost.seconds:.1f} s"


# Summary of a run for people: its journal as a few lines with times.


def _format_mesh(mesh: dict[str, int]) -> str:
    """Format a mesh (axis -> size) for the story of a run, without the axes of size 1."""
    return " x ".join(f"{axis} {n}" for axis, n in mesh.items() if n > 1) or "1"


def _format_host(node: str) -> str:
    """Return " on HOST" for the story of a run, of a node in its journal, without Ray's own id; "" for none."""
    return f" on {host}" if (host := node.partition("/")[0]) else ""


def _last_line(text: str) -> str:
    """Return the last line of a failure's cause in the journal, for the story of a run."""
    return text.strip().rpartition("\n")[2]


def _fault(text: str) -> str:
    """Format an entry of elastic.faults, STEP:KIND:RANK[:SECTION], for the story: `kill rank 3 in backward`."""
    _, kind, rank, *section = text.split(":")
    return " in ".join([f"{kind} rank {rank}", *section])


# kind -> line of an event; others are left out, as are empty lines
LINES: dict[type[JournalEvent], Callable[[Any], str]] = {
    events.TookOver: lambda e: f"takes over from a driver that died after step {e.step}",
    events.Injected: lambda e: f"injected fault in step {e.step}: {', '.join(map(_fault, e.faults))}",
    events.Failure: lambda e: f"rank {e.rank}{_format_host(e.node)} {e.kind} in {e.method}: {_last_line(e.cause)}",
    events.Reforming: lambda e: e.reason,
    events.Released: lambda e: (
        "" if e.alive is None else f"released {format_count(e.alive, 'worker')} in {e.seconds:.2f} s"
    ),
    events.Examined: lambda e: f"left out: {'; '.join(e.reasons)}" if e.unsound else "",
    events.Waiting: lambda e: f"waits: {e.reason}",
    events.Forming: lambda e: (
        f"generation {e.generation}: {format_count(e.world_size, 'worker')}, {_format_mesh(e.mesh)}"
    ),
    events.Restored: lambda e: f"goes on after step {e.step}, from {e.source or 'storage'} in {e.seconds:.2f} s",
    events.Initialised: lambda e: f"starts from {e.weights}, read in {e.seconds:.2f} s",
    events.RolledBack: lambda e: f"{format_count(e.steps_lost, 'step')} to do again",
    events.LearnedOut: lambda e: (
        f"learns no more: the lowest val loss, {e.best_loss:.4f}, was after step {e.best_step}"
    ),
    events.FirstStep: lambda e: f"step {e.step} is done",
    events.Hiring: lambda e: f"{format_count(e.count, 'new worker')} starting",
    events.Slow: lambda e: f"rank {e.rank}{_format_host(e.node)} is slow: {e.ratio:.1f} times its stage's median",
    events.Notice: lambda e: f"{format_count(len(e.numbers), 'worker')} will be taken away",
    events.Spike: lambda e: f"step {e.step} has {e.number_text}: {e.policy}",
    events.Drained: lambda e: f"stopped by {e.signal} after step {e.step}",
    events.GaveUp: lambda e: f"gives up after step {e.step}",
    events.Done: lambda e: f"done: step {e.step}",
}


def tell_story(journal: Sequence[JournalEvent]) -> str:
    """Summarise a run under its last driver: a title, and a line for each event of the journal that LINES has text for,
    with the seconds since that driver's start."""
    start = max((i for i, event in enumerate(journal) if isinstance(event, events.Starting)), default=0)
    timed_texts = [(event.time, LINES[type(event)](event)) for event in journal[start:] if type(event) in LINES]
    lines = [f"{time - journal[start].time:9.2f}  {text}" for time, text in timed_texts if text]
    return "\n".join(["what happened (seconds since the start)", *lines])


# Early stopping: whether evaluations say that a run learns no more (`eval.patience`), from its rows of metrics alone,
# so that a run that was resumed decides as one that was not.


class Best(NamedTuple):
    """Lowest validation loss of a run, and the step after which it was measured; 0 and inf: there is none yet."""

    step: int
    loss: float


def check_early_stop(rows: Iterable[Mapping[str, Any]], e: Eval) -> Best | None:
    """Return a run's best evaluation if eval.patience evaluations in a row have not been better by more than
    eval.least_gain; else None. `rows`: rows of metrics.jsonl, in order."""
    best, worse = Best(0, inf), 0
    for row in rows:
        loss = row.get("val_loss")
        if not isinstance(loss, int | float):
            continue
        if loss < best.loss - e.least_gain:
            best, worse = Best(row["step"], loss), 0
        else:
            worse += 1
        if e.patience and worse >= e.patience:
            return best
    return None


def validation_losses(rows: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Return the finite validation losses in rows of metrics.jsonl, by step."""
    losses = {row["step"]: row.get("val_loss") for row in rows}
    return {step: loss for step, loss in losses.items() if isinstance(loss, int | float) and isfinite(loss)}

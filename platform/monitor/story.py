"""Summary of a run for people: its journal as a few lines with times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from platform.monitor.records import events
from platform.monitor.records.events import JournalEvent
from platform.plan.language.numbers import count_of


def _mesh(mesh: dict[str, int]) -> str:
    """Format a mesh (axis -> size) for the story of a run, without the axes of size 1."""
    return " x ".join(f"{axis} {n}" for axis, n in mesh.items() if n > 1) or "1"


def _on(node: str) -> str:
    """Return " on HOST" for the story of a run, of a node in its journal, without Ray's own id; "" for none."""
    return f" on {host}" if (host := node.partition("/")[0]) else ""


def _last_line(text: str) -> str:
    """Return the last line of a failure's cause in the journal, for the story of a run."""
    return text.strip().rpartition("\n")[2]


# kind -> line of an event; others are left out, as are empty lines
LINES: dict[type[JournalEvent], Callable[[Any], str]] = {
    events.TookOver: lambda e: f"takes over from a driver that died after step {e.step}",
    events.Injected: lambda e: f"on purpose, in step {e.step}: {', '.join(e.faults)}",
    events.Failure: lambda e: f"rank {e.rank}{_on(e.node)} {e.kind} in {e.method}: {_last_line(e.cause)}",
    events.Reforming: lambda e: e.reason,
    events.Released: lambda e: (
        "" if e.alive is None else f"{count_of(e.alive, 'worker')} left, free after {e.seconds:.2f} s"
    ),
    events.Examined: lambda e: f"left out: {'; '.join(e.reasons)}" if e.unsound else "",
    events.Waiting: lambda e: f"waits: {e.reason}",
    events.Forming: lambda e: f"generation {e.generation}: {count_of(e.world_size, 'worker')}, {_mesh(e.mesh)}",
    events.Restored: lambda e: f"goes on after step {e.step}, from {e.source or 'storage'} in {e.seconds:.2f} s",
    events.Initialised: lambda e: f"starts from {e.weights}, read in {e.seconds:.2f} s",
    events.RolledBack: lambda e: f"{count_of(e.steps_lost, 'step')} to do again",
    events.LearnedOut: lambda e: (
        f"learns no more: the lowest val loss, {e.best_loss:.4f}, was after step {e.best_step}"
    ),
    events.FirstStep: lambda e: f"step {e.step} is done",
    events.Hiring: lambda e: f"{count_of(e.count, 'new worker')} starting",
    events.Slow: lambda e: f"rank {e.rank}{_on(e.node)} is slow: {e.ratio:.1f} times its stage's median",
    events.Notice: lambda e: f"{count_of(len(e.numbers), 'worker')} will be taken away",
    events.Spike: lambda e: f"step {e.step} has {e.number}: {e.policy}",
    events.Drained: lambda e: f"stopped by {e.signal} after step {e.step}",
    events.GaveUp: lambda e: f"gives up after step {e.step}",
    events.Done: lambda e: f"done: step {e.step}",
}


def story(journal: Sequence[JournalEvent]) -> str:
    """Summarise a run under its last driver: a title, and a line for each event of the journal that LINES has text for,
    with the seconds since that driver's start."""
    start = max((i for i, event in enumerate(journal) if isinstance(event, events.Starting)), default=0)
    found = [(event.time, LINES[type(event)](event)) for event in journal[start:] if type(event) in LINES]
    lines = [f"{time - journal[start].time:9.2f}  {text}" for time, text in found if text]
    return "\n".join(["what happened (seconds since the start)", *lines])
